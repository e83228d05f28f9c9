// The same operator on a GPU. The operators themselves are declared in own_operator.cpp.

#include <ATen/ATen.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

namespace {

template <typename T>
__global__ void softsign_kernel(const T* from, T* to, int64_t numel) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < numel) to[i] = from[i] / (1 + abs(from[i]));
}

template <typename T>
__global__ void softsign_backward_kernel(const T* up, const T* from, T* to, int64_t numel) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= numel) return;
  const T below = 1 + abs(from[i]);
  to[i] = up[i] / (below * below);
}

constexpr int kThreads = 256;

// At least one: CUDA refuses to launch none.
unsigned blocks(int64_t numel) { return numel ? (numel + kThreads - 1) / kThreads : 1; }

at::Tensor softsign(const at::Tensor& input) {
  const c10::cuda::CUDAGuard device(input.device());
  const at::Tensor x = input.contiguous();
  at::Tensor output = at::empty_like(x);
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "softsign", [&] {
    softsign_kernel<<<blocks(x.numel()), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
        x.const_data_ptr<scalar_t>(), output.mutable_data_ptr<scalar_t>(), x.numel());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return output;
}

at::Tensor softsign_backward(const at::Tensor& grad_output, const at::Tensor& input) {
  const c10::cuda::CUDAGuard device(input.device());
  const at::Tensor g = grad_output.contiguous(), x = input.contiguous();
  at::Tensor grad_input = at::empty_like(x);
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "softsign_backward", [&] {
    softsign_backward_kernel<<<blocks(x.numel()), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
        g.const_data_ptr<scalar_t>(), x.const_data_ptr<scalar_t>(), grad_input.mutable_data_ptr<scalar_t>(), x.numel());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return grad_input;
}

}  // namespace

TORCH_LIBRARY_IMPL(own, CUDA, library) {
  library.impl("softsign", softsign);
  library.impl("softsign_backward", softsign_backward);
}
