// One step of a cell on torch's stable ABI; see device.h for what a `Device` is. `Device::Step<Cell>` has the entry
// points of a cell. On a CPU torch's own cells are faster, and the operator is a composition of torch's calls.
#pragma once

#include "../../kernels/step.h"
#include "../cell.h"
#include "sequence.h"

namespace extops::stable {

// What bindings need of a cell besides its constants.
template <class Cell>
struct StepOf;

#define EXTOPS_STEP_OF(cell, Cell)                                                        \
  template <>                                                                             \
  struct extops::stable::StepOf<Cell> {                                                   \
    static constexpr const char* kName = #cell "_step";                                   \
    static constexpr const char* kBackward = #cell "_step_backward";                      \
    static constexpr const char* kParametersBackward = #cell "_step_parameters_backward"; \
    static constexpr const char* kInputBackward = #cell "_step_input_backward";           \
  };

// A matrix whose rows are dense and all start aligned: in place if they are, else in a copy.
class Rows {
 public:
  Rows(ScalarType dtype, const Tensor& matrix, int64_t alignment) : data_(matrix.data()), stride_(matrix.strides()[0]) {
    const int64_t columns = matrix.sizes()[1];
    const int64_t bytes = is_half(dtype) ? 2 : compute_bytes(dtype);
    const bool is_dense = columns <= 1 || matrix.strides()[1] == 1;
    const bool is_aligned = reinterpret_cast<uintptr_t>(data_) % alignment == 0 && stride_ * bytes % alignment == 0;
    if (is_dense && is_aligned && stride_ >= columns) return;
    copy_ = contiguous_copy(matrix);
    data_ = copy_->data();
    stride_ = columns;
  }

  const void* data() const { return data_; }
  int64_t stride() const { return stride_; }

