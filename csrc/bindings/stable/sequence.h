// The cells over whole sequences on torch's stable ABI; see device.h for what a `Device` is.
#pragma once

#include "../../kernels/sequence.h"
#include "../cell.h"
#include "device.h"

namespace extops::stable {

constexpr int64_t kSequenceAlignment = 16;  // in bytes, of every tensor that a kernel gets

// The memory order of all tensors of [time, batch, ...] is that of `like`: by steps or, if its batch is first, by
// samples.
inline SequenceSizes laid_out_like(SequenceSizes sizes, const Tensor& like) {
  const bool batch_first = like.strides()[0] < like.strides()[1];
  sizes.time_stride = batch_first ? 1 : std::max<int64_t>(sizes.batch, 1);
  sizes.batch_stride = batch_first ? std::max<int64_t>(sizes.time, 1) : 1;
  return sizes;
}

// Two directions are to a binding one layer of twice as many units, whose recurrent weights have the columns of one
// direction. A kernel sees the units of one, and as many rows as there are directions for each step and sample.
template <class Device>
int64_t directions_of(int64_t state_size, int64_t columns) {
  return Device::kIsCuda && columns > 0 && state_size == 2 * columns ? 2 : 1;
}
inline SequenceSizes of_kernel(SequenceSizes sizes, int64_t directions) {
  sizes.state_size /= directions;
  sizes.time_stride *= directions;
  sizes.batch_stride *= directions;
  sizes.state_stride = sizes.directions = directions;
  return sizes;
}

// A matrix in the memory of a tensor; `stride` is from one row to the next.
inline Tensor matrix_in(const Tensor& tensor, int64_t rows, int64_t columns, int64_t stride, int64_t offset) {
  const int64_t shape[] = {rows, columns};
  const int64_t strides[] = {stride, 1};
  return reinterpret(tensor, Sizes(shape, 2), Sizes(strides, 2), offset);
}

// Those of the first direction that is computed, of weights_h and of states.
template <class Cell>
Tensor own_rows(const Tensor& weights_h, const SequenceSizes& sizes) {
  const int64_t rows = Cell::kRecurrent * sizes.state_size, stride = sizes.weights_stride;
  return matrix_in(weights_h, rows, sizes.state_size, stride, sizes.first_direction * rows * stride);
}
inline Tensor own_columns(const Tensor& states, const SequenceSizes& sizes) {
  return columns(states, sizes.first_direction * sizes.state_size, sizes.state_size);
}

// Calls make(sizes, strides) for a dense tensor of [time, batch, columns].
template <class Make>
Tensor make_sequence(const SequenceSizes& sizes, int64_t columns, const Make& make) {
  const int64_t step = std::max<int64_t>(columns, 1);
  const int64_t shape[] = {sizes.time, sizes.batch, columns};
  const int64_t strides[] = {sizes.time_stride * step, sizes.batch_stride * step, 1};
  return make(Sizes(shape, 3), Sizes(strides, 3));
}

inline Tensor allocate(const Options& options, const SequenceSizes& sizes, int64_t columns) {
  return make_sequence(
      sizes, columns, [&](Sizes shape, Sizes strides) { return allocate(options, shape, strides.data()); });
}

inline bool is_aligned(const Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.data()) % kSequenceAlignment == 0;
}

// The rows of a tensor of [time, batch, columns] in the order of memory, as a matrix: in place if their distance is
// regular and, for `dense`, equal to their length; else in a copy.
inline Tensor rows_of(const Tensor& tensor, const SequenceSizes& sizes, bool dense) {
  const int outer = sizes.time_stride < sizes.batch_stride ? 1 : 0;
  const int inner = 1 - outer;
  const Sizes shape = tensor.sizes();
  const Sizes strides = tensor.strides();
  const int64_t columns = shape[2];
  const int64_t rows = shape[0] * shape[1];
  const int64_t row = std::max<int64_t>(columns, 1);
  // Smaller than a row, namely 0, in an expanded tensor, whose rows share their memory.
  const int64_t distance = rows <= 1 ? row : shape[inner] == 1 ? strides[outer] : strides[inner];
  const bool regular = shape[outer] == 1 || strides[outer] == shape[inner] * distance;
  const int64_t matrix[] = {rows, columns};
  if (regular && (columns <= 1 || strides[2] == 1) &&
      (dense ? distance == row && is_aligned(tensor) : distance >= row)) {
    const int64_t in_place[] = {distance, 1};
    return reinterpret(tensor, Sizes(matrix, 2), Sizes(in_place, 2));
  }
  const int64_t ordered_shape[] = {shape[outer], shape[inner], columns};
  const int64_t ordered_strides[] = {strides[outer], strides[inner], strides[2]};
  const int64_t in_copy[] = {row, 1};
  return reinterpret(
      contiguous_copy(reinterpret(tensor, Sizes(ordered_shape, 3), Sizes(ordered_strides, 3))), Sizes(matrix, 2),
      Sizes(in_copy, 2));
}

