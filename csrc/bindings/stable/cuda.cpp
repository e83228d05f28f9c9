// Registers the CUDA kernels, on torch's stable ABI.
#include "cuda.h"

#include "elementwise.h"
#include "sequence.h"
#include "step.h"

#define EXTOPS_NAMES_OF(cell, Cell) EXTOPS_NAMES(cell, extops::Cell)
EXTOPS_CELLS(EXTOPS_NAMES_OF)

namespace {

struct Cuda : extops::stable::CudaDevice {
  static constexpr auto* elementwise = &extops_elementwise_cuda;

  template <class Cell>
  struct Entries;
};

#define EXTOPS_ENTRIES_OF(cell, Cell) EXTOPS_ENTRIES_CUDA(Cuda, cell, extops::Cell)
EXTOPS_CELLS(EXTOPS_ENTRIES_OF)

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(extops, CUDA, library) {
#define EXTOPS_REGISTER(cell, Cell) extops::stable::register_cell<Cuda, extops::Cell>(library);
  EXTOPS_CELLS(EXTOPS_REGISTER)
  extops::stable::register_elementwise<Cuda>(library);
}
