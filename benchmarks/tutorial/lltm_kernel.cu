#include <cuda.h>
#include <cuda_runtime.h>
#include <torch/extension.h>

#include <vector>

namespace {

template <typename scalar_t>
using Accessor2 = torch::PackedTensorAccessor32<scalar_t, 2, torch::RestrictPtrTraits>;
template <typename scalar_t>
using Accessor3 = torch::PackedTensorAccessor32<scalar_t, 3, torch::RestrictPtrTraits>;

template <typename scalar_t>
__device__ __forceinline__ scalar_t sigmoid(scalar_t z) {
  return scalar_t(1) / (scalar_t(1) + exp(-z));
}

template <typename scalar_t>
__device__ __forceinline__ scalar_t d_sigmoid(scalar_t z) {
  const scalar_t s = sigmoid(z);
  return (scalar_t(1) - s) * s;
}

template <typename scalar_t>
__device__ __forceinline__ scalar_t d_tanh(scalar_t z) {
  const scalar_t t = tanh(z);
  return scalar_t(1) - t * t;
}

template <typename scalar_t>
__device__ __forceinline__ scalar_t elu(scalar_t z) {
  return fmax(scalar_t(0), z) + fmin(scalar_t(0), exp(z) - scalar_t(1));
}

template <typename scalar_t>
__device__ __forceinline__ scalar_t d_elu(scalar_t z) {
  return z > scalar_t(0) ? scalar_t(1) : exp(z);
}

template <typename scalar_t>
__global__ void forward_kernel(
    const Accessor3<scalar_t> gates, const Accessor2<scalar_t> old_cell, Accessor2<scalar_t> new_h,
    Accessor2<scalar_t> new_cell, Accessor2<scalar_t> input_gate, Accessor2<scalar_t> output_gate,
    Accessor2<scalar_t> candidate) {
  const int n = blockIdx.y;
  const int c = blockIdx.x * blockDim.x + threadIdx.x;
  if (c < gates.size(2)) {
    input_gate[n][c] = sigmoid(gates[n][0][c]);
    output_gate[n][c] = sigmoid(gates[n][1][c]);
    candidate[n][c] = elu(gates[n][2][c]);
    new_cell[n][c] = old_cell[n][c] + candidate[n][c] * input_gate[n][c];
    new_h[n][c] = tanh(new_cell[n][c]) * output_gate[n][c];
  }
}

template <typename scalar_t>
__global__ void backward_kernel(
    Accessor2<scalar_t> d_old_cell, Accessor3<scalar_t> d_gates, const Accessor2<scalar_t> grad_h,
    const Accessor2<scalar_t> grad_cell, const Accessor2<scalar_t> new_cell, const Accessor2<scalar_t> input_gate,
    const Accessor2<scalar_t> output_gate, const Accessor2<scalar_t> candidate, const Accessor3<scalar_t> gates) {
  const int n = blockIdx.y;
  const int c = blockIdx.x * blockDim.x + threadIdx.x;
  if (c < d_gates.size(2)) {
    const auto d_output_gate = tanh(new_cell[n][c]) * grad_h[n][c];
    const auto d_tanh_cell = output_gate[n][c] * grad_h[n][c];
    const auto d_new_cell = d_tanh(new_cell[n][c]) * d_tanh_cell + grad_cell[n][c];
    d_old_cell[n][c] = d_new_cell;
    d_gates[n][0][c] = candidate[n][c] * d_new_cell * d_sigmoid(gates[n][0][c]);
    d_gates[n][1][c] = d_output_gate * d_sigmoid(gates[n][1][c]);
    d_gates[n][2][c] = input_gate[n][c] * d_new_cell * d_elu(gates[n][2][c]);
  }
}

constexpr int kThreads = 1024;

dim3 blocks_for(int64_t batch, int64_t state_size) { return dim3((state_size + kThreads - 1) / kThreads, batch); }

}  // namespace

