// Which kernel computes a sequence, and why there. Times were taken on an NVIDIA H200.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>

#include "../common/tensor_cores.cuh"
#include "sequence.cuh"

namespace extops::cuda {

enum class Kernel { kStep, kTensorBlock, kFloat32Block, kFloat32Cluster, kTensorCluster, kGroup, kNone };
constexpr const char* kKernelNames[] = {"step",           "tensor_block", "float32_block", "float32_cluster",
                                        "tensor_cluster", "group",        "none"};

// ---- what fits into registers ----

// An SM has registers for 256 threads of 255 registers each. 192 of each thread hold weights.
constexpr int kThreadWeights = 192;
constexpr int kBlockWeights = 256 * kThreadWeights;

// In strict float32 one block holds all weights. Units come in chunks of 16, and a thread holds 8 * kRecurrent weights
// of each chunk. More units than 128 would need more threads. With four recurrent gates a quarter of the weights of 128
// units is in shared memory. With more gates, reading weights from there at each step would be slower than the kernels
// below.
template <class Cell>
constexpr int kFloat32BlockUnits = Cell::kRecurrent <= 4 ? 128 : kThreadWeights / (8 * Cell::kRecurrent) * 16;

// Each block of a cluster holds the weights of 32 units. A cluster has 16 blocks at most, and a multiple of four.
constexpr int kFloat32ClusterUnits = 32;
template <class Cell>
constexpr int kFloat32ClusterBlocks =
    std::min(16, kBlockWeights / (Cell::kRecurrent * kFloat32ClusterUnits * kFloat32ClusterUnits) / 4 * 4);

// On tensor cores two weights of 16 bits share a register.
template <class Cell>
constexpr int tensor_block_units(bool is_tf32) {
  return is_tf32 && Cell::kRecurrent > 3 ? 64 : 128;
}
constexpr int kTensorClusterUnits = 512;

// ---- which kernels can compute a problem, and which one takes the least time ----

template <class Cell>
bool can_compute_all_steps(Kernel kernel, const Problem& problem) {
  const SequenceSizes& sizes = problem.sizes;
  const bool is_tf32 = problem.dtype == ScalarType::TF32;
  const bool is_float = problem.dtype == ScalarType::Float;
  const bool is_for_tensor_cores =
      is_tf32 || problem.dtype == ScalarType::Half || problem.dtype == ScalarType::BFloat16;
  switch (kernel) {
    case Kernel::kTensorBlock:
      return is_for_tensor_cores && sizes.state_size <= tensor_block_units<Cell>(is_tf32) &&
             (is_tf32 ? has_hopper_tensor_cores() : has_tensor_cores());
    case Kernel::kFloat32Block:
      return (is_float || is_tf32) && sizes.state_size <= kFloat32BlockUnits<Cell> &&
             shared_bytes_of_float32_blocks<Cell>(sizes) <=
                 std::min(
                     device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin), most_shared_bytes(code_architecture()));
    case Kernel::kFloat32Cluster:
      return is_float && sizes.state_size <= kFloat32ClusterBlocks<Cell> * kFloat32ClusterUnits &&
             sizes.batch <= 16 * kMostClusters && has_hopper_tensor_cores() &&
             samples_of_float32_clusters<Cell>(problem) > 0;
    case Kernel::kTensorCluster:
      return is_for_tensor_cores && sizes.state_size <= kTensorClusterUnits && sizes.batch <= 8 * kMostClusters &&
             has_hopper_tensor_cores() && samples_of_tensor_clusters<Cell>(problem) > 0;
    case Kernel::kGroup:
      return problem.dtype != ScalarType::Double && has_hopper_tensor_cores() &&
             tiles_of_groups<Cell>(problem) < kNoGroups;
    default:
      return false;
  }
}

template <class Cell>
bool can_compute([[maybe_unused]] Kernel kernel, [[maybe_unused]] const Problem& problem) {
  if (kernel == Kernel::kStep) return true;
  if constexpr (kHasSequenceKernelsOf<Cell>) return can_compute_all_steps<Cell>(kernel, problem);
  return false;
}

