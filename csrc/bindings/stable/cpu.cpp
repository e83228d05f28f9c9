// Defines the operators and registers their CPU kernels, on torch's stable ABI.
#include <atomic>

#include "elementwise.h"
#include "generic.h"
#include "lltm.h"
#include "sequence.h"

namespace {

struct Cpu {
  static constexpr bool kIsCuda = false;
  static constexpr auto* lltm = &extops_lltm_cpu;
  static constexpr auto* lltm_alignment = &extops_lltm_alignment_cpu;
  static constexpr auto* lltm_backward = &extops_lltm_backward_cpu;
  static constexpr auto* lltm_backward_alignment = &extops_lltm_backward_alignment_cpu;
  static constexpr auto* lltm_cell = &extops_lltm_cell_cpu;
  static constexpr auto* lltm_cell_backward = &extops_lltm_cell_backward_cpu;

  static constexpr auto* elementwise = &extops_elementwise_cpu;

  template <class Cell>
  struct Sequence;

  struct Guard {
    explicit Guard(const extops::stable::Tensor&) {}
  };

  template <class Kernel>
  static void run(const char* op, const extops::stable::Tensor&, int64_t count, int64_t grain, const Kernel& kernel) {
    if (count <= grain) return extops::stable::check_success(op, kernel(int64_t{0}, count));
    std::atomic<Error> error = nullptr;  // a constant, thrown below: within, its message would be lost
    torch::stable::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
      if (const Error found = kernel(begin, end)) error = found;
    });
    extops::stable::check_success(op, error);
  }
};

#define EXTOPS_ENTRIES(cell, Cell)                                            \
  template <>                                                                 \
  struct Cpu::Sequence<extops::Cell> {                                        \
    static constexpr auto* forward = &extops_##cell##_sequence_cpu;           \
    static constexpr auto* backward = &extops_##cell##_sequence_backward_cpu; \
  };
EXTOPS_CELLS(EXTOPS_ENTRIES)

}  // namespace

STABLE_TORCH_LIBRARY(extops, library) {
  for (size_t index = 0; extops_schema(index) != nullptr; ++index) library.def(extops_schema(index));
}

STABLE_TORCH_LIBRARY_IMPL(extops, CPU, library) {
  extops::stable::register_lltm<Cpu>(library);
#define EXTOPS_REGISTER(cell, Cell) extops::stable::register_sequence<Cpu, extops::Cell>(library);
  EXTOPS_CELLS(EXTOPS_REGISTER)
  extops::stable::register_elementwise<Cpu>(library);
#define EXTOPS_IMPL(name, Arguments) EXTOPS_GENERIC_IMPL(library, Cpu, cpu, name, Arguments)
  EXTOPS_OPERATORS(EXTOPS_NOTHING, EXTOPS_IMPL)
}