std::vector<torch::Tensor> lltm_cuda_forward(
    torch::Tensor input, torch::Tensor weights, torch::Tensor bias, torch::Tensor old_h, torch::Tensor old_cell) {
  auto X = torch::cat({old_h, input}, /*dim=*/1);
  const auto batch = old_cell.size(0);
  const auto state_size = old_cell.size(1);
  auto gates = torch::addmm(bias, X, weights.transpose(0, 1)).reshape({batch, 3, state_size});
  auto new_h = torch::zeros_like(old_cell);
  auto new_cell = torch::zeros_like(old_cell);
  auto input_gate = torch::zeros_like(old_cell);
  auto output_gate = torch::zeros_like(old_cell);
  auto candidate = torch::zeros_like(old_cell);
  AT_DISPATCH_FLOATING_TYPES(gates.scalar_type(), "lltm_forward_cuda", ([&] {
                               forward_kernel<scalar_t><<<blocks_for(batch, state_size), kThreads>>>(
                                   gates.packed_accessor32<scalar_t, 3, torch::RestrictPtrTraits>(),
                                   old_cell.packed_accessor32<scalar_t, 2, torch::RestrictPtrTraits>(),
                                   new_h.packed_accessor32<scalar_t, 2, torch::RestrictPtrTraits>(),
                                   new_cell.packed_accessor32<scalar_t, 2, torch::RestrictPtrTraits>(),
                                   input_gate.packed_accessor32<scalar_t, 2, torch::RestrictPtrTraits>(),
                                   output_gate.packed_accessor32<scalar_t, 2, torch::RestrictPtrTraits>(),
                                   candidate.packed_accessor32<scalar_t, 2, torch::RestrictPtrTraits>());
                             }));
  return {new_h, new_cell, input_gate, output_gate, candidate, X, gates};
}

std::vector<torch::Tensor> lltm_cuda_backward(
    torch::Tensor grad_h, torch::Tensor grad_cell, torch::Tensor new_cell, torch::Tensor input_gate,
    torch::Tensor output_gate, torch::Tensor candidate, torch::Tensor X, torch::Tensor gates, torch::Tensor weights) {
  auto d_old_cell = torch::zeros_like(new_cell);
  auto d_gates = torch::zeros_like(gates);
  const auto batch = new_cell.size(0);
  const auto state_size = new_cell.size(1);
  AT_DISPATCH_FLOATING_TYPES(X.scalar_type(), "lltm_backward_cuda", ([&] {
                               backward_kernel<scalar_t><<<blocks_for(batch, state_size), kThreads>>>(
                                   d_old_cell.packed_accessor32<scalar_t, 2, torch::RestrictPtrTraits>(),
                                   d_gates.packed_accessor32<scalar_t, 3, torch::RestrictPtrTraits>(),
                                   grad_h.packed_accessor32<scalar_t, 2, torch::RestrictPtrTraits>(),
                                   grad_cell.packed_accessor32<scalar_t, 2, torch::RestrictPtrTraits>(),
                                   new_cell.packed_accessor32<scalar_t, 2, torch::RestrictPtrTraits>(),
                                   input_gate.packed_accessor32<scalar_t, 2, torch::RestrictPtrTraits>(),
                                   output_gate.packed_accessor32<scalar_t, 2, torch::RestrictPtrTraits>(),
                                   candidate.packed_accessor32<scalar_t, 2, torch::RestrictPtrTraits>(),
                                   gates.packed_accessor32<scalar_t, 3, torch::RestrictPtrTraits>());
                             }));
  auto d_gates_2d = d_gates.flatten(1, 2);
  auto d_weights = d_gates_2d.t().mm(X);
  auto d_bias = d_gates_2d.sum(/*dim=*/0, /*keepdim=*/true);
  auto d_X = d_gates_2d.mm(weights);
  auto d_old_h = d_X.slice(/*dim=*/1, 0, state_size);
  auto d_input = d_X.slice(/*dim=*/1, state_size);
  return {d_old_h, d_input, d_weights, d_bias, d_old_cell, d_gates};
}