// A matrix as a kernel gets it, whose rows are dense: in place if they are and start aligned, with elements of `bytes`
// all of them, else in a copy.
class Rows {
 public:
  Rows(const Tensor& matrix, int64_t alignment, int64_t bytes = 0) : tensor_(&matrix) {
    const int64_t columns = matrix.sizes()[1];
    const bool is_dense = (columns <= 1 || matrix.strides()[1] == 1) && stride() >= columns;
    const bool is_aligned = reinterpret_cast<uintptr_t>(data()) % alignment == 0 && stride() * bytes % alignment == 0;
    if (!is_dense || !is_aligned) tensor_ = &copy_.emplace(contiguous_copy(matrix));
  }
  Rows(const Rows&) = delete;

  const Tensor& tensor() const { return *tensor_; }
  const void* data() const { return tensor_->data(); }
  int64_t stride() const { return tensor_->strides()[0]; }

 private:
  std::optional<Tensor> copy_;
  const Tensor* tensor_;
};

// A GEMM with its result in the compute type. The kernel adds more to it, and rounding it to 16 bits first would lose
// digits.
template <class Device>
Tensor multiply(ScalarType dtype, const Tensor& a, const Tensor& b) {
  Options options = a.options();
  if (is_half(dtype)) options.dtype = aoti_torch_dtype_float32();
  Tensor product = allocate(options, a.sizes()[0], b.sizes()[1]);
  if constexpr (Device::kIsCuda) {
    const bool is_float32 = dtype == ScalarType::Float || dtype == ScalarType::TF32;
    if (is_float32 && Device::mm_into(dtype, a, b, product)) return product;
  }
  if (!is_half(dtype)) {
    mm_into(a, b, product);
  } else if constexpr (Device::kIsCuda) {
    mm_float32_into(a, b, product);
  } else {
    mm_into(to_float32(a), to_float32(b), product);
  }
  return product;
}

inline int64_t compute_bytes(ScalarType dtype) { return dtype == ScalarType::Double ? 8 : 4; }
inline int64_t element_bytes(ScalarType dtype) { return is_half(dtype) ? 2 : compute_bytes(dtype); }

// A piece is a row of the batch.
template <class Cell>
int64_t grain_of_rows(const SequenceSizes& sizes) {
  return grain_of(Cell::kRecurrent * sizes.time * sizes.state_size * sizes.state_size);
}

template <class Cell>
int64_t grain_of_step(const SequenceSizes& sizes) {
  constexpr int64_t kOfFunction = 16;  // multiply-adds that take as long
  return grain_of(Cell::kGates * kOfFunction * sizes.state_size);
}

inline std::optional<Dense> check_lengths(
    const char* op, const Tensor* lengths, const SequenceSizes& sizes, const Options& like) {
  if (lengths == nullptr) return std::nullopt;
  check_matches(op, "lengths", *lengths, "input", {aoti_torch_dtype_int64(), like.device_type, like.device_index});
  check_sizes(op, "lengths", *lengths, {sizes.batch});
  return std::make_optional<Dense>(*lengths);
}

// Null for a tensor that is absent.
template <class Held>
const void* data_of(const std::optional<Held>& held) {
  return held.has_value() ? held->data() : nullptr;
}

inline std::optional<Dense> dense(const Tensor* tensor) {
  return tensor == nullptr ? std::nullopt : std::make_optional<Dense>(*tensor, kSequenceAlignment);
}

// -- forward

