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

// To be called right after a launch: what was wrong with it, or with an earlier one that failed asynchronously.
inline Error launch_error(const char* kernel) {
  const cudaError_t status = cudaGetLastError();
  if (status == cudaSuccess) return nullptr;
  thread_local char message[512];
  if (status == cudaErrorNoKernelImageForDevice) {
    char architectures[128];
    ArchitectureList<__CUDA_ARCH_LIST__>::print(architectures, sizeof(architectures));
    std::snprintf(
        message, sizeof(message),
        "%s: this build of extops holds no code for this GPU's compute capability; it was compiled for%s. Install a "
        "wheel that lists it",
        kernel, architectures);
  } else {
    std::snprintf(message, sizeof(message), "%s: %s", kernel, cudaGetErrorString(status));
  }
  return message;
}

}  // namespace extops::cuda
