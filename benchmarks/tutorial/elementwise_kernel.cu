#include <cuda.h>
#include <cuda_runtime.h>
#include <torch/extension.h>

#include <algorithm>
#include <vector>

namespace {

constexpr int kThreads = 256;

unsigned blocks_for(int64_t numel) {
  return static_cast<unsigned>(std::clamp<int64_t>((numel + kThreads - 1) / kThreads, 1, 4096));
}

template <typename scalar_t>
__global__ void round_kernel(const scalar_t* input, scalar_t* output, int64_t numel) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < numel; i += int64_t{gridDim.x} * blockDim.x) {
    output[i] = floor(input[i] + scalar_t(0.5));
  }
}

template <typename scalar_t>
__global__ void mult_kernel(const scalar_t* a, const scalar_t* b, scalar_t* out, int64_t numel) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < numel; i += int64_t{gridDim.x} * blockDim.x) {
    out[i] = a[i] * b[i];
  }
}

}  // namespace

torch::Tensor round_cuda(torch::Tensor input) {
  auto output = torch::empty_like(input);
  AT_DISPATCH_FLOATING_TYPES(input.scalar_type(), "round_cuda", ([&] {
                               round_kernel<scalar_t><<<blocks_for(input.numel()), kThreads>>>(
                                   input.data_ptr<scalar_t>(), output.data_ptr<scalar_t>(), input.numel());
                             }));
  return output;
}

void mult_cuda(torch::Tensor a, torch::Tensor b, torch::Tensor out) {
  AT_DISPATCH_FLOATING_TYPES(a.scalar_type(), "mult_cuda", ([&] {
                               mult_kernel<scalar_t><<<blocks_for(a.numel()), kThreads>>>(
                                   a.data_ptr<scalar_t>(), b.data_ptr<scalar_t>(), out.data_ptr<scalar_t>(), a.numel());
                             }));
}

std::vector<torch::Tensor> mult_backward_cuda(torch::Tensor grad_output, torch::Tensor a, torch::Tensor b) {
  auto grad_a = torch::empty_like(a);
  auto grad_b = torch::empty_like(b);
  mult_cuda(grad_output, b, grad_a);
  mult_cuda(grad_output, a, grad_b);
  return {grad_a, grad_b};
}