// A library GEMM and a kernel launch for each step.
template <class Device, class Cell>
void run_steps(
    ScalarType dtype, SequenceArguments arguments, const Tensor& weights_h, const Tensor& h_0, const Tensor& h_n) {
  SequenceSizes& sizes = arguments.sizes;
  const Tensor transposed = transpose(own_rows<Cell>(weights_h, sizes));
  const Tensor first = own_columns(h_0, sizes), others = own_columns(h_n, sizes);
  const int64_t carried = kCellStates<Cell> * sizes.batch * sizes.state_size;
  const Tensor workspace = allocate_bytes(h_0.options(), carried * compute_bytes(dtype));
  arguments.workspace = workspace.mutable_data();
  for (sizes.step = 0; sizes.step < sizes.time; ++sizes.step) {
    const Tensor recurrent = multiply<Device>(dtype, sizes.step == 0 ? first : others, transposed);
    arguments.recurrent = recurrent.data();
    Device::run(Names<Cell>::kSequence, h_0, sizes.batch, grain_of_step<Cell>(sizes), [&](auto... where) {
      return Device::template Entries<Cell>::sequence_step(dtype, arguments, where...);
    });
  }
}

// Whether a CPU computes a library GEMM and a kernel for each step: the kernel of all steps first packs the weights,
// which does not pay for few steps.
inline bool are_few_steps(ScalarType dtype, const SequenceSizes& sizes, const int64_t* lengths) {
  const int64_t few = sizes.batch == 1 ? 8 : sizes.batch <= 8 ? 4 : 2;
  return !is_half(dtype) && lengths == nullptr && sizes.state_size >= 128 && sizes.time <= few;
}

// The kernel that computes a sequence on a GPU. `run_first`(plan) computes its first steps by one.
template <class Entries, class Run>
SequencePlan plan_of(ScalarType dtype, const SequenceSizes& sizes, bool backward, void* stream, const Run& run_first) {
  const auto run = [](const void* self, const SequencePlan& plan) {
    try {
      (*static_cast<const Run*>(self))(plan);
      return true;
    } catch (const std::exception&) {  // such as for want of memory
      return false;
    }
  };
  const SequenceTrial trial{run, &run_first};
  return Entries::sequence_plan(dtype, sizes, backward, stream, &trial);
}

// Some steps of a sequence, in whatever order its memory is.
inline SequenceSizes first_steps(SequenceSizes sizes) {
  sizes.time = std::min(sizes.time, kMeasuredSteps);
  sizes.time_stride = sizes.batch * sizes.directions;
  sizes.batch_stride = sizes.directions;
  return sizes;
}

// Computes what a plan does at once, until all directions are done; `by_steps`(arguments) where that is a step.
template <class Device, class Arguments, class Kernel, class BySteps>
void run_plan(
    const char* op, const SequencePlan& plan, ScalarType dtype, Arguments arguments, const Tensor& like, Kernel* kernel,
    const BySteps& by_steps) {
  std::optional<Tensor> workspace;
  if (plan.workspace > 0) workspace = allocate_bytes(like.options(), plan.workspace);
  if (workspace.has_value()) arguments.workspace = workspace->mutable_data();
  SequenceSizes& sizes = arguments.sizes;
  const int64_t end = std::exchange(sizes.directions, plan.directions);
  for (; sizes.first_direction < end; sizes.first_direction += plan.directions) {
    if (plan.kernel == SequencePlan::kStep) {
      by_steps(arguments);
    } else {
      Device::run(op, like, 0, 0, [&](auto stream) { return kernel(dtype, arguments, plan.kernel, stream); });
    }
  }
}

// On a CPU, the recurrent weights as all threads read them.
template <class Device, class Cell>
Tensor packed(const char* op, ScalarType dtype, const SequenceSizes& sizes, bool backward, const Tensor& weights_h) {
  using Entries = typename Device::template Entries<Cell>;
  int64_t bytes = 0;
  check_success(op, Entries::sequence_pack(dtype, sizes, backward, nullptr, nullptr, bytes, 0, 0));
  Tensor packed = allocate_bytes(weights_h.options(), bytes);
  void* const to = packed.mutable_data();
  const int64_t grain = grain_of(Cell::kRecurrent * sizes.state_size);
  Device::run(op, weights_h, sizes.state_size, grain, [&, from = weights_h.data()](int64_t begin, int64_t end) {
    int64_t bytes = 0;
    return Entries::sequence_pack(dtype, sizes, backward, from, to, bytes, begin, end);
  });
  return packed;
}

