// Registers the CUDA kernels, on torch's stable ABI.
#include "cuda.h"

#include "elementwise.h"
#include "sequence.h"
#include "step.h"

#define EXTOPS_NAMES(cell, Cell) EXTOPS_SEQUENCE_OF(cell, extops::Cell) EXTOPS_STEP_OF(cell, extops::Cell)
EXTOPS_CELLS(EXTOPS_NAMES)

namespace {

struct Cuda : extops::stable::CudaDevice {
  static constexpr auto* elementwise = &extops_elementwise_cuda;

  template <class Cell>
  struct Sequence;
  template <class Cell>
  struct Step;
};

#define EXTOPS_ENTRIES(cell, Cell)                       \
  EXTOPS_SEQUENCE_ENTRIES_CUDA(Cuda, cell, extops::Cell) \
  EXTOPS_STEP_ENTRIES_CUDA(Cuda, cell, extops::Cell)
EXTOPS_CELLS(EXTOPS_ENTRIES)

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(extops, CUDA, library) {
#define EXTOPS_REGISTER(cell, Cell) extops::stable::register_cell<Cuda, extops::Cell>(library);
  EXTOPS_CELLS(EXTOPS_REGISTER)
  extops::stable::register_elementwise<Cuda>(library);
}
