// Which devices there are, found through the CUDA driver alone, and whether this library has code for them.
#include <cstdlib>
#include <sstream>

#include "context.h"

#ifndef TRIVET_CUDA_ARCHITECTURES
#error "TRIVET_CUDA_ARCHITECTURES: the SMs that the kernels are built for, for example \"80 90a\""
#endif

namespace trivet::cuda {
namespace {

// An architecture with a suffix runs on that SM only ("a") or on its family ("f"); without one on later minors as well.
bool covers(const std::string& architecture, int major, int minor) {
  const int number = std::atoi(architecture.c_str());
  if (number / 10 != major) return false;
  return architecture.back() == 'a' ? number % 10 == minor : number % 10 <= minor;
}

// The built architecture whose code the device runs: its own one, else the last lower one of its family; "" = none.
std::string kernels_for(int major, int minor) {
  std::istringstream architectures(TRIVET_CUDA_ARCHITECTURES);
  std::string best;
  int best_minor = -1;
  for (std::string one; architectures >> one;) {
    const int own_minor = std::atoi(one.c_str()) % 10;
    if (covers(one, major, minor) && own_minor > best_minor) {
      best = one;
      best_minor = own_minor;
    }
  }
  return best;
}

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// Why cudaGetDeviceCount failed.
std::string no_driver(cudaError_t status) {
  int driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  if (status == cudaErrorNoDevice) {
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
    return "no CUDA device is visible" +
           (visible == nullptr ? "" : std::string(" (CUDA_VISIBLE_DEVICES=") + visible + ")");
  }
  if (driver == 0) return "no usable NVIDIA driver: none is installed";
  if (status == cudaErrorInsufficientDriver) {
    return "no usable NVIDIA driver: it supports CUDA " + version_text(driver) + ", this trivet needs " +
           version_text(runtime);
  }
  return std::string("no usable NVIDIA driver: ") + cudaGetErrorString(status);
}

}  // namespace

std::string check_device(int ordinal) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    cudaGetLastError();
    return no_driver(status);
  }
  if (ordinal < 0 || ordinal >= count) {
    return "device cuda:" + std::to_string(ordinal) + " does not exist: CUDA offers " + std::to_string(count) +
           " device(s)";
  }
  cudaDeviceProp properties{};
  if (cudaGetDeviceProperties(&properties, ordinal) != cudaSuccess) {
    return "device cuda:" + std::to_string(ordinal) + " does not answer: " + cudaGetErrorString(cudaGetLastError());
  }
  if (!kernels_for(properties.major, properties.minor).empty()) return "";
  return "device cuda:" + std::to_string(ordinal) + " (" + properties.name + ") is SM " +
         std::to_string(properties.major) + "." + std::to_string(properties.minor) +
         ", this trivet has kernels for SM " TRIVET_CUDA_ARCHITECTURES;
}

std::string describe_devices() {
  int driver = 0, runtime = 0, count = 0;
  cudaRuntimeGetVersion(&runtime);
  cudaDriverGetVersion(&driver);
  std::string json =
      "{\"architectures\": \"" TRIVET_CUDA_ARCHITECTURES "\", \"runtime_version\": " + std::to_string(runtime) +
      ", \"driver_version\": " + std::to_string(driver) + ", \"devices\": [";
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    cudaGetLastError();
    return json + "], \"error\": \"" + no_driver(status) + "\"}";
  }
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) {
      cudaGetLastError();
      continue;
    }
    json += std::string(i > 0 ? ", " : "") + "{\"ordinal\": " + std::to_string(i) + ", \"name\": \"" + properties.name +
            "\", \"sm\": " + std::to_string(properties.major * 10 + properties.minor) + ", \"kernels\": \"" +
            kernels_for(properties.major, properties.minor) + "\"" +
            ", \"total_memory\": " + std::to_string(properties.totalGlobalMem) +
            ", \"multiprocessors\": " + std::to_string(properties.multiProcessorCount) + ", \"refused\": \"" +
            check_device(i) + "\"}";
  }
  return json + "], \"error\": \"\"}";
}

}  // namespace trivet::cuda
