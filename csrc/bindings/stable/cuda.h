// A GPU as a `Device` of bindings; see device.h.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include "checks.h"

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

  template <class Kernel>
  static void run(const char* op, const Tensor& tensor, int64_t, int64_t, const Kernel& kernel) {
    const Guard guard(tensor);
    check_success(op, kernel(stream(tensor)));
  }
};

}  // namespace extops::stable

// `Device::Sequence<Cell>`: the entry points of a cell.
#define EXTOPS_SEQUENCE_ENTRIES_CUDA(Device, cell, Cell)                                           \
  template <>                                                                                      \
  struct Device::Sequence<Cell> {                                                                  \
    static constexpr auto* forward = &extops_##cell##_sequence_cuda;                               \
    static constexpr auto* workspace = &extops_##cell##_sequence_workspace_cuda;                   \
    static constexpr auto* step = &extops_##cell##_sequence_step_cuda;                             \
    static constexpr auto* backward = &extops_##cell##_sequence_backward_cuda;                     \
    static constexpr auto* backward_workspace = &extops_##cell##_sequence_backward_workspace_cuda; \
    static constexpr auto* step_backward = &extops_##cell##_sequence_step_backward_cuda;           \
  };
