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

// Functions of the cuBLAS that torch has loaded: extops is not linked to one.
struct Cublas {
  int (*gemm)(
      void*, int, int, int, int, int, const void*, const void*, int, int, const void*, int, int, const void*, void*,
      int, int, int, int) = nullptr;
  int (*get_math_mode)(void*, int*) = nullptr;

  Cublas() {
    char name[32];
    std::snprintf(name, sizeof(name), "libcublas.so.%d", CUDART_VERSION / 1000);
    void* const library = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
    if (library == nullptr) return;
    gemm = reinterpret_cast<decltype(gemm)>(dlsym(library, "cublasGemmEx"));
    get_math_mode = reinterpret_cast<decltype(get_math_mode)>(dlsym(library, "cublasGetMathMode"));
  }
};

// A factor as cuBLAS sees it, to which matrices are stored by columns: its transpose. Stride 0: it cannot take it.
struct Factor {
  int is_transposed;
  int64_t stride;

  Factor(const int64_t (&strides)[2], int64_t rows, int64_t columns) {
    is_transposed = strides[1] != 1 || strides[0] < columns;
    const bool fits = is_transposed == 0 || (strides[0] == 1 && strides[1] >= rows);
    stride = fits ? strides[is_transposed] : 0;
  }
};

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

EXTOPS_API Error extops_gemm_cuda(
    void* handle, ScalarType dtype, const int64_t (&sizes)[3], const float* a, const int64_t (&a_strides)[2],
    const float* b, const int64_t (&b_strides)[2], float* product, int64_t accumulate) {
  // The numbers of cuBLAS.
  constexpr int kFloat = 0, kPedantic = 69, kFastTf32 = 77, kTf32Mode = 3, kDefaultAlgorithm = -1;
  static const extops::cuda::Cublas cublas;
  int mode = 0;  // torch sets it by its switch, each time that it hands out its handle
  if (cublas.gemm == nullptr || cublas.get_math_mode == nullptr || cublas.get_math_mode(handle, &mode) != 0) {
    return "torch has loaded no cuBLAS of this version of CUDA";
  }
  const bool in_tf32 = dtype == ScalarType::TF32;
  if (in_tf32 == (mode == kTf32Mode)) return "torch computes it in this precision";
  const auto [rows, inner, columns] = sizes;
  const extops::cuda::Factor left(a_strides, rows, inner), right(b_strides, inner, columns);
  if (std::min({rows, inner, columns, left.stride, right.stride}) < 1 ||
      std::max({rows, inner, columns, left.stride, right.stride}) > INT32_MAX) {
    return "cuBLAS takes no such sizes and strides";
  }
  const float one = 1, kept = accumulate != 0 ? 1 : 0;
  const int status = cublas.gemm(
      handle, right.is_transposed, left.is_transposed, static_cast<int>(columns), static_cast<int>(rows),
      static_cast<int>(inner), &one, b, kFloat, static_cast<int>(right.stride), a, kFloat,
      static_cast<int>(left.stride), &kept, product, kFloat, static_cast<int>(columns), in_tf32 ? kFastTf32 : kPedantic,
      kDefaultAlgorithm);
  return status == 0 ? nullptr : "cuBLAS failed";
}

EXTOPS_API int32_t extops_sm_count_cuda(void* stream) {
  return extops::cuda::Context(static_cast<cudaStream_t>(stream)).sm_count();
}
