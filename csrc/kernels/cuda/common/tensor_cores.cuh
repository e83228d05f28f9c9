// What one warp needs to multiply on tensor cores, on GPUs of compute capability 8.0 (Ampere) and newer.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "launch.cuh"

namespace extops::cuda {

enum class Math { kTensorCores, kFloat32 };

// In code for older GPUs, kernels with these instructions are empty.
inline bool has_tensor_cores() { return code_architecture() >= 800; }

// Whether has_hopper_tensor_cores() is true where this code runs.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool kIsHopper = true;
#else
constexpr bool kIsHopper = false;
#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define EXTOPS_TENSOR_CORES

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Rounds to the ten mantissa bits of TF32; the tensor cores would cut off the others.
__device__ inline float round_to_tf32(float value) {
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(value));
  return __uint_as_float(rounded);
}

// m16n8k16 or, in TF32, m16n8k8.
#define EXTOPS_MMA(T, shape_and_types)                                                                \
  __device__ inline void mma(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, T) { \
    asm volatile("mma.sync.aligned." shape_and_types                                                  \
                 " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                   \
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                         \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                     \
  }
EXTOPS_MMA(__nv_bfloat16, "m16n8k16.row.col.f32.bf16.bf16.f32")
EXTOPS_MMA(__half, "m16n8k16.row.col.f32.f16.f16.f32")
EXTOPS_MMA(float, "m16n8k8.row.col.f32.tf32.tf32.f32")
#undef EXTOPS_MMA

// Four tiles of eight rows of 16 bytes: lane l says where row l % 8 of tile l / 8 is, and gets of each tile the four
// bytes number l % 4 of row l / 4.
__device__ inline void load_matrices(uint32_t (&words)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(row)
               : "memory");
}

#endif

}  // namespace extops::cuda
