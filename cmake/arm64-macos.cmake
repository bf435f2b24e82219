# Cross-compiles for macOS on Arm by zig (package ziglang of PyPI; its program `zig` must be on the PATH):
#   cmake -S . -B build/macos --toolchain cmake/arm64-macos.cmake -DTRIVET_CUDA=OFF
# zig brings the headers and stubs of macOS' C library; its C++ library is linked in.
set(CMAKE_SYSTEM_NAME Darwin)
set(CMAKE_SYSTEM_PROCESSOR arm64)
set(CMAKE_CXX_COMPILER zig c++)
set(CMAKE_CXX_COMPILER_TARGET aarch64-macos.11.0)  # the first macOS on Arm
set(CMAKE_SHARED_LINKER_FLAGS_INIT -s)
# Where programs look for the library: CMake, which asks the macOS that it runs on, would write the folder of the build.
set(CMAKE_BUILD_WITH_INSTALL_NAME_DIR ON)
set(CMAKE_INSTALL_NAME_DIR @rpath)
set(TRIVET_ARMV8_2 -mcpu=generic+v8_2a)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
