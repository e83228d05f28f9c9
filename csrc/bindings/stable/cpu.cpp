// Defines the operators and registers their CPU kernels, on torch's stable ABI.
#include "cpu.h"

#include "elementwise.h"
#include "generic.h"
#include "lltm.h"
#include "sequence.h"

#define EXTOPS_NAMES(cell, Cell) EXTOPS_SEQUENCE_OF(cell, extops::Cell)
EXTOPS_CELLS_OF_PARTS(EXTOPS_NAMES)

namespace {

struct Cpu : extops::stable::CpuDevice {
  static constexpr auto* lltm = &extops_lltm_cpu;
  static constexpr auto* lltm_alignment = &extops_lltm_alignment_cpu;
  static constexpr auto* lltm_backward = &extops_lltm_backward_cpu;
  static constexpr auto* lltm_backward_alignment = &extops_lltm_backward_alignment_cpu;
  static constexpr auto* lltm_cell = &extops_lltm_cell_cpu;
  static constexpr auto* lltm_cell_backward = &extops_lltm_cell_backward_cpu;

  static constexpr auto* elementwise = &extops_elementwise_cpu;

  template <class Cell>
  struct Sequence;
};

#define EXTOPS_ENTRIES(cell, Cell) EXTOPS_SEQUENCE_ENTRIES_CPU(Cpu, cell, extops::Cell)
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