template <class Device, class Cell>
void run_sequence(
    ScalarType dtype, const SequenceArguments& arguments, const Tensor& weights_h, const Tensor& h_0,
    const Tensor& h_n) {
  using Entries = typename Device::template Entries<Cell>;
  const SequenceSizes& sizes = arguments.sizes;
  if constexpr (Device::kIsCuda) {
    const auto run = [&](const SequencePlan& plan, const SequenceArguments& in) {
      run_plan<Device>(Names<Cell>::kSequence, plan, dtype, in, h_0, Entries::sequence, [&](const auto& in) {
        run_steps<Device, Cell>(dtype, in, weights_h, h_0, h_n);
      });
    };
    std::optional<Tensor> gates;
    const auto run_first = [&](const SequencePlan& plan) {
      SequenceArguments in = arguments;
      in.sizes = first_steps(sizes);
      if (in.gates == in.input_gates) {  // which are still to be read
        const int64_t elements = in.sizes.time * in.sizes.time_stride * Cell::kGates * sizes.state_size;
        if (!gates.has_value()) gates = allocate_bytes(h_0.options(), elements * compute_bytes(dtype));
        in.gates = gates->mutable_data();
      }
      run(plan, in);
    };
    run(plan_of<Entries>(dtype, sizes, false, Device::stream(h_0), run_first), arguments);
  } else if (are_few_steps(dtype, sizes, arguments.lengths)) {
    run_steps<Device, Cell>(dtype, arguments, weights_h, h_0, h_n);
  } else {
    SequenceArguments in = arguments;
    const Tensor weights = packed<Device, Cell>(Names<Cell>::kSequence, dtype, sizes, false, weights_h);
    in.workspace = weights.mutable_data();
    Device::run(Names<Cell>::kSequence, h_0, sizes.batch, grain_of_rows<Cell>(sizes), [&](auto... where) {
      return Entries::sequence(dtype, in, where...);
    });
  }
}

// `columns` are those of a row of the recurrent weights.
template <class Device>
SequenceTableSizes table_sizes(const char* op, const Tensor& input, const Tensor& h_0, int64_t columns) {
  const Sizes steps = sizes_of(op, "input", input, 3);
  const int64_t state_size = matrix_sizes(op, "h_0", h_0)[1];
  return {steps[0], steps[1], steps[2], state_size, state_size / directions_of<Device>(state_size, columns)};
}

