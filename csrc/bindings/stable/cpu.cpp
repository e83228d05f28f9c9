// Defines the operators and registers their CPU kernels, on torch's stable ABI.
#include "cpu.h"

#include "elementwise.h"
#include "sequence.h"
#include "step.h"

#define EXTOPS_NAMES(cell, Cell) EXTOPS_SEQUENCE_OF(cell, extops::Cell) EXTOPS_STEP_OF(cell, extops::Cell)
EXTOPS_CELLS(EXTOPS_NAMES)

namespace {

struct Cpu : extops::stable::CpuDevice {
  static constexpr auto* elementwise = &extops_elementwise_cpu;

  template <class Cell>
  struct Sequence;
  template <class Cell>
  struct Step;
};

#define EXTOPS_ENTRIES(cell, Cell)                     \
  EXTOPS_SEQUENCE_ENTRIES_CPU(Cpu, cell, extops::Cell) \
  EXTOPS_STEP_ENTRIES_CPU(Cpu, cell, extops::Cell)
EXTOPS_CELLS(EXTOPS_ENTRIES)

}  // namespace

STABLE_TORCH_LIBRARY(extops, library) {
  for (size_t index = 0; extops_schema(index) != nullptr; ++index) library.def(extops_schema(index));
}

STABLE_TORCH_LIBRARY_IMPL(extops, CPU, library) {
#define EXTOPS_REGISTER(cell, Cell) extops::stable::register_cell<Cpu, extops::Cell>(library);
  EXTOPS_CELLS(EXTOPS_REGISTER)
  extops::stable::register_elementwise<Cpu>(library);
}
