// Tensors on torch's stable ABI, and kernels that its dispatcher can call.
#pragma once

#include <torch/csrc/stable/library.h>

#include <array>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>

namespace extops::stable {

// Between values and the words on the dispatcher's stack. Torch's headers have no public name for these, up to 2.15.
template <class Value>
StableIValue box(const Value& value) {
  return torch::stable::detail::from(value);
}

template <class Value>
Value unbox(StableIValue word) {
  return torch::stable::detail::to<Value>(word);
}

using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

// What two tensors must share to meet in a kernel, in torch's numbers.
struct Options {
  int32_t dtype;
  int32_t device_type;
  int32_t device_index;
};

// A tensor with one owner. torch::stable::Tensor, which TORCH_BOX hands to kernels, counts its owners in memory that it
// allocates for each argument and each result, and that takes a good part of a small call.
class Tensor {
 public:
  explicit Tensor(AtenTensorHandle handle = nullptr) : handle_(handle) {}

  AtenTensorHandle get() const { return handle_.get(); }
  AtenTensorHandle release() { return handle_.release(); }

  bool defined() const { return ask(aoti_torch_is_defined); }
  bool is_contiguous() const { return ask(aoti_torch_is_contiguous); }
  int64_t dim() const { return ask(aoti_torch_get_dim); }
  int64_t numel() const { return ask(aoti_torch_get_numel); }
  Sizes sizes() const { return Sizes(ask(aoti_torch_get_sizes), dim()); }
  Sizes strides() const { return Sizes(ask(aoti_torch_get_strides), dim()); }
  int32_t dtype() const { return ask(aoti_torch_get_dtype); }
  int32_t device_index() const { return ask(aoti_torch_get_device_index); }
  Options options() const { return {dtype(), ask(aoti_torch_get_device_type), device_index()}; }
  const void* data() const { return ask(torch_get_const_data_ptr); }
  void* mutable_data() const { return ask(torch_get_mutable_data_ptr); }

 private:
  struct Delete {
    void operator()(AtenTensorHandle handle) const { aoti_torch_delete_tensor_object(handle); }
  };

  template <class Answer>
  Answer ask(AOTITorchError (*question)(AtenTensorHandle, Answer*)) const {
    Answer answer{};
    TORCH_ERROR_CODE_CHECK(question(get(), &answer));
    return answer;
  }

  std::unique_ptr<AtenTensorOpaque, Delete> handle_;
};

template <class Argument>
struct Unbox;

template <>
struct Unbox<Tensor> {
  static Tensor call(StableIValue value) { return Tensor(unbox<AtenTensorHandle>(value)); }
};

template <>
struct Unbox<std::optional<Tensor>> {
  static std::optional<Tensor> call(StableIValue value) {
    const auto handle = unbox<std::optional<AtenTensorHandle>>(value);
    return handle.has_value() ? std::optional<Tensor>(*handle) : std::nullopt;
  }
};

template <>
struct Unbox<double> {
  static double call(StableIValue value) { return unbox<double>(value); }
};

template <>
struct Unbox<bool> {
  static bool call(StableIValue value) { return unbox<bool>(value); }
};

// Within, what a kernel calls is not recorded: gradients are Python's. Where there is no Python, torch would record it,
// and refuse to write into given tensors.
class NoGrad {
 public:
  NoGrad() { aoti_torch_grad_mode_set_enabled(false); }
  ~NoGrad() { aoti_torch_grad_mode_set_enabled(before_); }
  NoGrad(const NoGrad&) = delete;
  NoGrad& operator=(const NoGrad&) = delete;

 private:
  const bool before_ = aoti_torch_grad_mode_is_enabled();
};

template <class Results, class... Arguments, size_t... kArgument, size_t... kResult>
void call_boxed(
    Results (*kernel)(const Arguments&...), StableIValue* stack, std::index_sequence<kArgument...>,
    std::index_sequence<kResult...>) {
  const NoGrad no_grad;
  // Braces: if an argument cannot be taken, those before it are deleted.
  const std::tuple<Arguments...> taken{Unbox<Arguments>::call(stack[kArgument])...};
  Results made = kernel(std::get<kArgument>(taken)...);
  ((stack[kResult] = box(made[kResult].release())), ...);
}

template <auto kKernel>
struct Boxed;

// A kernel as the dispatcher calls it: arguments come on the stack, which owns them, and results take their places.
template <size_t kResults, class... Arguments, std::array<Tensor, kResults> (*kKernel)(const Arguments&...)>
struct Boxed<kKernel> {
  static void call(StableIValue* stack, uint64_t, uint64_t) {
    call_boxed(kKernel, stack, std::index_sequence_for<Arguments...>(), std::make_index_sequence<kResults>());
  }
};

}  // namespace extops::stable
