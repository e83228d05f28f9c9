// What the bindings of all operators with GEMMs share.
//
// A `Device` is a type with the kernels' entry points and a `run(op, tensor, count, grain, kernel)` that calls `kernel`
// with what the entry points take last. Some kernels, and TF32, exist only where `Device::kIsCuda`.
#pragma once

#include "table.h"

namespace extops::stable {

// Below so many multiplications, another thread costs more than it saves.
inline int64_t grain_of(int64_t multiplications) { return 1 + 250000 / std::max<int64_t>(multiplications, 1); }

inline bool is_half(ScalarType dtype) { return dtype == ScalarType::Half || dtype == ScalarType::BFloat16; }

// The dtype, or TF32 where the device may compute GEMMs in it.
template <class Device>
ScalarType gemm_dtype(ScalarType dtype, bool allow_tf32) {
  return dtype == ScalarType::Float && Device::kIsCuda && allow_tf32 ? ScalarType::TF32 : dtype;
}

inline const Tensor* get(const std::optional<Tensor>& tensor) {
  return tensor.has_value() && tensor->defined() ? &*tensor : nullptr;
}

// The names of a cell's operators.
template <class Cell>
struct Names;

#define EXTOPS_NAMES(cell, Cell)                                                              \
  template <>                                                                                 \
  struct extops::stable::Names<Cell> {                                                        \
    static constexpr const char* kSequence = #cell "_sequence";                               \
    static constexpr const char* kSequenceBackward = #cell "_sequence_backward";              \
    static constexpr const char* kStep = #cell "_step";                                       \
    static constexpr const char* kStepBackward = #cell "_step_backward";                      \
    static constexpr const char* kStepParametersBackward = #cell "_step_parameters_backward"; \
    static constexpr const char* kStepInputBackward = #cell "_step_input_backward";           \
  };

}  // namespace extops::stable
