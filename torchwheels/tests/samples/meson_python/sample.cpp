#include <torch/library.h>

static int64_t answer() { return ANSWER; }
TORCH_LIBRARY(sample, m) { m.def("answer() -> int", &answer); }
