// Which kernels can compute a sequence, and which one does.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <utility>

#include "../common/tensor_cores.cuh"
#include "measured.cuh"

namespace extops::cuda {

enum class Kernel : int64_t {
  kNone = SequencePlan::kNone,
  kStep = SequencePlan::kStep,
  kTensorBlock,
  kFloat32Block,
  kFloat32Cluster,
  kTensorCluster,
  kGroup
};

constexpr const char* kKernelNames[] = {"step",           "tensor_block", "float32_block", "float32_cluster",
                                        "tensor_cluster", "group"};

// Where nothing is known of a problem, the first of these computes it that can.
constexpr Kernel kInOrder[] = {Kernel::kFloat32Block,  Kernel::kTensorBlock, Kernel::kFloat32Cluster,
                               Kernel::kTensorCluster, Kernel::kGroup,       Kernel::kStep};

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

// Each block of a cluster holds the weights of 32 units. Its number of blocks is a multiple of four, at most 16.
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

// ---- which kernels can compute a problem ----

// Cells with more states have the kernels of cells.cuh alone.
template <class Cell>
constexpr bool kHasAllKernels = kCellStates<Cell> == 1;

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
    case Kernel::kTensorCluster:
      return is_for_tensor_cores && sizes.state_size <= kTensorClusterUnits && sizes.batch <= 8 * kMostClusters &&
             has_hopper_tensor_cores() && samples_of_tensor_clusters<Cell>(problem) > 0;
    default:
      break;
  }
  if constexpr (kHasAllKernels<Cell>) {
    if (kernel == Kernel::kFloat32Cluster) {
      return is_float && sizes.state_size <= kFloat32ClusterBlocks<Cell> * kFloat32ClusterUnits &&
             sizes.batch <= 16 * kMostClusters && has_hopper_tensor_cores() &&
             samples_of_float32_clusters<Cell>(problem) > 0;
    }
    if (kernel == Kernel::kGroup) {
      return problem.dtype != ScalarType::Double && has_tensor_cores() && group_workspace<Cell>(problem.of_one()) > 0;
    }
  }
  return false;
}

template <class Cell>
bool can_compute([[maybe_unused]] Kernel kernel, [[maybe_unused]] const Problem& problem) {
  if (kernel == Kernel::kStep) return true;
  if constexpr (kHasSequenceKernelsOf<Cell>) return can_compute_all_steps<Cell>(kernel, problem);
  return false;
}

// ---- which one does ----

template <class Cell>
SequencePlan plan_of(Kernel kernel, const Problem& problem) {
  SequencePlan plan{static_cast<int64_t>(kernel), 0, kernel == Kernel::kStep ? 1 : problem.sizes.directions};
  if constexpr (kHasSequenceKernelsOf<Cell> && kHasAllKernels<Cell>) {
    if (kernel == Kernel::kGroup) plan.workspace = group_workspace<Cell>(problem);
    // Directions that do not fit beside each other take all multiprocessors one after the other.
    if (kernel == Kernel::kGroup && plan.workspace == 0)
      plan = {plan.kernel, group_workspace<Cell>(problem.of_one()), 1};
  }
  return plan;
}

template <class Cell>
Kernel named_kernel(const Problem& problem) {
  for (const Kernel kernel : kInOrder) {
    const bool is_named = std::strcmp(named_sequence_kernel(), kKernelNames[static_cast<int>(kernel)]) == 0;
    if (is_named && can_compute<Cell>(kernel, problem)) return kernel;
  }
  return Kernel::kNone;
}

template <class Cell>
Kernel measured_kernel(const char* cell, const Problem& problem, const SequenceTrial* trial) {
  const auto can = [&](Kernel kernel) { return can_compute<Cell>(kernel, problem); };
  const Kind kind = kind_of(cell, problem);
  const bool is_captured = problem.context.is_captured();
  std::optional<SequenceKernels> known = known_kernels(kind);
  if (!known.has_value() && trial != nullptr && !is_captured) {
    SequencePlan plans[std::size(kInOrder)];
    int count = 0;
    for (const Kernel kernel : kInOrder) {
      if (can(kernel)) plans[count++] = plan_of<Cell>(kernel, problem);
    }
    known = measured_kernels(kind, problem.context.stream(), plans, count, *trial);
  }
  if (known.has_value()) {
    const Kernel kernel = static_cast<Kernel>(is_captured ? known->captured : known->eager);
    if (can(kernel)) return kernel;  // which a problem of other sizes may have found
  }
  return *std::find_if(std::begin(kInOrder), std::end(kInOrder), can);
}

template <class Cell>
SequencePlan choose_plan(
    [[maybe_unused]] const char* cell, const Problem& problem, [[maybe_unused]] const SequenceTrial* trial) {
  const SequencePlan by_steps = plan_of<Cell>(Kernel::kStep, problem);
  if (problem.sizes.time * problem.sizes.batch * problem.sizes.state_size == 0) return by_steps;
  if (*named_sequence_kernel() != 0) return plan_of<Cell>(named_kernel<Cell>(problem), problem);
  if constexpr (kHasSequenceKernelsOf<Cell>) {
    if (problem.dtype != ScalarType::Double) {
      return plan_of<Cell>(measured_kernel<Cell>(cell, problem, trial), problem);
    }
  }
  return by_steps;
}

// The error for a variable that names no kernel which can compute the problem.
template <class Cell>
Error no_kernel_error(const Problem& problem) {
  thread_local char message[256];
  size_t used = std::snprintf(
      message, sizeof(message), "expected %s to name a kernel for such a sequence on this GPU (",
      kSequenceKernelVariable);
  const char* separator = "";
  for (const Kernel kernel : kInOrder) {
    if (!can_compute<Cell>(kernel, problem)) continue;
    const char* const name = kKernelNames[static_cast<int>(kernel)];
    used += std::snprintf(message + used, sizeof(message) - used, "%s%s", std::exchange(separator, ", "), name);
  }
  std::snprintf(message + used, sizeof(message) - used, "), but got %.40s", named_sequence_kernel());
  return message;
}

}  // namespace extops::cuda
