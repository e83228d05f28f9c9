// Registers the CUDA kernels, on torch's stable ABI.
#include "cuda.h"

#include "elementwise.h"
#include "generic.h"
#include "lltm.h"
#include "sequence.h"
#include "step.h"

#define EXTOPS_NAMES(cell, Cell) EXTOPS_SEQUENCE_OF(cell, extops::Cell) EXTOPS_STEP_OF(cell, extops::Cell)
EXTOPS_CELLS_OF_PARTS(EXTOPS_NAMES)

namespace {

struct Cuda : extops::stable::CudaDevice {
  static constexpr auto* lltm = &extops_lltm_cuda;
  static constexpr auto* lltm_alignment = &extops_lltm_alignment_cuda;
  static constexpr auto* lltm_backward = &extops_lltm_backward_cuda;
  static constexpr auto* lltm_backward_alignment = &extops_lltm_backward_alignment_cuda;
  static constexpr auto* lltm_bias_backward = &extops_lltm_bias_backward_cuda;
  static constexpr auto* lltm_bias_backward_alignment = &extops_lltm_bias_backward_alignment_cuda;
  static constexpr auto* lltm_input_backward = &extops_lltm_input_backward_cuda;
  static constexpr auto* lltm_input_backward_alignment = &extops_lltm_input_backward_alignment_cuda;
  static constexpr auto* lltm_cell = &extops_lltm_cell_cuda;
  static constexpr auto* lltm_cell_backward = &extops_lltm_cell_backward_cuda;

  static constexpr auto* elementwise = &extops_elementwise_cuda;

  template <class Cell>
  struct Sequence;
  template <class Cell>
  struct Step;
};

#define EXTOPS_ENTRIES(cell, Cell) EXTOPS_SEQUENCE_ENTRIES_CUDA(Cuda, cell, extops::Cell)
EXTOPS_CELLS(EXTOPS_ENTRIES)
#define EXTOPS_STEP_ENTRIES(cell, Cell) EXTOPS_STEP_ENTRIES_CUDA(Cuda, cell, extops::Cell)
EXTOPS_CELLS_OF_PARTS(EXTOPS_STEP_ENTRIES)

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(extops, CUDA, library) {
  extops::stable::register_lltm<Cuda>(library);
#define EXTOPS_REGISTER(cell, Cell) extops::stable::register_sequence<Cuda, extops::Cell>(library);
  EXTOPS_CELLS(EXTOPS_REGISTER)
#define EXTOPS_REGISTER_STEP(cell, Cell) extops::stable::register_step<Cuda, extops::Cell>(library);
  EXTOPS_CELLS_OF_PARTS(EXTOPS_REGISTER_STEP)
  extops::stable::register_elementwise<Cuda>(library);
#define EXTOPS_IMPL(name, Arguments) EXTOPS_GENERIC_IMPL(library, Cuda, cuda, name, Arguments)
  EXTOPS_OPERATORS(EXTOPS_NOTHING, EXTOPS_IMPL)
}