// After the tensors were checked. `weights_x` and `weights_h` may be views of one tensor.
template <class Device, class Cell>
std::array<Tensor, 5> run_checked(
    const Tensor& input, const Tensor& weights_x, const Tensor& weights_h, const Tensor* bias_x, const Tensor* bias_h,
    const Tensor& h_0, const Tensor& c_0, const Tensor* lengths, bool reverse, bool allow_tf32, bool training) {
  constexpr const char* kOp = Names<Cell>::kSequence;
  [[maybe_unused]] const typename Device::Guard guard(input);
  const Rows dense_weights(weights_h, kSequenceAlignment);
  const Sizes steps = input.sizes();
  const SequenceSizes sizes =
      laid_out_like({steps[0], steps[1], h_0.sizes()[1], dense_weights.stride(), 0, 0, 1, reverse, 1, 0, 0}, input);
  const Options options = input.options();
  const std::optional<Dense> dense_lengths = check_lengths(kOp, lengths, sizes, options);
  const ScalarType dtype = gemm_dtype<Device>(kernel_dtype(kOp, "input", input), allow_tf32);

  const Tensor input_gates = multiply<Device>(dtype, rows_of(input, sizes, false), transpose(weights_x));
  // If the input GEMM is in another order, a pre-activation would overwrite the input part of another one.
  const bool in_place = training && Cell::kInput == Cell::kGates && kFirstInputOf<Cell> == 0 && !is_half(dtype);
  SequenceSizes saved = sizes;
  if (!training) saved.time = 0;
  saved = laid_out_like(saved, input);
  Tensor gates = in_place ? make_sequence(
                                sizes, Cell::kGates * sizes.state_size,
                                [&](Sizes shape, Sizes strides) { return reinterpret(input_gates, shape, strides); })
                          : allocate(options, saved, Cell::kGates * sizes.state_size);
  Tensor output = allocate(options, sizes, sizes.state_size);
  Tensor cells = allocate(options, saved, kCellStates<Cell> * sizes.state_size);
  if (output.numel() == 0) {
    return {std::move(output), contiguous_copy(h_0), contiguous_copy(c_0), std::move(gates), std::move(cells)};
  }
  Tensor h_n = allocate(options, sizes.batch, sizes.state_size);
  Tensor c_n = allocate(options, sizes.batch, kCellStates<Cell> * sizes.state_size);
  const std::optional<Dense> dense_bias_x = dense(bias_x), dense_bias_h = dense(bias_h);
  const Dense dense_h_0(h_0, kSequenceAlignment), dense_c_0(c_0, kSequenceAlignment);
  SequenceArguments arguments{};
  arguments.sizes = of_kernel(sizes, directions_of<Device>(sizes.state_size, weights_h.sizes()[1]));
  arguments.input_gates = input_gates.data();
  arguments.weights_h = dense_weights.data();
  arguments.bias_x = data_of(dense_bias_x);
  arguments.bias_h = data_of(dense_bias_h);
  arguments.h_0 = dense_h_0.data();
  arguments.c_0 = dense_c_0.data();
  arguments.lengths = static_cast<const int64_t*>(data_of(dense_lengths));
  arguments.output = output.mutable_data();
  arguments.h_n = h_n.mutable_data();
  arguments.c_n = c_n.mutable_data();
  if (training) {
    arguments.gates = gates.mutable_data();
    arguments.cells = cells.mutable_data();
  }
  run_sequence<Device, Cell>(dtype, arguments, dense_weights.tensor(), h_0, h_n);
  return {std::move(output), std::move(h_n), std::move(c_n), std::move(gates), std::move(cells)};
}

// With the weights in two tensors, as torch's modules have them, and with both joined in one.
template <class Device, class Cell>
std::array<Tensor, 5> sequence(
    const Tensor& input, const Tensor& weight_ih, const Tensor& weight_hh, const std::optional<Tensor>& bias_ih,
    const std::optional<Tensor>& bias_hh, const Tensor& h_0, const Tensor& c_0, const std::optional<Tensor>& lengths,
    const bool& reverse, const bool& allow_tf32, const bool& training) {
  constexpr const char* kOp = Names<Cell>::kSequence;
  const Tensors tensors{&input, &weight_ih, &weight_hh, get(bias_ih), get(bias_hh), &h_0, &c_0};
  const int64_t columns = matrix_sizes(kOp, "weight_hh", weight_hh)[1];
  check<SequenceTensors<Cell>>(kOp, table_sizes<Device>(kOp, input, h_0, columns), tensors, "input", input);
  return run_checked<Device, Cell>(
      input, weight_ih, weight_hh, get(bias_ih), get(bias_hh), h_0, c_0, get(lengths), reverse, allow_tf32, training);
}

template <class Device, class Cell>
std::array<Tensor, 5> sequence_of_joined(
    const Tensor& input, const Tensor& weights, const Tensor& bias, const Tensor& h_0, const Tensor& c_0,
    const std::optional<Tensor>& lengths, const bool& reverse, const bool& allow_tf32, const bool& training) {
  constexpr const char* kOp = Names<Cell>::kSequence;
  const int64_t features = sizes_of(kOp, "input", input, 3)[2];
  const int64_t of_h = matrix_sizes(kOp, "weights", weights)[1] - features;
  const SequenceTableSizes sizes = table_sizes<Device>(kOp, input, h_0, of_h);
  check<SequenceTensors<Cell>>(kOp, sizes, {&input, &weights, &bias, &h_0, &c_0}, "input", input);
  return run_checked<Device, Cell>(
      input, columns(weights, sizes.direction_size, features), columns(weights, 0, sizes.direction_size), &bias,
      nullptr, h_0, c_0, get(lengths), reverse, allow_tf32, training);
}

// -- backward

