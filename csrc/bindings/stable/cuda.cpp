// Registers the CUDA kernels, on torch's stable ABI.
#include <torch/csrc/stable/accelerator.h>

#include "../../kernels/lltm.h"
#include "../../kernels/multiply.h"
#include "../../kernels/rounding.h"
#include "glibc.h"
#include "lltm.h"
#include "multiply.h"
#include "rounding.h"

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
  static constexpr auto* round_ste = &extops_round_ste_cuda;
  static constexpr auto* elementwise_mult = &extops_elementwise_mult_cuda;
  static constexpr auto* elementwise_mult_backward = &extops_elementwise_mult_backward_cuda;

  template <class Kernel>
  static void run(const extops::stable::Tensor& tensor, int64_t, const Kernel& kernel) {
    run(tensor, kernel);
  }

  template <class Kernel>
  static void run_small(const extops::stable::Tensor& tensor, int64_t, int64_t, int64_t, const Kernel& kernel) {
    run(tensor, kernel);
  }

 private:
  template <class Kernel>
  static void run(const extops::stable::Tensor& tensor, const Kernel& kernel) {
    const auto device = tensor.device_index();
    const torch::stable::accelerator::DeviceGuard guard(device);
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
    extops::stable::check_success(kernel(stream));
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(extops, CUDA, library) {
  extops::stable::register_lltm<Cuda>(library);
  extops::stable::register_rounding<Cuda>(library);
  extops::stable::register_multiply<Cuda>(library);
}
