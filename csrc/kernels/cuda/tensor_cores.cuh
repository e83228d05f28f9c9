// Products by tensor cores: matrix fragments of a warp in registers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace extops::cuda {

// What every thread holds of a 16 x 8 result: rows lane / 4 and lane / 4 + 8, columns 2 * (lane % 4) and the next.
struct Fragment {
  float values[4] = {};
};

// result += a * b for 16-bit elements: a is 16 x 16, b 16 x 8; a register holds two neighbouring elements of the sum.
template <class T>
__device__ inline void multiply_add(Fragment& result, const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if __CUDA_ARCH__ >= 800
  float (&c)[4] = result.values;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    static_assert(std::is_same_v<T, __half>);
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
#endif
}

// Four 8 x 8 matrices of 16-bit elements from shared memory, transposed: lane l gives the address of row l % 8 of
// matrix l / 8, and gets the elements 2 * (l % 4) and the next of column l / 4 of each.
__device__ inline void load_transposed(uint32_t (&to)[4], const void* row) {
#if __CUDA_ARCH__ >= 800
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address));
#endif
}

}  // namespace extops::cuda