// The gradients of the recurrent gates of a step, numbered in the order of the backward: [batch, gates].
template <class Cell>
Tensor recurrent_gradients(const Tensor& grad_gates, const SequenceSizes& sizes, int64_t step) {
  const int64_t row = Cell::kGates * sizes.state_size, columns = Cell::kRecurrent * sizes.state_size;
  const bool is_reverse = sizes.reverse != sizes.first_direction;
  const int64_t place = (is_reverse ? step : sizes.time - 1 - step) * sizes.time_stride + sizes.first_direction;
  return matrix_in(grad_gates, sizes.batch, columns, sizes.batch_stride * row, (place + 1) * row - columns);
}

// From the last step of the forward to its first, and once more for the gradient of the first state.
template <class Device, class Cell>
void run_steps_backward(
    ScalarType dtype, SequenceBackwardArguments arguments, const Tensor& weights_h, const Tensor& grad_gates) {
  SequenceSizes& sizes = arguments.sizes;
  const Tensor weights = own_rows<Cell>(weights_h, sizes);
  const int64_t carried = (1 + kCellStates<Cell>)*sizes.batch * sizes.state_size;
  const Tensor workspace = allocate_bytes(weights_h.options(), carried * compute_bytes(dtype));
  arguments.workspace = workspace.mutable_data();
  for (sizes.step = 0; sizes.step <= sizes.time; ++sizes.step) {
    std::optional<Tensor> recurrent;
    if (sizes.step > 0) {
      recurrent = multiply<Device>(dtype, recurrent_gradients<Cell>(grad_gates, sizes, sizes.step - 1), weights);
    }
    arguments.recurrent = data_of(recurrent);
    Device::run(Names<Cell>::kSequenceBackward, weights_h, 0, 0, [&](auto stream) {
      return Device::template Entries<Cell>::sequence_step_backward(dtype, arguments, stream);
    });
  }
}

// The same on a CPU, which keeps dL/dh in grad_h_0.
template <class Device, class Cell>
void run_few_steps_backward(
    ScalarType dtype, SequenceBackwardArguments arguments, const Tensor& weights_h, const Tensor& grad_gates,
    const Tensor& grad_h_0) {
  SequenceSizes& sizes = arguments.sizes;
  arguments.weights_h = nullptr;
  for (sizes.step = 0; sizes.step < sizes.time; ++sizes.step) {
    Device::run(Names<Cell>::kSequenceBackward, weights_h, sizes.batch, grain_of_step<Cell>(sizes), [&](auto... where) {
      return Device::template Entries<Cell>::sequence_backward(dtype, arguments, where...);
    });
    mm_into(recurrent_gradients<Cell>(grad_gates, sizes, sizes.step), weights_h, grad_h_0);
  }
}

template <class Device, class Cell>
void run_sequence_backward(
    ScalarType dtype, const SequenceBackwardArguments& arguments, const Tensor& weights_h, const Tensor& grad_gates,
    const Tensor& grad_h_0) {
  using Entries = typename Device::template Entries<Cell>;
  constexpr const char* kOp = Names<Cell>::kSequenceBackward;
  const SequenceSizes& sizes = arguments.sizes;
  if constexpr (Device::kIsCuda) {
    const auto run = [&](const SequencePlan& plan, const SequenceBackwardArguments& in) {
      run_plan<Device>(kOp, plan, dtype, in, weights_h, Entries::sequence_backward, [&](const auto& in) {
        run_steps_backward<Device, Cell>(dtype, in, weights_h, grad_gates);
      });
    };
    const auto run_first = [&](const SequencePlan& plan) {
      SequenceBackwardArguments in = arguments;
      in.sizes = first_steps(sizes);
      run(plan, in);
    };
    run(plan_of<Entries>(dtype, sizes, true, Device::stream(weights_h), run_first), arguments);
  } else if (are_few_steps(dtype, sizes, arguments.lengths)) {
    run_few_steps_backward<Device, Cell>(dtype, arguments, weights_h, grad_gates, grad_h_0);
  } else {
    SequenceBackwardArguments in = arguments;
    const Tensor weights = packed<Device, Cell>(kOp, dtype, sizes, true, weights_h);
    in.workspace = weights.mutable_data();
    Device::run(kOp, weights_h, sizes.batch, grain_of_rows<Cell>(sizes), [&](auto... where) {
      return Entries::sequence_backward(dtype, in, where...);
    });
  }
}

