#include <numpy/numpyconfig.h>
#include <torch/library.h>

static_assert(NPY_FEATURE_VERSION > 0);
static int64_t answer() { return ANSWER; }
TORCH_LIBRARY(sample, m) { m.def("answer() -> int", &answer); }
