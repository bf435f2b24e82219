#!/bin/sh
# Run the kernel harness under qemu-user as CPUs that lack AVX (Nehalem) and AVX-512 (Haswell): an instruction of a tier
# that the CPU lacks ends the process. Needs qemu-x86_64(-static). Takes pytest arguments; PYTHON is the interpreter.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
python=$(command -v "${PYTHON:-python3}")
qemu=$(command -v qemu-x86_64-static || command -v qemu-x86_64) || {
  echo "qemu-x86_64 is not installed (Debian: qemu-user-static)" >&2
  exit 1
}
for cpu in Nehalem Haswell; do
  echo "CPU $cpu"
  "$qemu" -cpu "$cpu" "$python" -m pytest "$root/tests/kernels/test_matmul.py" -q -p no:cacheprovider -p no:xdist \
    -k "stated_bits or gated or embed or merged" "$@" 2>/dev/null
done
