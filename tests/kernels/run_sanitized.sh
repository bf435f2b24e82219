#!/bin/sh
# Build the op library with AddressSanitizer and UndefinedBehaviorSanitizer and run the kernel tests on it.
# Takes pytest arguments; PYTHON chooses the interpreter, BUILD the build folder. The compiler is GCC.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
build=${BUILD:-$root/build/sanitize}
cmake -S "$root" -B "$build" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DTRIVET_SANITIZE=address,undefined -DTRIVET_CUDA=OFF \
  -DPython_EXECUTABLE="$(command -v "$python")"
cmake --build "$build" --parallel 2
# The interpreter is not instrumented: the runtime comes first by preload, libstdc++ with it, or AddressSanitizer finds no
# __cxa_throw. Leaks are not looked for: the interpreter keeps memory until its end. -s: a report must not die in pytest's
# capture. No fake stacks: GCC before 14 aligns them too little for 64-byte vectors (GCC bug 110027).
LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)" \
ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:detect_stack_use_after_return=0 UBSAN_OPTIONS=print_stacktrace=1 \
TRIVET_CPU_LIBRARY="$build/backends/cpu/libtrivet_cpu.so" \
  "$python" -m pytest -q -s -p no:cacheprovider "$root/tests/kernels" "$@"
