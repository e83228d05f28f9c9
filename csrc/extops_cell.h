// The operators of a cell of your own (cells/cell.h says what one is). A C++ file that says
//
//   EXTOPS_CELL(name, Cell)
//
// defines `extops::<name>_sequence` and its backward for the CPU, and declares `<name>_step`; compiled with
// -DEXTOPS_WITH_CUDA also for GPUs, whose kernels a CUDA file has (extops_cell.cuh). Python's extops.load_cell()
// compiles, loads and calls them.
#pragma once

#ifndef TORCH_TARGET_VERSION
#define TORCH_TARGET_VERSION 0x020a000000000000  // LibTorch's stable ABI of 2.10
#endif
#if defined(EXTOPS_WITH_CUDA) && !defined(USE_CUDA)
#define USE_CUDA  // the headers declare the current stream only then
#endif

#include "bindings/make_schema.h"
#include "bindings/stable/cpu.h"
#include "bindings/stable/sequence.h"
#include "bindings/stable/step.h"
#include "kernels/cpu/sequence.h"
#ifdef EXTOPS_WITH_CUDA
#include "bindings/stable/cuda.h"
#endif

namespace extops::own {

#define EXTOPS_OWN_SEQUENCE(IN, UPSTREAM, OUT) \
  EXTOPS_SEQUENCE(IN, OUT, Cell::kColumns, EXTOPS_PARAMETERS(IN, UPSTREAM, Cell::kInput, Cell::kRecurrent))
#define EXTOPS_OWN_SEQUENCE_BACKWARD(IN, UPSTREAM, OUT) \
  EXTOPS_SEQUENCE_BACKWARD(IN, UPSTREAM, OUT, Cell::kColumns, EXTOPS_WEIGHT_HH(IN, Cell::kRecurrent))
#define EXTOPS_OWN_STEP(IN, UPSTREAM, OUT) \
  EXTOPS_STEP(IN, UPSTREAM, OUT, Cell::kColumns, Cell::kInput, Cell::kRecurrent)
#define EXTOPS_OWN_STEP_BACKWARD(IN, UPSTREAM, OUT) \
  EXTOPS_STEP_BACKWARD(IN, UPSTREAM, OUT, Cell::kColumns, Cell::kInput, kOfH<Cell>)
#define EXTOPS_OWN_STEP_PARAMETERS_BACKWARD(IN, UPSTREAM, OUT) \
  EXTOPS_STEP_PARAMETERS_BACKWARD(IN, UPSTREAM, OUT, Cell::kColumns, Cell::kInput, Cell::kRecurrent, kOfH<Cell>)
#define EXTOPS_OWN_STEP_INPUT_BACKWARD(IN, UPSTREAM, OUT) \
  EXTOPS_STEP_INPUT_BACKWARD(IN, UPSTREAM, OUT, Cell::kInput, Cell::kRecurrent, kOfH<Cell>)

template <class Cell>
constexpr int kOfH = kHasOneGradient<Cell> ? 0 : Cell::kRecurrent;

template <class Cell>
EXTOPS_ARGUMENTS(SequenceTensors, SequenceTableSizes, EXTOPS_SEQUENCE_SIZES, EXTOPS_OWN_SEQUENCE)
template <class Cell>
EXTOPS_ARGUMENTS(SequenceBackwardTensors, SequenceTableSizes, EXTOPS_SEQUENCE_SIZES, EXTOPS_OWN_SEQUENCE_BACKWARD)
template <class Cell>
EXTOPS_ARGUMENTS(StepTensors, StepSizes, EXTOPS_STEP_SIZES, EXTOPS_OWN_STEP)
template <class Cell>
EXTOPS_ARGUMENTS(StepBackwardTensors, StepSizes, EXTOPS_STEP_SIZES, EXTOPS_OWN_STEP_BACKWARD)
template <class Cell>
EXTOPS_ARGUMENTS(StepParametersBackwardTensors, StepSizes, EXTOPS_STEP_SIZES, EXTOPS_OWN_STEP_PARAMETERS_BACKWARD)
template <class Cell>
EXTOPS_ARGUMENTS(StepInputBackwardTensors, StepSizes, EXTOPS_STEP_SIZES, EXTOPS_OWN_STEP_INPUT_BACKWARD)

// The rows with the cell's numbers in place of their names.
template <class Cell>
std::string rows_of(std::string rows) {
  const std::pair<std::string, int> numbers[] = {
      {"Cell::kColumns", Cell::kColumns},
      {"Cell::kInput", Cell::kInput},
      {"Cell::kRecurrent", Cell::kRecurrent},
      {"kOfH<Cell>", kOfH<Cell>}};
  for (const auto& [name, number] : numbers) {
    for (size_t at; (at = rows.find(name)) != std::string::npos;) rows.replace(at, name.size(), std::to_string(number));
  }
  return rows;
}

// What extops._schemas asks a library.
struct Operator {
  const char* sizes;
  std::string rows, schema;