// Where groups of blocks are faster than a GEMM and a kernel launch for each step.
template <class Cell>
bool is_faster_in_groups(const Problem& problem) {
  constexpr int64_t kMillion = 1'000'000;
  const SequenceSizes& sizes = problem.sizes;
  const bool is_float = problem.dtype == ScalarType::Float;
  const bool is_tf32 = problem.dtype == ScalarType::TF32;
  const bool is_backward = problem.pass == Pass::kBackward;
  const int64_t multiply_adds = sizes.batch * sizes.state_size * sizes.state_size * Cell::kRecurrent;
  if (problem.context.is_captured()) {
    // In a CUDA graph the host launches no kernels, so device time alone matters. In the backward, each group would
    // load the gradients of all gates at each step. A matrix-vector product is bound by cache bandwidth.
    const bool is_vector = sizes.batch == 1 && (is_float || is_tf32);
    if (is_backward || is_vector) return false;
    return is_float ? multiply_adds < 550 * kMillion : sizes.state_size <= 1024 && tiles_of_groups<Cell>(problem) == 1;
  }
  // Otherwise launches for each step would take the host 25 us a step or more: groups may take that long, too.
  if (is_float) return multiply_adds < (is_backward ? 130 : 550) * kMillion;
  if (is_tf32) return multiply_adds < (is_backward ? 330 : 600) * kMillion;
  return multiply_adds < (is_backward ? 850 : 1100) * kMillion;
}

// Whether a kernel that can compute a problem is faster than those after it.
template <class Cell>
bool is_faster(Kernel kernel, const Problem& problem) {
  const SequenceSizes& sizes = problem.sizes;
  // Clusters and groups that do not run at the same time load all weights again: library GEMMs are faster.
  if (sizes.state_size > 256 && sizes.batch > 512) return false;
  if (kernel == Kernel::kFloat32Cluster && sizes.batch > 4096) return false;
  if (kernel == Kernel::kTensorBlock && can_compute<Cell>(Kernel::kFloat32Block, problem)) {
    // In TF32 a GEMM takes twice as long as in 16-bit types: strict float32 is faster while each of its blocks has an
    // SM of its own, in the backward also with two samples a block.
    const int samples = problem.pass == Pass::kBackward ? 2 : 1;
    return sizes.batch > int64_t{samples} * problem.context.sm_count();
  }
  if (kernel == Kernel::kFloat32Cluster && sizes.state_size > 8 * kFloat32ClusterUnits) {
    // Where not all large clusters run at the same time, groups of blocks are faster.
    return sizes.batch <= samples_of_float32_clusters<Cell>(problem);
  }
  const bool is_wide_tf32 = problem.dtype == ScalarType::TF32 && sizes.state_size > kTensorClusterUnits / 2;
  if (kernel == Kernel::kTensorCluster && is_wide_tf32 && problem.pass == Pass::kForward) {
    return sizes.batch <= samples_of_tensor_clusters<Cell>(problem);  // here, too
  }
  return kernel != Kernel::kGroup || is_faster_in_groups<Cell>(problem);
}

template <class Cell>
Kernel choose_kernel(const Problem& problem) {
  [[maybe_unused]] constexpr Kernel kInOrder[] = {
      Kernel::kTensorBlock, Kernel::kFloat32Block, Kernel::kFloat32Cluster, Kernel::kTensorCluster, Kernel::kGroup};
  if (problem.sizes.time * problem.sizes.batch * problem.sizes.state_size == 0) return Kernel::kStep;
  if (const char* const name = named_sequence_kernel(); *name != 0) {
    for (int i = 0; i < static_cast<int>(Kernel::kNone); ++i) {
      const Kernel kernel = static_cast<Kernel>(i);
      if (std::strcmp(name, kKernelNames[i]) == 0 && can_compute<Cell>(kernel, problem)) return kernel;
    }
    return Kernel::kNone;
  }
  if constexpr (kHasSequenceKernelsOf<Cell>) {
    for (const Kernel kernel : kInOrder) {
      if (can_compute<Cell>(kernel, problem) && is_faster<Cell>(kernel, problem)) return kernel;
    }
  }
  return Kernel::kStep;
}

// The error for a variable that names no kernel which can compute the problem.
template <class Cell>
Error no_kernel_error(const Problem& problem) {
  thread_local char message[256];
  size_t used = std::snprintf(
      message, sizeof(message), "expected %s to name a kernel for such a sequence on this GPU (",
      kSequenceKernelVariable);
  for (int i = 0; i < static_cast<int>(Kernel::kNone); ++i) {
    if (!can_compute<Cell>(static_cast<Kernel>(i), problem)) continue;
    used += std::snprintf(message + used, sizeof(message) - used, "%s%s", i > 0 ? ", " : "", kKernelNames[i]);
  }
  std::snprintf(message + used, sizeof(message) - used, "), but got %.40s", named_sequence_kernel());
  return message;
}

}  // namespace extops::cuda
