#!/bin/sh
# Build the op library with AddressSanitizer and UndefinedBehaviorSanitizer and run the kernel harness on it.
# Takes pytest arguments; PYTHON and CXX choose the interpreter and the compiler (GCC).
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
cxx=${CXX:-g++}
build=$root/build/sanitize
cmake -S "$root" -B "$build" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DTRIVET_SANITIZE=address,undefined \
  -DCMAKE_CXX_COMPILER="$cxx" -DPython_EXECUTABLE="$(command -v "$python")" >/dev/null
cmake --build "$build" --parallel 2
# The interpreter is not instrumented: the runtime comes first by preload, and leaks of Python's own are none of ours.
# No fake stacks: GCC before 14 aligns them too little for 64-byte vectors (GCC bug 110027).
LD_PRELOAD="$($cxx -print-file-name=libasan.so) $($cxx -print-file-name=libubsan.so)" \
ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=0 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
TRIVET_CPU_LIBRARY="$build/backends/cpu/libtrivet_cpu.so" \
  "$python" -m pytest "$root/tests/kernels" -q -p no:cacheprovider \
  --ignore="$root/tests/kernels/test_session.py" --ignore="$root/tests/kernels/test_dispatch.py" "$@"
