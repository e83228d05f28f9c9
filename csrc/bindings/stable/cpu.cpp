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
  static constexpr bool kIsCuda = false;
  static constexpr auto* lltm = &extops_lltm_cpu;
  static constexpr auto* lltm_alignment = &extops_lltm_alignment_cpu;
  static constexpr auto* lltm_backward = &extops_lltm_backward_cpu;
  static constexpr auto* lltm_backward_alignment = &extops_lltm_backward_alignment_cpu;
  static constexpr auto* lltm_cell = &extops_lltm_cell_cpu;
  static constexpr auto* lltm_cell_backward = &extops_lltm_cell_backward_cpu;
  static constexpr auto* round_ste = &extops_round_ste_cpu;
  static constexpr auto* elementwise_mult = &extops_elementwise_mult_cpu;
  static constexpr auto* elementwise_mult_backward = &extops_elementwise_mult_backward_cpu;

  template <class Kernel>
  static void run(const extops::stable::Tensor&, int64_t numel, const Kernel& kernel) {
    constexpr int64_t kGrain = 8192;  // below which another thread costs more than it saves
    run_in_threads(numel, kGrain, kernel);
  }

  template <class Kernel>
  static void run_small(
      const extops::stable::Tensor&, int64_t batch, int64_t features, int64_t state_size, const Kernel& kernel) {
    constexpr int64_t kMultiplications = 250000;  // a thread's, below which another costs more than it saves
    const int64_t multiplications = 3 * batch * (state_size + features);
    run_in_threads(state_size, 1 + kMultiplications / std::max<int64_t>(multiplications, 1), kernel);
  }

 private:
  template <class Kernel>
  static void run_in_threads(int64_t count, int64_t grain, const Kernel& kernel) {
    if (count <= grain) return extops::stable::check_success(kernel(int64_t{0}, count));
    torch::stable::parallel_for(
        0, count, grain, [&](int64_t begin, int64_t end) { extops::stable::check_success(kernel(begin, end)); });
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
