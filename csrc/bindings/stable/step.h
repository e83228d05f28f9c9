// One step of a cell on torch's stable ABI; see lltm.h for what a `Device` is. `Device::Step<Cell>` has the entry points
// of a cell. On a CPU torch's own cells are faster, and the operator is a composition of torch's calls.
#pragma once

#include "../../kernels/step.h"
#include "../step.h"
#include "sequence.h"

namespace extops::stable {

// What bindings need to know of a cell besides its numbers.
template <class Cell>
struct StepOf;

#define EXTOPS_STEP_OF(cell, Cell)                                   \
  template <>                                                        \
  struct StepOf<Cell> {                                              \
    using Tensors = Cell##StepTensors;                               \
    using BackwardTensors = Cell##StepBackwardTensors;               \
    static constexpr const char* kName = #cell "_step";              \
    static constexpr const char* kBackward = #cell "_step_backward"; \
  };
EXTOPS_CELLS_OF_PARTS(EXTOPS_STEP_OF)

// A matrix whose rows are dense and start aligned: in place if they are, else in a copy.
class Rows {
 public:
  Rows(const Tensor& matrix, int64_t alignment) : data_(matrix.data()), stride_(matrix.strides()[0]) {
    const int64_t columns = matrix.sizes()[1];
    const bool is_dense = columns <= 1 || matrix.strides()[1] == 1;
    if (is_dense && stride_ >= columns && reinterpret_cast<uintptr_t>(data_) % alignment == 0) return;
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
  check<typename StepOf<Cell>::Tensors>(
      kOp, sizes, {&input, &weight_ih, &weight_hh, bias_x, bias_h, &h_0, &c_0}, "input", input);
  [[maybe_unused]] const typename Device::Guard guard(input);
  const ScalarType dtype = product_dtype<Device>(kernel_dtype(kOp, "input", input), allow_tf32);
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
  const auto finish = [&](Tensor columns) -> std::array<Tensor, 3> {
    arguments.columns = columns.mutable_data();
    Device::run(kOp, input, 0, 0, [&](auto stream) { return Entries::forward(dtype, arguments, stream); });
    return {std::move(h), std::move(c), std::move(columns)};
  };
  const auto new_columns = [&] { return allocate(options, sizes.batch, Cell::kColumns * sizes.state_size); };
  if (const int64_t alignment = Entries::alignment(dtype, sizes)) {
    const Dense dense_input(input, alignment), dense_h_0(h_0, alignment);
    const Rows weights_x(weight_ih, alignment), weights_h(weight_hh, alignment);
    arguments.input = dense_input.data();
    arguments.h_0 = dense_h_0.data();
    arguments.weights_x = weights_x.data();
    arguments.weights_x_stride = weights_x.stride();
    arguments.weights_h = weights_h.data();
    arguments.weights_h_stride = weights_h.stride();
    return finish(new_columns());
  }
  Tensor products_x = multiply<Device>(dtype, input, transpose(weight_ih));
  const Tensor products_h = multiply<Device>(dtype, h_0, transpose(weight_hh));
  arguments.products_x = products_x.data();
  arguments.products_h = products_h.data();
  return finish(kHasOneGradient<Cell> && !is_half(dtype) ? std::move(products_x) : new_columns());
}

// The gradients of the columns, from which products make those of the parameters, the input and the state.
template <class Device, class Cell>
std::array<Tensor, 3> step_backward(
    const std::optional<Tensor>& grad_h, const std::optional<Tensor>& grad_c, const Tensor& columns,
    const Tensor& saved_c) {
  using Entries = typename Device::template Step<Cell>;
  using BackwardTensors = typename StepOf<Cell>::BackwardTensors;
  constexpr const char* kOp = StepOf<Cell>::kBackward;
  const Sizes cell = matrix_sizes(kOp, "saved_c", saved_c);
  const StepSizes sizes{cell[0], 0, cell[1]};
  const Tensors tensors{get(grad_h), get(grad_c), &columns, &saved_c};
  check<BackwardTensors>(kOp, sizes, tensors, "saved_c", saved_c);
  const auto backward = [](ScalarType dtype, const BackwardTensors& in, void* stream) {
    const StepBackwardArguments arguments{in.sizes,   in.grad_h, in.grad_c,      in.columns,
                                          in.saved_c, in.grad_x, in.grad_h_part, in.grad_c_0};
    return Entries::backward(dtype, arguments, stream);
  };
  return run<Device, BackwardTensors>(
      kOp, backward, kernel_dtype(kOp, "columns", columns), sizes, tensors, saved_c, 0, 0);
}

template <class Device, class Cell, class Library>
void register_step(Library& library) {
  library.impl(StepOf<Cell>::kName, &Boxed<&step<Device, Cell>>::call);
  library.impl(StepOf<Cell>::kBackward, &Boxed<&step_backward<Device, Cell>>::call);
}

}  // namespace extops::stable

// `Device::Step<Cell>`: the entry points of a cell.
#define EXTOPS_STEP_ENTRIES_CUDA(Device, cell, Cell)                     \
  template <>                                                            \
  struct Device::Step<Cell> {                                            \
    static constexpr auto* alignment = &extops_##cell##_step_alignment_cuda; \
    static constexpr auto* forward = &extops_##cell##_step_cuda;             \
    static constexpr auto* backward = &extops_##cell##_step_backward_cuda;   \
  };
