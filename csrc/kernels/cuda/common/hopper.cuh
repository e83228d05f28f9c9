// Instructions that only GPUs of compute capability 9.0 (Hopper) have: wgmma, by which a warpgroup multiplies tiles in
// shared memory; TMA, which copies whole tiles; mbarriers, which count arrivals and bytes; and clusters of blocks with
// distributed shared memory. nvcc compiles this for sm_90a only.
//
// A tile in shared memory consists of rows of 128 bytes. Their 16-byte chunks are permuted by the row number, so that
// eight rows or columns have no bank conflicts ("128-byte swizzle"). It starts at a multiple of 1024 bytes.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "launch.cuh"
#include "tensor_cores.cuh"

namespace extops::cuda {

constexpr int kTileRowBytes = 128;
constexpr int kTileAlignment = 1024;
constexpr int kWarpgroup = 128;     // threads
constexpr int kWarpgroupRows = 64;  // of a result of wgmma

template <class T>
constexpr int kTileColumns = kTileRowBytes / static_cast<int>(sizeof(T));

// The widths of wgmma results that are used here.
template <int kN>
constexpr bool kIsWgmmaWidth = kN == 48 || kN == 64 || kN == 72 || kN == 96 || kN == 120 || kN == 128;

// TMA reads a tensor map by its address, so it must be a __grid_constant__ parameter, which older devices lack.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define EXTOPS_GRID_CONSTANT
#else
#define EXTOPS_GRID_CONSTANT __grid_constant__
#endif

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Maps an address of shared memory to the same place in another block of the cluster.
__device__ inline uint32_t peer_address(uint32_t address, int block) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(block));
  return remote;
}

// The same for a pointer.
template <class T>
__device__ inline const T* peer_pointer(const T* pointer, int block) {
  uint64_t remote;
  asm("mapa.u64 %0, %1, %2;" : "=l"(remote) : "l"(pointer), "r"(block));
  return reinterpret_cast<const T*>(remote);
}

// Barrier of the whole cluster. It does not make writes visible: the mbarriers do that.
__device__ inline void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ inline void wait_for_cluster() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

// The same after a fence, which waits until this thread's loads from shared memory have returned: afterwards other
// blocks may store there, and this block may end.
__device__ inline void release_to_cluster() {
  __threadfence_block();
  arrive_at_cluster();
  wait_for_cluster();
}

// The same, after which each thread of the cluster sees what the others have written.
__device__ inline void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// The proxy fence: makes this thread's writes to shared memory visible to TMA and wgmma (the async proxy).
__device__ inline void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#define EXTOPS_TRY_WAIT(semantics)                                             \
  asm volatile("{\n.reg .pred done;\nmbarrier.try_wait.parity" semantics       \
               ".shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}" \
               : "=r"(done)                                                    \
               : "r"(address()), "r"(phase & 1)                                \
               : "memory")

// An mbarrier in shared memory. A phase ends when all expected arrivals and bytes have arrived.
class Mbarrier {
 public:
  __device__ void initialize(int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address()), "r"(arrivals) : "memory");
  }

  // To be called once after all mbarriers are initialized.
  __device__ static void publish() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

  __device__ void arrive_expect_tx(int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address()), "r"(bytes) : "memory");
  }

  __device__ void arrive() { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(address()) : "memory"); }

  // Waits until phase number `phase` has ended; only the last two phases can be asked for. What other blocks of the
  // cluster have stored by then (st.async), threads see only after `kOfCluster`.
  template <bool kOfCluster = false>
  __device__ void wait(int phase) {
    uint32_t done = 0;
    while (done == 0) {
      if constexpr (kOfCluster) {
        EXTOPS_TRY_WAIT(".acquire.cluster");
      } else {
        EXTOPS_TRY_WAIT("");
      }
    }
  }

  __device__ uint32_t address() const { return shared_address(&state_); }

 private:
  uint64_t state_;
};
#undef EXTOPS_TRY_WAIT

// Fetches a tensor map before the first copy needs it.
__device__ inline void prefetch(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copies a box of a tensor into shared memory by TMA. Elements beyond the tensor's edges become zero. Coordinates come
// innermost first. The bytes are counted by `barrier`.
__device__ inline void tma_load(uint32_t to, const CUtensorMap& from, int x, int y, const Mbarrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(to),
      "l"(&from), "r"(x), "r"(y), "r"(barrier.address())
      : "memory");
}

