// Straight-through rounding and multiplication as extensions are commonly written.
#include <torch/extension.h>

#include <vector>

torch::Tensor round_cuda(torch::Tensor input);
void mult_cuda(torch::Tensor a, torch::Tensor b, torch::Tensor out);
std::vector<torch::Tensor> mult_backward_cuda(torch::Tensor grad_output, torch::Tensor a, torch::Tensor b);

#define CHECK_INPUT(x)                                     \
  TORCH_CHECK((x).is_cuda(), #x " must be a CUDA tensor"); \
  TORCH_CHECK((x).is_contiguous(), #x " must be contiguous")

torch::Tensor round_ste(torch::Tensor input) {
  CHECK_INPUT(input);
  return round_cuda(input);
}

void mult(torch::Tensor a, torch::Tensor b, torch::Tensor out) {
  CHECK_INPUT(a);
  CHECK_INPUT(b);
  CHECK_INPUT(out);
  mult_cuda(a, b, out);
}

std::vector<torch::Tensor> mult_backward(torch::Tensor grad_output, torch::Tensor a, torch::Tensor b) {
  CHECK_INPUT(grad_output);
  CHECK_INPUT(a);
  CHECK_INPUT(b);
  return mult_backward_cuda(grad_output, a, b);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("round_ste", &round_ste, "straight-through rounding (CUDA)");
  m.def("mult", &mult, "elementwise multiplication (CUDA)");
  m.def("mult_backward", &mult_backward, "gradients of the elementwise multiplication (CUDA)");
}
