// Straight-through rounding on torch's stable ABI.
// A `Device` is a type with the kernels' entry points and a `run(tensor, numel, kernel)` that calls `kernel` with what
// the entry points take last.
#pragma once

#include "aten.h"
#include "elementwise.h"

namespace extops::stable {

template <class Device>
std::tuple<Tensor> round_ste(const Tensor& input) {
  const ScalarType dtype = kernel_dtype("round_ste", "input", input.options().dtype);
  Tensor output = allocate_like(input);
  Geometry geometry(input.sizes(), 2);
  geometry.add_output(output);
  geometry.add_input(input);
  run_elementwise<Device>(Device::round_ste, dtype, output, geometry);
  return {std::move(output)};
}

template <class Device>
void register_rounding(torch::stable::detail::StableLibrary& library) {
  library.impl("round_ste", &Boxed<&round_ste<Device>>::call);
}

}  // namespace extops::stable
