// Defines the operators and registers their CPU kernels, on torch's stable ABI.
#include "cpu.h"

#include "elementwise.h"
#include "sequence.h"
#include "step.h"

#define EXTOPS_NAMES_OF(cell, Cell) EXTOPS_NAMES(cell, extops::Cell)
EXTOPS_CELLS(EXTOPS_NAMES_OF)

namespace {

struct Cpu : extops::stable::CpuDevice {
  static constexpr auto* elementwise = &extops_elementwise_cpu;

  template <class Cell>
  struct Entries;
};

#define EXTOPS_ENTRIES_OF(cell, Cell) EXTOPS_ENTRIES_CPU(Cpu, cell, extops::Cell)
EXTOPS_CELLS(EXTOPS_ENTRIES_OF)

}  // namespace

STABLE_TORCH_LIBRARY(extops, library) {
  for (size_t index = 0; extops_schema(index) != nullptr; ++index) library.def(extops_schema(index));
}

STABLE_TORCH_LIBRARY_IMPL(extops, CPU, library) {
#define EXTOPS_REGISTER(cell, Cell) extops::stable::register_cell<Cpu, extops::Cell>(library);
  EXTOPS_CELLS(EXTOPS_REGISTER)
  extops::stable::register_elementwise<Cpu>(library);
}
