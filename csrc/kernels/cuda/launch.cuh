// Launch configuration and launch errors.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>

#include "../types.h"

namespace extops::cuda {

constexpr int kThreads = 256;

// Enough blocks to fill any GPU several times over; kernels stride over what is beyond.
inline unsigned blocks_for(int64_t items, int64_t items_per_thread = 1) {
  constexpr int64_t kMaxBlocks = int64_t{1} << 22;
  const int64_t per_block = kThreads * items_per_thread;
  return static_cast<unsigned>(std::clamp<int64_t>((items + per_block - 1) / per_block, 1, kMaxBlocks));
}

template <int64_t... kArchitectures>
struct ArchitectureList {
  static void print(char* text, size_t size) {
    size_t used = 0;
    ((used += std::snprintf(
          text + std::min(used, size), size - std::min(used, size), " %d.%d", static_cast<int>(kArchitectures / 100),
          static_cast<int>(kArchitectures % 100 / 10))),
     ...);
  }
};

// To be called right after a launch: what was wrong with it, or with an earlier one that failed asynchronously. Where
// GPU, driver and this build do not fit together, the doctor knows what mends it.
inline Error launch_error(const char* kernel) {
  const cudaError_t status = cudaGetLastError();
  if (status == cudaSuccess) return nullptr;
  thread_local char message[512];
  constexpr const char* kDoctor = "; run: python -m extops doctor";
  if (status == cudaErrorNoKernelImageForDevice) {
    char architectures[128];
    ArchitectureList<__CUDA_ARCH_LIST__>::print(architectures, sizeof(architectures));
    int device = 0, major = 0, minor = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    std::snprintf(
        message, sizeof(message), "%s: this GPU is of compute capability %d.%d, and this extops was compiled for%s%s",
        kernel, major, minor, architectures, kDoctor);
  } else {
    const bool unfit = status == cudaErrorInsufficientDriver || status == cudaErrorUnsupportedPtxVersion;
    std::snprintf(message, sizeof(message), "%s: %s%s", kernel, cudaGetErrorString(status), unfit ? kDoctor : "");
  }
  return message;
}

}  // namespace extops::cuda