__device__ inline void tma_load(uint32_t to, const CUtensorMap& from, int x, int y, int z, const Mbarrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(to),
      "l"(&from), "r"(x), "r"(y), "r"(z), "r"(barrier.address())
      : "memory");
}

// Copies shared memory into that of another block of the cluster.
__device__ inline void copy_to_peer(uint32_t to, uint32_t from, int bytes, const Mbarrier& barrier, int block) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   peer_address(to, block)),
               "r"(from), "r"(bytes), "r"(peer_address(barrier.address(), block))
               : "memory");
}

// What the threads of a warpgroup hold of a 64 x kN result. Warp w has the rows from 16 * w; of those, lane l has l /
// 4 and l / 4 + 8, in the columns 8 * j + 2 * (l % 4) and the next.
template <int kN>
struct Accumulator {
  float values[kN / 2];

  __device__ float& at(int j, int half, int i) { return values[4 * j + 2 * half + i]; }
};

// The wgmma descriptor of a K-major tile: one whose rows run along K.
__device__ inline uint64_t matrix_descriptor(uint32_t address) {
  constexpr uint64_t kBytesBetween8Rows = 8 * kTileRowBytes;
  return uint64_t{(address & 0x3ffff) >> 4} | uint64_t{1} << 16 | (kBytesBetween8Rows >> 4) << 32 | uint64_t{1} << 62;
}

// Macros, since a template cannot make the operands of inline assembly.
#define EXTOPS_OPERANDS_4(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define EXTOPS_OPERANDS_8(c, i) EXTOPS_OPERANDS_4(c, i), EXTOPS_OPERANDS_4(c, i + 4)
#define EXTOPS_OPERANDS_12(c, i) EXTOPS_OPERANDS_8(c, i), EXTOPS_OPERANDS_4(c, i + 8)
#define EXTOPS_OPERANDS_16(c, i) EXTOPS_OPERANDS_8(c, i), EXTOPS_OPERANDS_8(c, i + 8)
#define EXTOPS_OPERANDS_24(c, i) EXTOPS_OPERANDS_16(c, i), EXTOPS_OPERANDS_8(c, i + 16)
#define EXTOPS_OPERANDS_32(c, i) EXTOPS_OPERANDS_16(c, i), EXTOPS_OPERANDS_16(c, i + 16)
#define EXTOPS_OPERANDS_36(c, i) EXTOPS_OPERANDS_32(c, i), EXTOPS_OPERANDS_4(c, i + 32)
#define EXTOPS_OPERANDS_48(c, i) EXTOPS_OPERANDS_32(c, i), EXTOPS_OPERANDS_16(c, i + 32)
#define EXTOPS_OPERANDS_60(c, i) EXTOPS_OPERANDS_48(c, i), EXTOPS_OPERANDS_12(c, i + 48)
#define EXTOPS_OPERANDS_64(c, i) EXTOPS_OPERANDS_48(c, i), EXTOPS_OPERANDS_16(c, i + 48)
#define EXTOPS_REGISTERS_4 "%0, %1, %2, %3"
#define EXTOPS_REGISTERS_8 EXTOPS_REGISTERS_4 ", %4, %5, %6, %7"
#define EXTOPS_REGISTERS_12 EXTOPS_REGISTERS_8 ", %8, %9, %10, %11"
#define EXTOPS_REGISTERS_16 EXTOPS_REGISTERS_12 ", %12, %13, %14, %15"
#define EXTOPS_REGISTERS_24 EXTOPS_REGISTERS_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define EXTOPS_REGISTERS_32 EXTOPS_REGISTERS_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define EXTOPS_REGISTERS_36 EXTOPS_REGISTERS_32 ", %32, %33, %34, %35"
#define EXTOPS_REGISTERS_48 EXTOPS_REGISTERS_36 ", %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define EXTOPS_REGISTERS_60 EXTOPS_REGISTERS_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59"
#define EXTOPS_REGISTERS_64 EXTOPS_REGISTERS_60 ", %60, %61, %62, %63"
// `a` and `b` are the numbers of the operands after the registers, `p` that of the predicate.
#define EXTOPS_WGMMA(n, registers, a_, b_, p_, shape_and_types, more)                                         \
  asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %" #p_                                                 \
               ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n shape_and_types " {" EXTOPS_REGISTERS_##registers \
               "}, %" #a_ ", %" #b_ ", adds, 1, 1" more ";\n}"                                                \
               : EXTOPS_OPERANDS_##registers(c, 0)                                                            \
               : "l"(a), "l"(b), "r"(static_cast<int>(adds)))
