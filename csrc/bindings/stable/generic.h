// The binding of operators whose own kernel serves every problem: all of it follows from their tables
// (kernels/table.h).
#pragma once

#include <array>
#include <optional>
#include <utility>

#include "../schemas.h"
#include "table.h"

namespace extops::stable {

// Takes the arguments off the dispatcher's stack, and reads the sizes from dimensions that are a single size.
template <class Arguments>
class Take {
 public:
  Take(const StableIValue* stack, Arguments& arguments) : stack_(stack) { Arguments::infer(arguments, *this); }

  template <class... Dimensions>
  void in(const char* name, Dimensions&&... dimensions) {
    tensors[count_] = &(taken_[count_] = Unbox<Tensor>::call(stack_[count_]));
    if (like == nullptr) like_name = name, like = tensors[count_];
    read(taken_[count_++], std::forward<Dimensions>(dimensions)...);
  }

  template <class... Dimensions>
  void upstream(const char*, Dimensions&&... dimensions) {
    taken_[count_] = Unbox<std::optional<Tensor>>::call(stack_[count_]).value_or(Tensor());
    if (taken_[count_].get() != nullptr && taken_[count_].defined()) {
      tensors[count_] = &taken_[count_];
      read(taken_[count_], std::forward<Dimensions>(dimensions)...);
    }
    ++count_;
  }

  std::array<const Tensor*, Arguments::kInputs> tensors{};  // null where an argument is absent
  const char* like_name = nullptr;                          // of the first that cannot be absent
  const Tensor* like = nullptr;

 private:
  template <class... Dimensions>
  static void read(const Tensor& tensor, Dimensions&&... dimensions) {
    const Sizes sizes = tensor.sizes();
    size_t d = 0;
    if (sizes.size() == sizeof...(Dimensions)) (set(std::forward<Dimensions>(dimensions), sizes[d++]), ...);
  }
  static void set(int64_t& size, int64_t length) { size = length; }
  static void set(const int64_t&&, int64_t) {}  // a computed dimension

  const StableIValue* stack_;
  std::array<Tensor, Arguments::kInputs> taken_;
  size_t count_ = 0;
};

// Calls a kernel as the dispatcher calls an operator, see Boxed. Threads divide the rows of the first result.
template <class Device, class Arguments, class Kernel>
void call_generic(const char* op, Kernel kernel, StableIValue* stack) {
  Arguments arguments{};
  const Take<Arguments> taken(stack, arguments);
  Check check(op, taken.tensors.data(), taken.like_name, *taken.like);
  Arguments::visit(arguments, check);
  const ScalarType dtype = kernel_dtype(op, taken.like_name, *taken.like);
  Fill<Arguments> fill(taken.tensors.data(), taken.like->options(), 1);
  Arguments::visit(arguments, fill);
  const int64_t rows = fill.results[0].sizes()[0];
  const int64_t grain = 1 + kPointwiseGrain * rows / std::max<int64_t>(fill.results[0].numel(), 1);
  Device::run(op, *taken.like, rows, grain, [&](auto... where) { return kernel(dtype, arguments, where...); });
  for (size_t k = 0; k < fill.results.size(); ++k) stack[k] = box(fill.results[k].release());
}

// Registers an operator of EXTOPS_OPERATORS for a device.
#define EXTOPS_GENERIC_IMPL(library, Device, device, name, Arguments)                         \
  library.impl(#name, [](StableIValue* stack, uint64_t, uint64_t) {                           \
    extops::stable::call_generic<Device, Arguments>(#name, &extops_##name##_##device, stack); \
  });

}  // namespace extops::stable
