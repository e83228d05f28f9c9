// Registers the CUDA kernels, on torch's stable ABI.
#include <torch/csrc/stable/accelerator.h>

#include "elementwise.h"
#include "generic.h"
#include "lltm.h"
#include "sequence.h"

namespace {

struct Cuda {
  static constexpr bool kIsCuda = true;
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

  // Makes the device of a tensor the current one: for it kernels are chosen and launched.
  class Guard {
   public:
    explicit Guard(const extops::stable::Tensor& tensor) : guard_(tensor.device_index()) {}

   private:
    torch::stable::accelerator::DeviceGuard guard_;
  };

  // The current stream of a tensor's device.
  static void* stream(const extops::stable::Tensor& tensor) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.device_index(), &stream));
    return stream;
  }

  template <class Kernel>
  static void run(const char* op, const extops::stable::Tensor& tensor, int64_t, int64_t, const Kernel& kernel) {
    const Guard guard(tensor);
    extops::stable::check_success(op, kernel(stream(tensor)));
  }
};

#define EXTOPS_ENTRIES(cell, Cell)                                                                 \
  template <>                                                                                      \
  struct Cuda::Sequence<extops::Cell> {                                                            \
    static constexpr auto* forward = &extops_##cell##_sequence_cuda;                               \
    static constexpr auto* workspace = &extops_##cell##_sequence_workspace_cuda;                   \
    static constexpr auto* step = &extops_##cell##_sequence_step_cuda;                             \
    static constexpr auto* backward = &extops_##cell##_sequence_backward_cuda;                     \
    static constexpr auto* backward_workspace = &extops_##cell##_sequence_backward_workspace_cuda; \
    static constexpr auto* step_backward = &extops_##cell##_sequence_step_backward_cuda;           \
  };
EXTOPS_CELLS(EXTOPS_ENTRIES)

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(extops, CUDA, library) {
  extops::stable::register_lltm<Cuda>(library);
#define EXTOPS_REGISTER(cell, Cell) extops::stable::register_sequence<Cuda, extops::Cell>(library);
  EXTOPS_CELLS(EXTOPS_REGISTER)
  extops::stable::register_elementwise<Cuda>(library);
#define EXTOPS_IMPL(name, Arguments) EXTOPS_GENERIC_IMPL(library, Cuda, cuda, name, Arguments)
  EXTOPS_OPERATORS(EXTOPS_NOTHING, EXTOPS_IMPL)
}
