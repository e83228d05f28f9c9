// One step of a cell on torch's stable ABI; see device.h for what a `Device` is.
#pragma once

#include "../../kernels/step.h"
#include "../cell.h"
#include "sequence.h"

namespace extops::stable {

// A piece of the work of a kernel that multiplies is a column of the state.
template <class Cell>
int64_t grain_of_columns(const StepSizes& sizes) {
  return grain_of(Cell::kGates * sizes.batch * (sizes.state_size + sizes.input_features));
}

inline int64_t elements(const StepSizes& sizes) { return sizes.batch * sizes.state_size; }

// Weights that are joined are also two views of one tensor.
struct StepParameters {
  const Tensor* weights_x;
  const Tensor* weights_h;
  const Tensor* bias_x;
  const Tensor* bias_h;
  const Tensor* joined = nullptr;
};

// After the tensors were checked.
template <class Device, class Cell>
std::array<Tensor, 3> run_step(
    const StepSizes& sizes, const Tensor& input, const StepParameters& parameters, const Tensor& h_0, const Tensor& c_0,
    bool allow_tf32) {
  using Entries = typename Device::template Entries<Cell>;
  constexpr const char* kOp = Names<Cell>::kStep;
  [[maybe_unused]] const typename Device::Guard guard(input);
  const ScalarType dtype = gemm_dtype<Device>(kernel_dtype(kOp, "input", input), allow_tf32);
  const Options options = input.options();
  Tensor h = allocate(options, sizes.batch, sizes.state_size);
  Tensor c = allocate(options, sizes.batch, sizes.state_size);
  const std::optional<Dense> bias_x = dense(parameters.bias_x), bias_h = dense(parameters.bias_h);
  const Dense dense_c_0(c_0);
  StepArguments arguments{};
  arguments.sizes = sizes;
  arguments.bias_x = data_of(bias_x);
  arguments.bias_h = data_of(bias_h);
  arguments.c_0 = dense_c_0.data();
  arguments.h = h.mutable_data();
  arguments.c = c.mutable_data();
  const auto finish = [&](Tensor gates, int64_t count, int64_t grain) -> std::array<Tensor, 3> {
    arguments.gates = gates.mutable_data();
    Device::run(kOp, input, count, grain, [&](auto... where) { return Entries::step(dtype, arguments, where...); });
    return {std::move(h), std::move(c), std::move(gates)};
  };
  const auto new_gates = [&] { return allocate(options, sizes.batch, Cell::kGates * sizes.state_size); };
  if (const int64_t alignment = Entries::step_alignment(dtype, sizes, StepPart::kForward)) {
    const Dense dense_input(input, alignment), dense_h_0(h_0, alignment);
    const int64_t bytes = element_bytes(dtype);
    const Rows of_x(*parameters.weights_x, alignment, bytes), of_h(*parameters.weights_h, alignment, bytes);
    arguments.input = dense_input.data();
    arguments.h_0 = dense_h_0.data();
    arguments.weights_h = of_h.data();
    arguments.weights_x = of_x.data();
    arguments.weights_h_stride = of_h.stride();
    arguments.weights_x_stride = of_x.stride();
    return finish(new_gates(), sizes.state_size, grain_of_columns<Cell>(sizes));
  }
  if constexpr (kIsJoined<Cell>) {
    // One GEMM. The kernel adds the bias for free. In 16-bit types linear() adds it, before it rounds the result.
    const Tensor x = cat_columns(h_0, input);
    Tensor gates =
        is_half(dtype) ? linear(x, *parameters.joined, *parameters.bias_x) : mm(x, transpose(*parameters.joined));
    if (is_half(dtype)) arguments.bias_x = nullptr;
    arguments.input_gates = gates.data();
    return finish(std::move(gates), elements(sizes), kPointwiseGrain);
  } else {
    Tensor input_gates = mm(input, transpose(*parameters.weights_x));
    const Tensor hidden_gates = mm(h_0, transpose(*parameters.weights_h));
    arguments.input_gates = input_gates.data();
    arguments.hidden_gates = hidden_gates.data();
    return finish(kHasOneGradient<Cell> ? std::move(input_gates) : new_gates(), elements(sizes), kPointwiseGrain);
  }
}

inline StepSizes step_sizes(const char* op, const Tensor& input, const Tensor& h_0) {
  const Sizes rows = matrix_sizes(op, "input", input);
  return {rows[0], rows[1], matrix_sizes(op, "h_0", h_0)[1]};
}

template <class Device, class Cell>
std::array<Tensor, 3> step(
    const Tensor& input, const Tensor& weight_ih, const Tensor& weight_hh, const std::optional<Tensor>& bias_ih,
    const std::optional<Tensor>& bias_hh, const Tensor& h_0, const Tensor& c_0, const bool& allow_tf32) {
  constexpr const char* kOp = Names<Cell>::kStep;
  const StepSizes sizes = step_sizes(kOp, input, h_0);
  const StepParameters parameters{&weight_ih, &weight_hh, get(bias_ih), get(bias_hh)};
  check<StepTensors<Cell>>(
      kOp, sizes, {&input, &weight_ih, &weight_hh, parameters.bias_x, parameters.bias_h, &h_0, &c_0}, "input", input);
  return run_step<Device, Cell>(sizes, input, parameters, h_0, c_0, allow_tf32);
}

template <class Device, class Cell>
std::array<Tensor, 3> step_of_joined(
    const Tensor& input, const Tensor& weights, const Tensor& bias, const Tensor& h_0, const Tensor& c_0,
    const bool& allow_tf32) {
  constexpr const char* kOp = Names<Cell>::kStep;
  const StepSizes sizes = step_sizes(kOp, input, h_0);
  check<StepTensors<Cell>>(kOp, sizes, {&input, &weights, &bias, &h_0, &c_0}, "input", input);
  const Tensor weights_x = columns(weights, sizes.state_size, sizes.input_features);
  const Tensor weights_h = columns(weights, 0, sizes.state_size);
  return run_step<Device, Cell>(sizes, input, {&weights_x, &weights_h, &bias, nullptr, &weights}, h_0, c_0, allow_tf32);
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
  using Entries = typename Device::template Entries<Cell>;
  using BackwardTensors = StepBackwardTensors<Cell>;
  constexpr const char* kOp = Names<Cell>::kStepBackward;
  const Sizes cell = matrix_sizes(kOp, "saved_c", saved_c);
  const StepSizes sizes{cell[0], 0, cell[1]};
  const Tensors tensors{get(grad_h), get(grad_c), &gates, &saved_c};
  check<BackwardTensors>(kOp, sizes, tensors, "saved_c", saved_c);
  const auto backward = [](ScalarType dtype, const BackwardTensors& in, auto... where) {
    return Entries::step_backward(dtype, pointwise_of(in), where...);
  };
  return run<Device, BackwardTensors>(
      kOp, backward, kernel_dtype(kOp, "gates", gates), sizes, tensors, saved_c, elements(sizes), kPointwiseGrain);
}

// The gradients of both biases; of one, where they are joined.
template <class Device, class Cell>
std::array<Tensor, kIsJoined<Cell> ? 1 : 2> bias_backward(
    ScalarType dtype, const StepSizes& sizes, const Tensor& grad_x, const Tensor& grad_h_part) {
  using Entries = typename Device::template Entries<Cell>;
  std::array<Tensor, kIsJoined<Cell> ? 1 : 2> found;
  if constexpr (Device::kIsCuda) {
    if (Entries::step_alignment(dtype, sizes, StepPart::kBiasBackward) != 0) {
      found.front() = allocate(grad_x.options(), Cell::kInput * sizes.state_size);
      if (!kIsJoined<Cell>) found.back() = allocate(grad_x.options(), Cell::kRecurrent * sizes.state_size);
      const StepBiasBackwardArguments arguments{
          sizes, grad_x.data(), grad_h_part.data(), found.front().mutable_data(),
          kIsJoined<Cell> ? nullptr : found.back().mutable_data()};
      Device::run(Names<Cell>::kStepParametersBackward, grad_x, 0, 0, [&](auto stream) {
        return Entries::step_bias_backward(dtype, arguments, stream);
      });
      return found;
    }
  }
  found.front() = sum_rows(grad_x);
  if (!kIsJoined<Cell>) found.back() = kHasOneGradient<Cell> ? contiguous_copy(found.front()) : sum_rows(grad_h_part);
  return found;
}

// Where a kernel writes the gradients of the parameters.
template <class Cell>
void set_parameters(const StepParametersBackwardTensors<Cell>& in, StepBackwardArguments& arguments) {
  const int64_t units = in.sizes.state_size, features = in.sizes.input_features;
  if constexpr (kIsJoined<Cell>) {
    arguments.grad_weights_h = in.grad_weights;
    arguments.grad_weights_h_stride = arguments.grad_weights_x_stride = units + features;
    arguments.grad_bias_x = in.grad_bias;
  } else {
    arguments.grad_weights_x = in.grad_weight_ih;
    arguments.grad_weights_h = in.grad_weight_hh;
    arguments.grad_weights_x_stride = features;
    arguments.grad_weights_h_stride = units;
    arguments.grad_bias_x = in.grad_bias_ih;
    arguments.grad_bias_h = in.grad_bias_hh;
  }
}

// With the gradients of the parameters.
template <class Device, class Cell>
std::array<Tensor, StepParametersBackwardTensors<Cell>::kResults> step_parameters_backward(
    const std::optional<Tensor>& grad_h, const std::optional<Tensor>& grad_c, const Tensor& input, const Tensor& h_0,
    const Tensor& gates, const Tensor& saved_c, const bool& allow_tf32) {
  using Entries = typename Device::template Entries<Cell>;
  constexpr const char* kOp = Names<Cell>::kStepParametersBackward;
  const Sizes cell = matrix_sizes(kOp, "saved_c", saved_c);
  const StepSizes sizes{cell[0], matrix_sizes(kOp, "input", input)[1], cell[1]};
  const Tensors tensors{get(grad_h), get(grad_c), &input, &h_0, &gates, &saved_c};
  using AllTensors = StepParametersBackwardTensors<Cell>;
  check<AllTensors>(kOp, sizes, tensors, "saved_c", saved_c);
  [[maybe_unused]] const typename Device::Guard guard(saved_c);
  const ScalarType dtype = gemm_dtype<Device>(kernel_dtype(kOp, "gates", gates), allow_tf32);
  if (const int64_t alignment = Entries::step_alignment(dtype, sizes, StepPart::kParametersBackward)) {
    const int64_t bytes = element_bytes(dtype);
    const auto backward = [bytes](ScalarType dtype, const AllTensors& in, auto... where) {
      StepBackwardArguments arguments = pointwise_of(in);
      arguments.input = in.input;
      arguments.h_0 = in.h_0;
      set_parameters<Cell>(in, arguments);
      if (kIsJoined<Cell>) {
        arguments.grad_weights_x = static_cast<char*>(arguments.grad_weights_h) + in.sizes.state_size * bytes;
      }
      return Entries::step_backward(dtype, arguments, where...);
    };
    return run<Device, AllTensors>(
        kOp, backward, dtype, sizes, tensors, saved_c, sizes.state_size, grain_of_columns<Cell>(sizes), alignment);
  }
  auto [grad_x, grad_h_part, grad_c_0] = step_backward<Device, Cell>(grad_h, grad_c, gates, saved_c);
  auto biases = bias_backward<Device, Cell>(dtype, sizes, grad_x, grad_h_part);
  if constexpr (kIsJoined<Cell>) {
    Tensor grad_weights = mm(transpose(grad_x), cat_columns(h_0, input));
    return {
        std::move(grad_x), std::move(grad_h_part), std::move(grad_c_0), std::move(grad_weights), std::move(biases[0])};
  } else {
    const Tensor& of_h = kHasOneGradient<Cell> ? grad_x : grad_h_part;
    Tensor grad_weight_ih = mm(transpose(grad_x), input);
    Tensor grad_weight_hh = mm(transpose(of_h), h_0);
    return {std::move(grad_x),         std::move(grad_h_part), std::move(grad_c_0), std::move(grad_weight_ih),
            std::move(grad_weight_hh), std::move(biases[0]),   std::move(biases[1])};
  }
}

// After the tensors were checked.
template <class Device, class Cell>
std::array<Tensor, 2> run_input_backward(
    const StepSizes& sizes, const Tensor& grad_x, const Tensor& grad_h_part, const Tensor* grad_c_0,
    const Tensor& weights_x, const Tensor& weights_h, bool allow_tf32) {
  using Entries = typename Device::template Entries<Cell>;
  constexpr const char* kOp = Names<Cell>::kStepInputBackward;
  [[maybe_unused]] const typename Device::Guard guard(grad_x);
  const ScalarType dtype = gemm_dtype<Device>(kernel_dtype(kOp, "grad_x", grad_x), allow_tf32);
  if constexpr (Device::kIsCuda) {
    if (Entries::step_alignment(dtype, sizes, StepPart::kInputBackward) != 0) {
      const Dense dense_grad_x(grad_x), dense_grad_h_part(grad_h_part);
      const Rows of_x(weights_x, 1), of_h(weights_h, 1);
      const std::optional<Dense> dense_grad_c_0 = dense(grad_c_0);
      Tensor grad_input = allocate(grad_x.options(), sizes.batch, sizes.input_features);
      Tensor grad_h_0 = allocate(grad_x.options(), sizes.batch, sizes.state_size);
      StepInputBackwardArguments arguments{};
      arguments.sizes = sizes;
      arguments.grad_x = dense_grad_x.data();
      arguments.grad_h_part = dense_grad_h_part.data();
      arguments.grad_c_0 = data_of(dense_grad_c_0);
      arguments.weights_x = of_x.data();
      arguments.weights_h = of_h.data();
      arguments.weights_x_stride = of_x.stride();
      arguments.weights_h_stride = of_h.stride();
      arguments.grad_input = grad_input.mutable_data();
      arguments.grad_h_0 = grad_h_0.mutable_data();
      Device::run(
          kOp, grad_x, 0, 0, [&](auto stream) { return Entries::step_input_backward(dtype, arguments, stream); });
      return {std::move(grad_input), std::move(grad_h_0)};
    }
  }
  const Tensor& part = kHasOneGradient<Cell> ? grad_x : grad_h_part;
  // Two GEMMs, not two views of one: the results of an operator may not share memory. As a bias, the library adds
  // grad_c_0.
  return {
      mm(grad_x, weights_x), grad_c_0 == nullptr ? mm(part, weights_h) : linear(part, transpose(weights_h), *grad_c_0)};
}

// The gradients of the input and of h_0.
template <class Device, class Cell>
std::array<Tensor, 2> step_input_backward(
    const Tensor& grad_x, const Tensor& grad_h_part, const std::optional<Tensor>& grad_c_0, const Tensor& weight_ih,
    const Tensor& weight_hh, const bool& allow_tf32) {
  constexpr const char* kOp = Names<Cell>::kStepInputBackward;
  const StepSizes sizes{
      matrix_sizes(kOp, "grad_x", grad_x)[0], matrix_sizes(kOp, "weight_ih", weight_ih)[1],
      matrix_sizes(kOp, "weight_hh", weight_hh)[1]};
  const Tensors tensors{&grad_x, &grad_h_part, get(grad_c_0), &weight_ih, &weight_hh};
  check<StepInputBackwardTensors<Cell>>(kOp, sizes, tensors, "grad_x", grad_x);
  return run_input_backward<Device, Cell>(sizes, grad_x, grad_h_part, get(grad_c_0), weight_ih, weight_hh, allow_tf32);
}

template <class Device, class Cell>
std::array<Tensor, 2> step_input_backward_of_joined(
    const Tensor& grad_x, const Tensor& grad_h_part, const std::optional<Tensor>& grad_c_0, const Tensor& weights,
    const bool& allow_tf32) {
  constexpr const char* kOp = Names<Cell>::kStepInputBackward;
  const Sizes gates = matrix_sizes(kOp, "grad_x", grad_x);
  const int64_t units = gates[1] / Cell::kGates;
  const int64_t features = std::max<int64_t>(matrix_sizes(kOp, "weights", weights)[1] - units, 0);
  const StepSizes sizes{gates[0], features, units};
  const Tensors tensors{&grad_x, &grad_h_part, get(grad_c_0), &weights};
  check<StepInputBackwardTensors<Cell>>(kOp, sizes, tensors, "grad_x", grad_x);
  return run_input_backward<Device, Cell>(
      sizes, grad_x, grad_h_part, get(grad_c_0), columns(weights, units, features), columns(weights, 0, units),
      allow_tf32);
}

template <class Device, class Cell, class Library>
void register_step(Library& library) {
  if constexpr (kIsJoined<Cell>) {
    library.impl(Names<Cell>::kStep, &Boxed<&step_of_joined<Device, Cell>>::call);
    library.impl(Names<Cell>::kStepInputBackward, &Boxed<&step_input_backward_of_joined<Device, Cell>>::call);
  } else {
    library.impl(Names<Cell>::kStep, &Boxed<&step<Device, Cell>>::call);
    library.impl(Names<Cell>::kStepInputBackward, &Boxed<&step_input_backward<Device, Cell>>::call);
  }
  library.impl(Names<Cell>::kStepBackward, &Boxed<&step_backward<Device, Cell>>::call);
  library.impl(Names<Cell>::kStepParametersBackward, &Boxed<&step_parameters_backward<Device, Cell>>::call);
}

// All operators of a cell.
template <class Device, class Cell, class Library>
void register_cell(Library& library) {
  register_sequence<Device, Cell>(library);
  if constexpr (kCellStates<Cell> == 1) register_step<Device, Cell>(library);
}

}  // namespace extops::stable
