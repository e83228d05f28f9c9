// A GPU as a `Device` of bindings; see device.h.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include "../../kernels/sequence.h"
#include "aten.h"
#include "checks.h"

// Since torch 2.10.
extern "C" [[gnu::weak, gnu::visibility("default")]] AOTITorchError torch_get_current_cuda_blas_handle(void** handle);

namespace extops::stable {

struct CudaDevice {
  static constexpr bool kIsCuda = true;

  // Makes the device of a tensor the current one: for it kernels are chosen and launched.
  class Guard {
   public:
    explicit Guard(const Tensor& tensor) : guard_(tensor.device_index()) {}

   private:
    torch::stable::accelerator::DeviceGuard guard_;
  };

  // The current stream of a tensor's device.
  static void* stream(const Tensor& tensor) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.device_index(), &stream));
    return stream;
  }

  // In float32 or TF32, whatever torch's switch of GEMMs says; false where torch has to compute it.
  static bool mm_into(ScalarType dtype, const Tensor& a, const Tensor& b, const Tensor& product) {
    void* handle = nullptr;
    if (torch_get_current_cuda_blas_handle == nullptr || torch_get_current_cuda_blas_handle(&handle) != 0) return false;
    const int64_t sizes[] = {a.sizes()[0], a.sizes()[1], b.sizes()[1]};
    const int64_t a_strides[] = {a.strides()[0], a.strides()[1]}, b_strides[] = {b.strides()[0], b.strides()[1]};
    const auto data = [](const Tensor& x) { return static_cast<const float*>(x.data()); };
    return extops_gemm_cuda(
               handle, dtype, sizes, data(a), a_strides, data(b), b_strides,
               static_cast<float*>(product.mutable_data()), 0) == nullptr;
  }

  template <class Kernel>
  static void run(const char* op, const Tensor& tensor, int64_t, int64_t, const Kernel& kernel) {
    const Guard guard(tensor);
    check_success(op, kernel(stream(tensor)));
  }
};

}  // namespace extops::stable

// `Device::Entries<Cell>`: the entry points of a cell.
#define EXTOPS_ENTRIES_CUDA(Device, cell, Cell)                                                   \
  template <>                                                                                     \
  struct Device::Entries<Cell> {                                                                  \
    static constexpr auto* sequence_plan = &extops_##cell##_sequence_plan_cuda;                   \
    static constexpr auto* sequence = &extops_##cell##_sequence_cuda;                             \
    static constexpr auto* sequence_step = &extops_##cell##_sequence_step_cuda;                   \
    static constexpr auto* sequence_backward = &extops_##cell##_sequence_backward_cuda;           \
    static constexpr auto* sequence_step_backward = &extops_##cell##_sequence_step_backward_cuda; \
    static constexpr auto* step_alignment = &extops_##cell##_step_alignment_cuda;                 \
    static constexpr auto* step = &extops_##cell##_step_cuda;                                     \
    static constexpr auto* step_backward = &extops_##cell##_step_backward_cuda;                   \
    static constexpr auto* step_bias_backward = &extops_##cell##_step_bias_backward_cuda;         \
    static constexpr auto* step_input_backward = &extops_##cell##_step_input_backward_cuda;       \
  };