  Operator(const char* name, const char* sizes, const std::string& rows, const char* options)
      : sizes(sizes), rows(rows), schema(make_schema(name, rows, options)) {}
};

constexpr size_t kOperators = 6;

template <class Cell, class Table>
Operator operator_of(const char* name, const char* options) {
  return {name, Table::kSizes, rows_of<Cell>(Table::kRows), options};
}

template <class Cell>
const Operator* operators() {
  static const Operator known[kOperators] = {
      operator_of<Cell, SequenceTensors<Cell>>(stable::SequenceOf<Cell>::kName, EXTOPS_SEQUENCE_OPTIONS),
      operator_of<Cell, SequenceBackwardTensors<Cell>>(stable::SequenceOf<Cell>::kBackward, EXTOPS_SEQUENCE_OPTIONS),
      operator_of<Cell, StepTensors<Cell>>(stable::StepOf<Cell>::kName, EXTOPS_STEP_OPTIONS),
      operator_of<Cell, StepBackwardTensors<Cell>>(stable::StepOf<Cell>::kBackward, ""),
      operator_of<Cell, StepParametersBackwardTensors<Cell>>(
          stable::StepOf<Cell>::kParametersBackward, EXTOPS_STEP_OPTIONS),
      operator_of<Cell, StepInputBackwardTensors<Cell>>(stable::StepOf<Cell>::kInputBackward, EXTOPS_STEP_OPTIONS)};
  return known;
}

struct Cpu : stable::CpuDevice {
  template <class Cell>
  struct Sequence;
};

#ifdef EXTOPS_WITH_CUDA
struct Cuda : stable::CudaDevice {
  template <class Cell>
  struct Sequence;
  template <class Cell>
  struct Step;
};
#endif

}  // namespace extops::own

#define EXTOPS_CELL(cell, Cell)                                                                                   \
  EXTOPS_DECLARE_SEQUENCE_CPU(cell, Cell)                                                                         \
  EXTOPS_DEFINE_SEQUENCE_CPU(cell, Cell)                                                                          \
  template <>                                                                                                     \
  struct extops::stable::SequenceOf<Cell> {                                                                       \
    using Tensors = own::SequenceTensors<Cell>;                                                                   \
    using BackwardTensors = own::SequenceBackwardTensors<Cell>;                                                   \
    static constexpr const char* kName = #cell "_sequence";                                                       \
    static constexpr const char* kBackward = #cell "_sequence_backward";                                          \
  };                                                                                                              \
  template <>                                                                                                     \
  struct extops::stable::StepOf<Cell> {                                                                           \
    using Tensors = own::StepTensors<Cell>;                                                                       \
    using BackwardTensors = own::StepBackwardTensors<Cell>;                                                       \
    using ParametersBackwardTensors = own::StepParametersBackwardTensors<Cell>;                                   \
    using InputBackwardTensors = own::StepInputBackwardTensors<Cell>;                                             \
    EXTOPS_STEP_NAMES(cell)                                                                                       \
  };                                                                                                              \
  EXTOPS_SEQUENCE_ENTRIES_CPU(extops::own::Cpu, cell, Cell)                                                       \
  EXTOPS_API const char* extops_schema(size_t index) {                                                            \
    return index < extops::own::kOperators ? extops::own::operators<Cell>()[index].schema.c_str() : nullptr;      \
  }                                                                                                               \
  EXTOPS_API const char* extops_sizes(size_t index) { return extops::own::operators<Cell>()[index].sizes; }       \
  EXTOPS_API const char* extops_rows(size_t index) { return extops::own::operators<Cell>()[index].rows.c_str(); } \
  EXTOPS_API const char* extops_cell(size_t index) {                                                              \
    static const std::string text = describe_cell<Cell>(#cell);                                                   \
    return index < 1 ? text.c_str() : nullptr;                                                                    \
  }                                                                                                               \
  STABLE_TORCH_LIBRARY_FRAGMENT(extops, library) {                                                                \
    for (size_t index = 0; index < extops::own::kOperators; ++index) library.def(extops_schema(index));           \
  }                                                                                                               \
  STABLE_TORCH_LIBRARY_IMPL(extops, CPU, library) {                                                               \
    extops::stable::register_sequence<extops::own::Cpu, Cell>(library);                                           \
  }                                                                                                               \
  EXTOPS_CELL_ON_GPUS(cell, Cell)

#ifdef EXTOPS_WITH_CUDA
#define EXTOPS_CELL_ON_GPUS(cell, Cell)                                  \
  EXTOPS_DECLARE_SEQUENCE_CUDA(cell, Cell)                               \
  EXTOPS_DECLARE_STEP_CUDA(cell, Cell)                                   \
  EXTOPS_SEQUENCE_ENTRIES_CUDA(extops::own::Cuda, cell, Cell)            \
  EXTOPS_STEP_ENTRIES_CUDA(extops::own::Cuda, cell, Cell)                \
  STABLE_TORCH_LIBRARY_IMPL(extops, CUDA, library) {                     \
    extops::stable::register_sequence<extops::own::Cuda, Cell>(library); \
    extops::stable::register_step<extops::own::Cuda, Cell>(library);     \
  }
#else
#define EXTOPS_CELL_ON_GPUS(cell, Cell)
#endif