// The gradient of the initial state of an empty sequence: that of the last state.
inline Tensor passed_through(const Tensor* gradient, const Options& options, int64_t batch, int64_t columns) {
  return gradient == nullptr ? zeros(options, batch, columns) : contiguous_copy(*gradient);
}

template <class Device, class Cell>
std::array<Tensor, 3> sequence_backward(
    const std::optional<Tensor>& grad_output, const std::optional<Tensor>& grad_h_n,
    const std::optional<Tensor>& grad_c_n, const Tensor& weight_hh, const Tensor& gates, const Tensor& cells,
    const std::optional<Tensor>& lengths, const bool& reverse, const bool& allow_tf32) {
  constexpr const char* kOp = Names<Cell>::kSequenceBackward;
  const Sizes steps = sizes_of(kOp, "cells", cells, 3);
  sizes_of(kOp, "gates", gates, 3);
  const int64_t units = steps[2] / kCellStates<Cell>;
  const int64_t directions = directions_of<Device>(units, matrix_sizes(kOp, "weight_hh", weight_hh)[1]);
  const SequenceTableSizes table{steps[0], steps[1], 0, units, units / directions};
  const Tensors tensors{get(grad_output), get(grad_h_n), get(grad_c_n), &weight_hh, &gates, &cells};
  check<SequenceBackwardTensors<Cell>>(kOp, table, tensors, "cells", cells);
  [[maybe_unused]] const typename Device::Guard guard(cells);
  const Rows weights_h(weight_hh, kSequenceAlignment);
  const SequenceSizes sizes =
      laid_out_like({steps[0], steps[1], units, weights_h.stride(), 0, 0, 1, reverse, 1, 0, 0}, gates);
  const Options options = gates.options();
  const std::optional<Dense> dense_lengths = check_lengths(kOp, get(lengths), sizes, options);
  const ScalarType dtype = gemm_dtype<Device>(kernel_dtype(kOp, "gates", gates), allow_tf32);

  Tensor grad_gates = allocate(options, sizes, Cell::kGates * sizes.state_size);
  if (cells.numel() == 0) {
    return {
        std::move(grad_gates), passed_through(get(grad_h_n), options, sizes.batch, units),
        passed_through(get(grad_c_n), options, sizes.batch, steps[2])};
  }
  Tensor grad_h_0 = allocate(options, sizes.batch, sizes.state_size);
  Tensor grad_c_0 = allocate(options, sizes.batch, steps[2]);
  std::optional<Tensor> dense_grad_output;
  if (get(grad_output) != nullptr) dense_grad_output = rows_of(*grad_output, sizes, true);
  const Tensor dense_gates = rows_of(gates, sizes, true), dense_cells = rows_of(cells, sizes, true);
  const std::optional<Dense> dense_grad_h_n = dense(get(grad_h_n)), dense_grad_c_n = dense(get(grad_c_n));
  SequenceBackwardArguments arguments{};
  arguments.sizes = of_kernel(sizes, directions);
  arguments.grad_output = data_of(dense_grad_output);
  arguments.grad_h_n = data_of(dense_grad_h_n);
  arguments.grad_c_n = data_of(dense_grad_c_n);
  arguments.weights_h = weights_h.data();
  arguments.gates = dense_gates.data();
  arguments.cells = dense_cells.data();
  arguments.lengths = static_cast<const int64_t*>(data_of(dense_lengths));
  arguments.grad_gates = grad_gates.mutable_data();
  arguments.grad_h_0 = grad_h_0.mutable_data();
  arguments.grad_c_0 = grad_c_0.mutable_data();
  run_sequence_backward<Device, Cell>(dtype, arguments, weights_h.tensor(), grad_gates, grad_h_0);
  return {std::move(grad_gates), std::move(grad_h_0), std::move(grad_c_0)};
}

template <class Device, class Cell, class Library>
void register_sequence(Library& library) {
  if constexpr (kIsJoined<Cell>) {
    library.impl(Names<Cell>::kSequence, &Boxed<&sequence_of_joined<Device, Cell>>::call);
  } else {
    library.impl(Names<Cell>::kSequence, &Boxed<&sequence<Device, Cell>>::call);
  }
  library.impl(Names<Cell>::kSequenceBackward, &Boxed<&sequence_backward<Device, Cell>>::call);
}

}  // namespace extops::stable
