// What one file of a library defines for the others, since it depends on all architectures of the build. Files with
// kernels for one architecture are compiled for that alone.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "../../sequence.h"
#include "launch.cuh"

namespace extops::cuda {

namespace {

__global__ void architecture_kernel() {}

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

std::string& sequence_kernel() {
  static std::string name = [] {
    const char* const given = std::getenv(kSequenceKernelVariable);
    return given == nullptr ? "" : given;
  }();
  return name;
}

using GemmEx = int (*)(
    void*, int, int, int, int, int, const void*, const void*, int, int, const void*, int, int, const void*, void*, int,
    int, int, int);

// cublasGemmEx of the library that torch has loaded: extops is not linked to one.
GemmEx cublas_gemm() {
  static const GemmEx known = [] {
    char name[32];
    std::snprintf(name, sizeof(name), "libcublas.so.%d", CUDART_VERSION / 1000);
    void* const library = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
    return library == nullptr ? nullptr : reinterpret_cast<GemmEx>(dlsym(library, "cublasGemmEx"));
  }();
  return known;
}

}  // namespace

const char* named_sequence_kernel() { return sequence_kernel().c_str(); }

int code_architecture() {
  static std::atomic<int> known[64];
  int device = 0;
  cudaGetDevice(&device);
  const int before = device < 64 ? known[device].load(std::memory_order_relaxed) : 0;
  if (before > 0) return before;
  cudaFuncAttributes attributes{};
  if (cudaFuncGetAttributes(&attributes, architecture_kernel) != cudaSuccess) cudaGetLastError();
  if (device < 64) known[device].store(attributes.ptxVersion * 10, std::memory_order_relaxed);
  return attributes.ptxVersion * 10;
}

Error launch_error() {
  const cudaError_t status = cudaGetLastError();
  if (status == cudaSuccess) return nullptr;
  thread_local char message[512];
  constexpr const char* kDoctor = "; run: python -m extops_doctor";
  if (status == cudaErrorNoKernelImageForDevice) {
    char architectures[128];
    ArchitectureList<__CUDA_ARCH_LIST__>::print(architectures, sizeof(architectures));
    int device = 0, major = 0, minor = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    std::snprintf(
        message, sizeof(message), "this GPU is of compute capability %d.%d, and this extops was compiled for%s%s",
        major, minor, architectures, kDoctor);
  } else {
    const bool unfit = status == cudaErrorInsufficientDriver || status == cudaErrorUnsupportedPtxVersion;
    std::snprintf(message, sizeof(message), "%s%s", cudaGetErrorString(status), unfit ? kDoctor : "");
  }
  return message;
}

}  // namespace extops::cuda

EXTOPS_API void extops_name_sequence_kernel_cuda(const char* name) { extops::cuda::sequence_kernel() = name; }

EXTOPS_API Error extops_gemm_tf32_cuda(
    void* handle, const int64_t (&sizes)[3], const float* a, const int64_t (&a_strides)[2], const float* b,
    const int64_t (&b_strides)[2], float* product, int64_t accumulate) {
  constexpr int kFloat = 0, kFastTf32 = 77, kDefaultAlgorithm = -1;  // of cuBLAS
  const GemmEx gemm = extops::cuda::cublas_gemm();
  if (gemm == nullptr) return "torch has loaded no cuBLAS of this version of CUDA";
  const auto [rows, inner, columns] = sizes;
  // To cuBLAS, whose matrices are by columns, these are their transposes, and so is the product.
  struct Factor {
    int is_transposed;
    int64_t stride;
  };
  const auto factor = [](const int64_t (&strides)[2], int64_t height, int64_t width) {
    return strides[1] == 1 && strides[0] >= width ? Factor{0, strides[0]}
                                                  : Factor{1, strides[0] == 1 && strides[1] >= height ? strides[1] : 0};
  };
  const Factor left = factor(a_strides, rows, inner), right = factor(b_strides, inner, columns);
  const int64_t most = std::max({rows, inner, columns, left.stride, right.stride});
  if (std::min({rows, inner, columns, left.stride, right.stride}) < 1 || most > INT32_MAX) {
    return "cuBLAS takes no such sizes and strides";
  }
  const float one = 1, kept = accumulate != 0 ? 1 : 0;
  const int status = gemm(
      handle, right.is_transposed, left.is_transposed, static_cast<int>(columns), static_cast<int>(rows),
      static_cast<int>(inner), &one, b, kFloat, static_cast<int>(right.stride), a, kFloat,
      static_cast<int>(left.stride), &kept, product, kFloat, static_cast<int>(columns), kFastTf32, kDefaultAlgorithm);
  return status == 0 ? nullptr : "cuBLAS failed";
}

EXTOPS_API int32_t extops_sm_count_cuda(void* stream) {
  return extops::cuda::Context(static_cast<cudaStream_t>(stream)).sm_count();
}

EXTOPS_API Error extops_create_stream_cuda(void** stream) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // the calling stream may be captured in a graph
  cudaThreadExchangeStreamCaptureMode(&mode);
  const cudaError_t status = cudaStreamCreateWithFlags(reinterpret_cast<cudaStream_t*>(stream), cudaStreamNonBlocking);
  cudaThreadExchangeStreamCaptureMode(&mode);
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}
