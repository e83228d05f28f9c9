// Few headers, so that the test compiles in seconds; `exp` has a newer version on a newer Linux.
#include <ATen/ops/add.h>
#include <torch/library.h>

#include <cmath>

#define TEXT(x) #x
#define TEXT_OF(x) TEXT(x)

extern "C" const char* sentence() { return __FILE__ " is " TEXT_OF(SENTENCE); }

static at::Tensor add_one(const at::Tensor& x, double zero) {
  TORCH_CHECK(x.dim() > 0, "a scalar");
  return at::add(x, std::exp(zero));
}

TORCH_LIBRARY(classic_extension, m) { m.def("add_one(Tensor x, float zero=0.0) -> Tensor", &add_one); }
