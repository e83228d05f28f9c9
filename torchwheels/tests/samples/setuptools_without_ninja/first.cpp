#include <torch/library.h>

#include "answer.h"

TORCH_LIBRARY_FRAGMENT(sample, m) { m.def("first() -> int", &answer); }