 private:
  std::optional<Tensor> copy_;
  const void* data_;
  int64_t stride_;
};

template <class Device, class Cell>
std::array<Tensor, 3> step(
    const Tensor& input, const Tensor& weight_ih, const Tensor& weight_hh, const std::optional<Tensor>& bias_ih,
    const std::optional<Tensor>& bias_hh, const Tensor& h_0, const Tensor& c_0, const bool& allow_tf32) {
  using Entries = typename Device::template Step<Cell>;
  constexpr const char* kOp = StepOf<Cell>::kName;
  const Sizes rows = matrix_sizes(kOp, "input", input);
  const StepSizes sizes{rows[0], rows[1], matrix_sizes(kOp, "h_0", h_0)[1]};
  const Tensor* const bias_x = get(bias_ih);
  const Tensor* const bias_h = get(bias_hh);
  check<StepTensors<Cell>>(kOp, sizes, {&input, &weight_ih, &weight_hh, bias_x, bias_h, &h_0, &c_0}, "input", input);
  [[maybe_unused]] const typename Device::Guard guard(input);
  const ScalarType dtype = gemm_dtype<Device>(kernel_dtype(kOp, "input", input), allow_tf32);
  const Options options = input.options();
  Tensor h = allocate(options, sizes.batch, sizes.state_size);
  Tensor c = allocate(options, sizes.batch, sizes.state_size);
  const std::optional<Dense> dense_bias_x = dense(bias_x), dense_bias_h = dense(bias_h);
  const Dense dense_c_0(c_0);
  StepArguments arguments{};
  arguments.sizes = sizes;
  arguments.bias_x = data_of(dense_bias_x);
  arguments.bias_h = data_of(dense_bias_h);
  arguments.c_0 = dense_c_0.data();
  arguments.h = h.mutable_data();
  arguments.c = c.mutable_data();
  const auto finish = [&](Tensor gates) -> std::array<Tensor, 3> {
    arguments.gates = gates.mutable_data();
    Device::run(kOp, input, 0, 0, [&](auto stream) { return Entries::forward(dtype, arguments, stream); });
    return {std::move(h), std::move(c), std::move(gates)};
  };
  const auto new_gates = [&] { return allocate(options, sizes.batch, Cell::kGates * sizes.state_size); };
  if (const int64_t alignment = Entries::alignment(dtype, sizes)) {
    const Dense dense_input(input, alignment), dense_h_0(h_0, alignment);
    const Rows weights_x(dtype, weight_ih, alignment), weights_h(dtype, weight_hh, alignment);
    arguments.input = dense_input.data();
    arguments.h_0 = dense_h_0.data();
    arguments.weights_x = weights_x.data();
    arguments.weights_x_stride = weights_x.stride();
    arguments.weights_h = weights_h.data();
    arguments.weights_h_stride = weights_h.stride();
    return finish(new_gates());
  }
  Tensor input_gates = mm(input, transpose(weight_ih));
  const Tensor hidden_gates = mm(h_0, transpose(weight_hh));
  arguments.input_gates = input_gates.data();
  arguments.hidden_gates = hidden_gates.data();
  return finish(kHasOneGradient<Cell> ? std::move(input_gates) : new_gates());
}

// What the pointwise part of a backward gets, from the struct of a table.
template <class Table>
StepBackwardArguments pointwise_of(const Table& in) {
  StepBackwardArguments arguments{};
  arguments.sizes = in.sizes;
  arguments.grad_h = in.grad_h;
  arguments.grad_c = in.grad_c;
  arguments.gates = in.gates;
  arguments.saved_c = in.saved_c;
  arguments.grad_x = in.grad_x;
  arguments.grad_h_part = in.grad_h_part;
  arguments.grad_c_0 = in.grad_c_0;
  return arguments;
}

// The gradients of the gates. GEMMs compute those of the parameters, the input and the state from them.
template <class Device, class Cell>
std::array<Tensor, 3> step_backward(
    const std::optional<Tensor>& grad_h, const std::optional<Tensor>& grad_c, const Tensor& gates,
    const Tensor& saved_c) {
  using Entries = typename Device::template Step<Cell>;
  using BackwardTensors = StepBackwardTensors<Cell>;
  constexpr const char* kOp = StepOf<Cell>::kBackward;
  const Sizes cell = matrix_sizes(kOp, "saved_c", saved_c);
  const StepSizes sizes{cell[0], 0, cell[1]};
  const Tensors tensors{get(grad_h), get(grad_c), &gates, &saved_c};
  check<BackwardTensors>(kOp, sizes, tensors, "saved_c", saved_c);
  const auto backward = [](ScalarType dtype, const BackwardTensors& in, void* stream) {
    const StepBackwardArguments arguments = pointwise_of(in);
    return Entries::backward(dtype, arguments, stream);
  };
  return run<Device, BackwardTensors>(kOp, backward, kernel_dtype(kOp, "gates", gates), sizes, tensors, saved_c, 0, 0);
}

// The gradients of both biases.
template <class Device, class Cell>
std::array<Tensor, 2> bias_backward(
    ScalarType dtype, const StepSizes& sizes, const Tensor& grad_x, const Tensor& grad_h_part) {
  using Entries = typename Device::template Step<Cell>;
  if (Entries::bias_backward_alignment(dtype, sizes) == 0) {
    Tensor of_x = sum_rows(grad_x);
    Tensor of_h = kHasOneGradient<Cell> ? contiguous_copy(of_x) : sum_rows(grad_h_part);
    return {std::move(of_x), std::move(of_h)};
  }
  Tensor of_x = allocate(grad_x.options(), Cell::kInput * sizes.state_size);
  Tensor of_h = allocate(grad_x.options(), Cell::kRecurrent * sizes.state_size);
  const StepBiasBackwardArguments arguments{
      sizes, grad_x.data(), grad_h_part.data(), of_x.mutable_data(), of_h.mutable_data()};
  Device::run(StepOf<Cell>::kParametersBackward, grad_x, 0, 0, [&](auto stream) {
    return Entries::bias_backward(dtype, arguments, stream);
  });
  return {std::move(of_x), std::move(of_h)};
}

// With the gradients of the parameters.
template <class Device, class Cell>
std::array<Tensor, 7> step_parameters_backward(
    const std::optional<Tensor>& grad_h, const std::optional<Tensor>& grad_c, const Tensor& input, const Tensor& h_0,
    const Tensor& gates, const Tensor& saved_c, const bool& allow_tf32) {
  using Entries = typename Device::template Step<Cell>;
  constexpr const char* kOp = StepOf<Cell>::kParametersBackward;
  const Sizes cell = matrix_sizes(kOp, "saved_c", saved_c);
  const StepSizes sizes{cell[0], matrix_sizes(kOp, "input", input)[1], cell[1]};
  const Tensors tensors{get(grad_h), get(grad_c), &input, &h_0, &gates, &saved_c};
  using AllTensors = StepParametersBackwardTensors<Cell>;
  check<AllTensors>(kOp, sizes, tensors, "saved_c", saved_c);
  [[maybe_unused]] const typename Device::Guard guard(saved_c);
  const ScalarType dtype = gemm_dtype<Device>(kernel_dtype(kOp, "gates", gates), allow_tf32);
  if (const int64_t alignment = Entries::backward_alignment(dtype, sizes)) {
    const auto backward = [](ScalarType dtype, const AllTensors& in, void* stream) {
      StepBackwardArguments arguments = pointwise_of(in);
      arguments.input = in.input;
      arguments.h_0 = in.h_0;
      arguments.grad_weights_x = in.grad_weight_ih;
      arguments.grad_weights_h = in.grad_weight_hh;
      arguments.grad_weights_x_stride = in.sizes.input_features;
      arguments.grad_weights_h_stride = in.sizes.state_size;
      arguments.grad_bias_x = in.grad_bias_ih;
      arguments.grad_bias_h = in.grad_bias_hh;
      return Entries::backward(dtype, arguments, stream);
    };
    return run<Device, AllTensors>(kOp, backward, dtype, sizes, tensors, saved_c, 0, 0, alignment);
  }
  auto [grad_x, grad_h_part, grad_c_0] = step_backward<Device, Cell>(grad_h, grad_c, gates, saved_c);
  const Tensor& of_h = kHasOneGradient<Cell> ? grad_x : grad_h_part;
  Tensor grad_weight_ih = mm(transpose(grad_x), input);
  Tensor grad_weight_hh = mm(transpose(of_h), h_0);
  auto [grad_bias_ih, grad_bias_hh] = bias_backward<Device, Cell>(dtype, sizes, grad_x, grad_h_part);
  return {std::move(grad_x),         std::move(grad_h_part),  std::move(grad_c_0),    std::move(grad_weight_ih),
          std::move(grad_weight_hh), std::move(grad_bias_ih), std::move(grad_bias_hh)};
}

// The gradients of the input and of h_0.
template <class Device, class Cell>
std::array<Tensor, 2> step_input_backward(
    const Tensor& grad_x, const Tensor& grad_h_part, const std::optional<Tensor>& grad_c_0, const Tensor& weight_ih,
    const Tensor& weight_hh, const bool& allow_tf32) {
  using Entries = typename Device::template Step<Cell>;
  constexpr const char* kOp = StepOf<Cell>::kInputBackward;
  const StepSizes sizes{
      matrix_sizes(kOp, "grad_x", grad_x)[0], matrix_sizes(kOp, "weight_ih", weight_ih)[1],
      matrix_sizes(kOp, "weight_hh", weight_hh)[1]};
  const Tensor* const given = get(grad_c_0);
  check<StepInputBackwardTensors<Cell>>(
      kOp, sizes, {&grad_x, &grad_h_part, given, &weight_ih, &weight_hh}, "grad_x", grad_x);
  [[maybe_unused]] const typename Device::Guard guard(grad_x);
  const ScalarType dtype = gemm_dtype<Device>(kernel_dtype(kOp, "grad_x", grad_x), allow_tf32);
  if (Entries::input_backward_alignment(dtype, sizes) == 0) {
    const Tensor& of_h = kHasOneGradient<Cell> ? grad_x : grad_h_part;
    // As a bias: the library adds it to the GEMM.
    return {mm(grad_x, weight_ih), given == nullptr ? mm(of_h, weight_hh) : linear(of_h, transpose(weight_hh), *given)};
  }
  const Dense dense_grad_x(grad_x), dense_grad_h_part(grad_h_part), weights_x(weight_ih), weights_h(weight_hh);
  const std::optional<Dense> dense_given = dense(given);
  Tensor grad_input = allocate(grad_x.options(), sizes.batch, sizes.input_features);
  Tensor grad_h_0 = allocate(grad_x.options(), sizes.batch, sizes.state_size);
  StepInputBackwardArguments arguments{};
  arguments.sizes = sizes;
  arguments.grad_x = dense_grad_x.data();
  arguments.grad_h_part = dense_grad_h_part.data();
  arguments.grad_c_0 = data_of(dense_given);
  arguments.weights_x = weights_x.data();
  arguments.weights_h = weights_h.data();
  arguments.weights_x_stride = sizes.input_features;
  arguments.weights_h_stride = sizes.state_size;
  arguments.grad_input = grad_input.mutable_data();
  arguments.grad_h_0 = grad_h_0.mutable_data();
  Device::run(kOp, grad_x, 0, 0, [&](auto stream) { return Entries::input_backward(dtype, arguments, stream); });
  return {std::move(grad_input), std::move(grad_h_0)};
}

template <class Device, class Cell, class Library>
void register_step(Library& library) {
  library.impl(StepOf<Cell>::kName, &Boxed<&step<Device, Cell>>::call);
  library.impl(StepOf<Cell>::kBackward, &Boxed<&step_backward<Device, Cell>>::call);
  library.impl(StepOf<Cell>::kParametersBackward, &Boxed<&step_parameters_backward<Device, Cell>>::call);
  library.impl(StepOf<Cell>::kInputBackward, &Boxed<&step_input_backward<Device, Cell>>::call);
}

}  // namespace extops::stable

// `Device::Step<Cell>`: the entry points of a cell.
#define EXTOPS_STEP_ENTRIES_CUDA(Device, cell, Cell)                                                       \
  template <>                                                                                              \
  struct Device::Step<Cell> {                                                                              \
    static constexpr auto* alignment = &extops_##cell##_step_alignment_cuda;                               \
    static constexpr auto* forward = &extops_##cell##_step_cuda;                                           \
    static constexpr auto* backward = &extops_##cell##_step_backward_cuda;                                 \
    static constexpr auto* backward_alignment = &extops_##cell##_step_backward_alignment_cuda;             \
    static constexpr auto* bias_backward = &extops_##cell##_step_bias_backward_cuda;                       \
    static constexpr auto* bias_backward_alignment = &extops_##cell##_step_bias_backward_alignment_cuda;   \
    static constexpr auto* input_backward = &extops_##cell##_step_input_backward_cuda;                     \
    static constexpr auto* input_backward_alignment = &extops_##cell##_step_input_backward_alignment_cuda; \
  };