#define EXTOPS_WGMMA_OF(shape_and_types, more)                                       \
  if constexpr (kN == 48) EXTOPS_WGMMA(48, 24, 24, 25, 26, shape_and_types, more);   \
  if constexpr (kN == 64) EXTOPS_WGMMA(64, 32, 32, 33, 34, shape_and_types, more);   \
  if constexpr (kN == 72) EXTOPS_WGMMA(72, 36, 36, 37, 38, shape_and_types, more);   \
  if constexpr (kN == 96) EXTOPS_WGMMA(96, 48, 48, 49, 50, shape_and_types, more);   \
  if constexpr (kN == 120) EXTOPS_WGMMA(120, 60, 60, 61, 62, shape_and_types, more); \
  if constexpr (kN == 128) EXTOPS_WGMMA(128, 64, 64, 65, 66, shape_and_types, more)

// result += a * b^T along 32 bytes of the rows, where a has 64 rows and b kN. float stands for TF32: the hardware
// ignores the lower bits. Call it between wgmma_fence and wgmma_wait; before the wait nothing may touch `result`.
template <class T, int kN>
__device__ inline void wgmma(Accumulator<kN>& result, uint64_t a, uint64_t b, bool adds) {
  float (&c)[kN / 2] = result.values;
  static_assert(kIsWgmmaWidth<kN>);
  if constexpr (std::is_same_v<T, float>) {
    EXTOPS_WGMMA_OF("k8.f32.tf32.tf32", "");
  } else if constexpr (std::is_same_v<T, __half>) {
    EXTOPS_WGMMA_OF("k16.f32.f16.f16", ", 0, 0");
  } else {
    EXTOPS_WGMMA_OF("k16.f32.bf16.bf16", ", 0, 0");
  }
}

// The same along whole rows of two K-major tiles.
template <class T, int kN>
__device__ inline void multiply_tiles(Accumulator<kN>& result, uint32_t a, uint32_t b, bool adds) {
#pragma unroll
  for (int bytes = 0; bytes < kTileRowBytes; bytes += 32) {
    wgmma<T>(result, matrix_descriptor(a + bytes), matrix_descriptor(b + bytes), adds || bytes > 0);
  }
}

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until all but the last `kPending` committed groups of wgmma are done.
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The same where `result` is read next: keeps the compiler from reading it before.
template <int kPending, int kN>
__device__ inline void wgmma_wait(Accumulator<kN>& result) {
  wgmma_wait<kPending>();
#pragma unroll
  for (float& value : result.values) asm volatile("" : "+f"(value)::"memory");
}

#endif

// ---- on the host: tensor maps ----

// TF32 is rounded as it is copied.
template <class T>
constexpr CUtensorMapDataType map_type() {
  if constexpr (std::is_same_v<T, float>) return CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
  if constexpr (std::is_same_v<T, __half>) return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

constexpr Error kNoTensorMap = "the CUDA driver cannot make tensor maps of the tensors (cuTensorMapEncodeTiled)";

// Makes a tensor map for copies of boxes: 128 bytes of `box_rows` rows of `box_matrices` of the tensor's matrices.
template <class T, int kRank>
bool make_tensor_map(
    CUtensorMap& map, const T* data, const cuuint64_t (&sizes)[kRank], const cuuint64_t (&row_bytes)[kRank - 1],
    cuuint32_t box_rows, cuuint32_t box_matrices = 1) {
  static const auto encode = driver_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  const cuuint32_t box[] = {kTileColumns<T>, box_rows, box_matrices};
  const cuuint32_t steps[] = {1, 1, 1};
  if (encode == nullptr) return false;
  const auto make = [&] {
    return encode(
               &map, map_type<T>(), kRank, const_cast<T*>(data), sizes, row_bytes, box, steps,
               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
  };
  if (make()) return true;
  make_context_current();  // which the driver needs
  return make();
}

}  // namespace extops::cuda
