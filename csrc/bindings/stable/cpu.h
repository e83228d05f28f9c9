// The CPU as a `Device` of bindings; see device.h.
#pragma once

#include <atomic>

#include "checks.h"

namespace extops::stable {

struct CpuDevice {
  static constexpr bool kIsCuda = false;

  struct Guard {
    explicit Guard(const Tensor&) {}
  };

  template <class Kernel>
  static void run(const char* op, const Tensor&, int64_t count, int64_t grain, const Kernel& kernel) {
    if (count <= grain) return check_success(op, kernel(int64_t{0}, count));
    std::atomic<Error> error = nullptr;  // a constant, thrown below: within, its message would be lost
    torch::stable::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
      if (const Error found = kernel(begin, end)) error = found;
    });
    check_success(op, error);
  }
};

}  // namespace extops::stable

// `Device::Entries<Cell>`: the entry points of a cell.
#define EXTOPS_ENTRIES_CPU(Device, cell, Cell)                                         \
  template <>                                                                          \
  struct Device::Entries<Cell> {                                                       \
    static constexpr auto* sequence_pack = &extops_##cell##_sequence_pack_cpu;         \
    static constexpr auto* sequence = &extops_##cell##_sequence_cpu;                   \
    static constexpr auto* sequence_step = sequence;                                   \
    static constexpr auto* sequence_backward = &extops_##cell##_sequence_backward_cpu; \
    static constexpr auto* step_alignment = &extops_##cell##_step_alignment_cpu;       \
    static constexpr auto* step = &extops_##cell##_step_cpu;                           \
    static constexpr auto* step_backward = &extops_##cell##_step_backward_cpu;         \
  };
