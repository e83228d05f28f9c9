// Which kernel was measured to be the fastest, by kind of call: a table for all cells of a library.
#pragma once

#include <array>
#include <optional>
#include <utility>

#include "sequence.cuh"

namespace extops::cuda {

// The cell, and what else its calls have in common.
using Kind = std::pair<const char*, std::array<int64_t, 8>>;

// What is known of a kind, in this process or by who keeps it for longer.
std::optional<SequenceKernels> known_kernels(const Kind& kind);

// Measures it by the plans that can compute a call, the first of which is taken where that must not be or fails.
SequenceKernels measured_kernels(
    const Kind& kind, cudaStream_t stream, const SequencePlan* plans, int count, const SequenceTrial& trial);

// So many values a doubling.
inline int64_t rounded(int64_t size, int64_t a_doubling) {
  int64_t step = 1;
  while (size / step >= 2 * a_doubling) step *= 2;
  return (size + step / 2) / step * step;
}

// Large batches are rounded, and long sequences alike: else lengths that vary would be measured for hours.
inline Kind kind_of(const char* cell, const Problem& problem) {
  constexpr int64_t kExact = 128;
  const SequenceSizes& sizes = problem.sizes;
  int device = 0;
  cudaGetDevice(&device);
  return {
      cell,
      {device, problem.context.sm_count(), static_cast<int64_t>(problem.dtype), problem.pass == Pass::kBackward,
       sizes.state_size, sizes.directions, sizes.batch <= kExact ? sizes.batch : rounded(sizes.batch, 8),
       rounded(std::min(sizes.time, kMeasuredSteps), 4)}};
}

}  // namespace extops::cuda
