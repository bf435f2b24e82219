# Cross-compiles for Linux with musl on x86-64 by zig (package ziglang of PyPI; its program `zig` must be on the PATH):
#   cmake -S . -B build/musl --toolchain cmake/x86_64-linux-musl.cmake -DTRIVET_CUDA=OFF
# zig brings musl and compiles it; its C++ library is linked in, so the op library needs musl's libc.so alone.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR x86_64)
set(CMAKE_CXX_COMPILER zig c++)
set(CMAKE_CXX_COMPILER_TARGET x86_64-linux-musl)
set(CMAKE_SHARED_LINKER_FLAGS_INIT -s)  # the debug information of zig's libraries holds paths of this machine
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
