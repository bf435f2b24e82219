#!/bin/sh
# Run the kernel harness on emulated Arm CPUs without dot products (cortex-a53), with them (cortex-a76) and with matrix
# products (max), or on those of $CPUS. Takes pytest arguments. An instruction that the CPU lacks ends the process.
#
# Needs qemu-aarch64-static, the op library in build/aarch64 (cmake/aarch64-linux-gnu.cmake), and
#   ARM_ROOT   an unpacked arm64 system with Python 3.11, for example
#              mmdebstrap --variant=extract --arch=arm64 --include=python3,libstdc++6,ca-certificates bookworm DIR
#   ARM_SITE   a folder with onnx, onnxruntime, numpy, ml_dtypes, msgspec, tokenizers, hypothesis, pytest and
#              pytest-timeout for it: pip install --target DIR --only-binary=:all: --python-version 3.11
#              --platform manylinux_2_28_aarch64 --platform manylinux2014_aarch64 ...
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
: "${ARM_ROOT:?}" "${ARM_SITE:?}"
package=$root/build/aarch64/python
rm -rf "$package"
mkdir -p "$package"
cp -rL "$root/packaging/python/trivet" "$package/"
cp "$root/build/aarch64/backends/cpu/libtrivet_cpu.so" "$package/trivet/backends/cpu/"
export QEMU_LD_PREFIX="$ARM_ROOT" PYTHONPATH="$package:$ARM_SITE" PYTHONDONTWRITEBYTECODE=1 ORT_DISABLE_TELEMETRY=1
cd "$root"
for cpu in ${CPUS:-cortex-a53 cortex-a76 max}; do
  echo "CPU $cpu"
  # Programs that tests start are emulated too: binfmt_misc of an own namespace. Without /sys, as what it says about the
  # machine's real CPUs crashes onnxruntime's Arm code.
  QEMU_CPU=$cpu unshare --user --map-root-user --mount sh -euc '
    mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
    printf "%s" ":trivet:M::$1:$2:$(command -v qemu-aarch64-static):F" >/proc/sys/fs/binfmt_misc/register
    mount -t tmpfs none /sys
    shift 2
    exec "$@"' sh '\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00' \
    '\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff' \
    "$ARM_ROOT/usr/bin/python3.11" -m pytest -q -p no:cacheprovider -o "pythonpath=$package tests/tools" \
    --timeout 1800 tests/kernels "$@"
done
