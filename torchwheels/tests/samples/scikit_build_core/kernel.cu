#include <torch/library.h>

__global__ void fill(float* x) { x[threadIdx.x] = 1; }

static void launch(int64_t pointer) { fill<<<1, 1>>>(reinterpret_cast<float*>(pointer)); }
TORCH_LIBRARY_FRAGMENT(sample, m) { m.def("launch(int pointer) -> ()", &launch); }
