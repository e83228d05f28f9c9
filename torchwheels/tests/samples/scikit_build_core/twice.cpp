#include <torch/library.h>

static int64_t twice(int64_t x) { return 2 * x; }
TORCH_LIBRARY_FRAGMENT(sample, m) { m.def("twice(int x) -> int", &twice); }
