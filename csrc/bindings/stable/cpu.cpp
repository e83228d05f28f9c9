// Defines the operators and registers their CPU kernels, on torch's stable ABI.
#include "../../kernels/lltm.h"
#include "../../kernels/multiply.h"
#include "../../kernels/rounding.h"
#include "../schemas.h"
#include "glibc.h"
#include "lltm.h"
#include "multiply.h"
#include "rounding.h"

namespace {

struct Cpu {
  static constexpr bool kHasSmallInputBackward = false;
  static constexpr auto* lltm = &extops_lltm_cpu;
  static constexpr auto* lltm_is_fast = &extops_lltm_is_fast_cpu;
  static constexpr auto* lltm_backward = &extops_lltm_backward_cpu;
  static constexpr auto* lltm_backward_is_fast = &extops_lltm_backward_is_fast_cpu;
  static constexpr auto* lltm_cell = &extops_lltm_cell_cpu;
  static constexpr auto* lltm_cell_backward = &extops_lltm_cell_backward_cpu;
  static constexpr auto* round_ste = &extops_round_ste_cpu;
  static constexpr auto* elementwise_mult = &extops_elementwise_mult_cpu;
  static constexpr auto* elementwise_mult_backward = &extops_elementwise_mult_backward_cpu;

  template <class Kernel>
  static void run(const extops::stable::Tensor&, int64_t numel, const Kernel& kernel) {
    // Below this a second thread costs more than it saves.
    constexpr int64_t kGrain = 8192;
    if (numel <= kGrain) return extops::stable::check_success(kernel(int64_t{0}, numel));
    torch::stable::parallel_for(
        0, numel, kGrain, [&](int64_t begin, int64_t end) { extops::stable::check_success(kernel(begin, end)); });
  }

  template <class Kernel>
  static void run_whole(const extops::stable::Tensor&, const Kernel& kernel) {
    extops::stable::check_success(kernel());
  }
};

}  // namespace

STABLE_TORCH_LIBRARY(extops, library) {
  for (const char* schema : extops::kSchemas) library.def(schema);
}

STABLE_TORCH_LIBRARY_IMPL(extops, CPU, library) {
  extops::stable::register_lltm<Cpu>(library);
  extops::stable::register_rounding<Cpu>(library);
  extops::stable::register_multiply<Cpu>(library);
}
