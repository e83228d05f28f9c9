// How elementwise operators hand their tensors to a kernel.
#pragma once

#include <vector>

#include "checks.h"

namespace extops::stable {

// Sizes and strides as kernels take them, see kernels/elementwise.h.
class Geometry {
 public:
  Geometry(Sizes sizes, size_t operands) : dim_(static_cast<int64_t>(sizes.size())) {
    data_.reserve(operands);
    numbers_.reserve((operands + 1) * sizes.size());
    numbers_.assign(sizes.begin(), sizes.end());
  }

  void add_output(const Tensor& tensor) { add(tensor, tensor.mutable_data()); }
  void add_input(const Tensor& tensor) { add(tensor, const_cast<void*>(tensor.data())); }

  int64_t dim() const { return dim_; }
  const int64_t* numbers() const { return numbers_.data(); }
  void* const* data() const { return data_.data(); }

 private:
  void add(const Tensor& tensor, void* data) {
    const Sizes sizes = tensor.sizes();
    const Sizes strides = tensor.strides();
    const int64_t missing = dim_ - static_cast<int64_t>(sizes.size());
    for (int64_t d = 0; d < dim_; ++d) {
      const bool broadcast = d < missing || (sizes[d - missing] == 1 && numbers_[d] != 1);
      numbers_.push_back(broadcast ? 0 : strides[d - missing]);
    }
    data_.push_back(data);
  }

  int64_t dim_;
  std::vector<int64_t> numbers_;
  std::vector<void*> data_;
};

template <class Device, class Kernel>
void run_elementwise(Kernel kernel, ScalarType dtype, const Tensor& output, const Geometry& geometry) {
  Device::run(output, output.numel(), [&](auto... where) {
    return kernel(dtype, geometry.dim(), geometry.numbers(), geometry.data(), where...);
  });
}

}  // namespace extops::stable
