#include <torch/library.h>

static int64_t answer() { return ANSWER; }
TORCH_LIBRARY(sample, m) { m.def("answer() -> int", &answer); }

#ifdef WITH_CUDA
void fill(int64_t pointer);
TORCH_LIBRARY_FRAGMENT(sample, m) { m.def("fill(int pointer) -> ()", &fill); }
#endif
