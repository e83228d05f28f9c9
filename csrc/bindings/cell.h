// The tables of a cell's operators, from the constants of the cell: one of the package or a user's.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "make_schema.h"
#include "step.h"

namespace extops {

// clang-format off
// The rows of a cell's parameters: in parts, as torch's modules have them, and joined.
#define EXTOPS_WEIGHT_HH(ROW, columns) ROW(weight_hh, Cell::kRecurrent*state_size, columns)
#define EXTOPS_PARTS(IN, UPSTREAM, columns) EXTOPS_WEIGHTS_OF_PARTS(IN, columns) EXTOPS_BIASES(UPSTREAM)
#define EXTOPS_WEIGHTS_OF_PARTS(ROW, columns)             \
  ROW(weight_ih, Cell::kInput*state_size, input_features) \
  EXTOPS_WEIGHT_HH(ROW, columns)
#define EXTOPS_BIASES(ROW)                \
  ROW(bias_ih, Cell::kInput*state_size)   \
  ROW(bias_hh, Cell::kRecurrent*state_size)
#define EXTOPS_JOINED_WEIGHTS(ROW, columns) ROW(weights, Cell::kGates*state_size, columns + input_features)
#define EXTOPS_JOINED(ROW, columns) EXTOPS_JOINED_WEIGHTS(ROW, columns) ROW(bias, Cell::kGates*state_size)
#define EXTOPS_PARTS_GRADIENTS(OUT)                            \
  OUT(grad_weight_ih, Cell::kInput*state_size, input_features) \
  OUT(grad_weight_hh, Cell::kRecurrent*state_size, state_size) \
  OUT(grad_bias_ih, Cell::kInput*state_size)                   \
  OUT(grad_bias_hh, Cell::kRecurrent*state_size)
#define EXTOPS_JOINED_GRADIENTS(OUT)                                \
  OUT(grad_weights, Cell::kGates*state_size, state_size + input_features) \
  OUT(grad_bias, Cell::kGates*state_size)

#define EXTOPS_SEQUENCE_OF_PARTS(IN, UPSTREAM, OUT) EXTOPS_SEQUENCE(IN, OUT, EXTOPS_PARTS(IN, UPSTREAM, direction_size))
#define EXTOPS_SEQUENCE_OF_JOINED(IN, UPSTREAM, OUT) EXTOPS_SEQUENCE(IN, OUT, EXTOPS_JOINED(IN, direction_size))
#define EXTOPS_STEP_OF_PARTS(IN, UPSTREAM, OUT) EXTOPS_STEP(IN, OUT, EXTOPS_PARTS(IN, UPSTREAM, state_size))
#define EXTOPS_STEP_OF_JOINED(IN, UPSTREAM, OUT) EXTOPS_STEP(IN, OUT, EXTOPS_JOINED(IN, state_size))
#define EXTOPS_STEP_PARAMETERS_BACKWARD_OF_PARTS(IN, UPSTREAM, OUT) \
  EXTOPS_STEP_PARAMETERS_BACKWARD(IN, UPSTREAM, OUT, EXTOPS_PARTS_GRADIENTS(OUT))
#define EXTOPS_STEP_PARAMETERS_BACKWARD_OF_JOINED(IN, UPSTREAM, OUT) \
  EXTOPS_STEP_PARAMETERS_BACKWARD(IN, UPSTREAM, OUT, EXTOPS_JOINED_GRADIENTS(OUT))
#define EXTOPS_STEP_INPUT_BACKWARD_OF_PARTS(IN, UPSTREAM, OUT) \
  EXTOPS_STEP_INPUT_BACKWARD(IN, UPSTREAM, OUT, EXTOPS_WEIGHTS_OF_PARTS(IN, state_size))
#define EXTOPS_STEP_INPUT_BACKWARD_OF_JOINED(IN, UPSTREAM, OUT) \
  EXTOPS_STEP_INPUT_BACKWARD(IN, UPSTREAM, OUT, EXTOPS_JOINED_WEIGHTS(IN, state_size))
// clang-format on

// `Name<Cell>`: the struct of a table, for the parameters that the cell has.
#define EXTOPS_CELL_TABLE(Name, TABLE, Sizes, KIND)                                 \
  template <class Cell>                                                             \
  EXTOPS_ARGUMENTS(Name##OfParts, Sizes, EXTOPS_##KIND##_SIZES, TABLE##_OF_PARTS)   \
  template <class Cell>                                                             \
  EXTOPS_ARGUMENTS(Name##OfJoined, Sizes, EXTOPS_##KIND##_SIZES, TABLE##_OF_JOINED) \
  template <class Cell>                                                             \
  using Name = std::conditional_t<kIsJoined<Cell>, Name##OfJoined<Cell>, Name##OfParts<Cell>>;

EXTOPS_CELL_TABLE(SequenceTensors, EXTOPS_SEQUENCE, SequenceTableSizes, SEQUENCE)
EXTOPS_CELL_TABLE(StepTensors, EXTOPS_STEP, StepSizes, STEP)
EXTOPS_CELL_TABLE(StepParametersBackwardTensors, EXTOPS_STEP_PARAMETERS_BACKWARD, StepSizes, STEP)
EXTOPS_CELL_TABLE(StepInputBackwardTensors, EXTOPS_STEP_INPUT_BACKWARD, StepSizes, STEP)
template <class Cell>
EXTOPS_ARGUMENTS(SequenceBackwardTensors, SequenceTableSizes, EXTOPS_SEQUENCE_SIZES, EXTOPS_SEQUENCE_BACKWARD)
template <class Cell>
EXTOPS_ARGUMENTS(StepBackwardTensors, StepSizes, EXTOPS_STEP_SIZES, EXTOPS_STEP_BACKWARD)

// What extops.binding._schemas asks a library of an operator.
struct Operator {
  std::string schema;
  const char* sizes;
  std::string rows;
};

// The rows with the values of the cell's constants in place of their names.
template <class Cell>
std::string with_numbers(std::string rows) {
  const std::pair<std::string, int> numbers[] = {
      {"Cell::kGates", Cell::kGates},
      {"Cell::kInput", Cell::kInput},
      {"Cell::kRecurrent", Cell::kRecurrent},
      {"kCellStates<Cell>", kCellStates<Cell>},
      {"kOfH<Cell>", kOfH<Cell>}};
  for (const auto& [name, number] : numbers) {
    const std::string factor = name + "*", text = number == 1 ? "" : std::to_string(number) + "*";
    for (size_t at; (at = rows.find(factor)) != std::string::npos;) rows.replace(at, factor.size(), text);
  }
  return rows;
}

template <class Cell>
void add_operators(const std::string& cell, std::vector<Operator>& operators) {
  const auto add = [&](const char* suffix, const char* sizes, const char* table, const char* options) {
    const std::string rows = with_numbers<Cell>(table);
    operators.push_back({make_schema(cell + suffix, rows, options), sizes, rows});
  };
#define EXTOPS_ADD(suffix, Tensors, options) add(suffix, Tensors<Cell>::kSizes, Tensors<Cell>::kRows, options);
  EXTOPS_ADD("_sequence", SequenceTensors, EXTOPS_SEQUENCE_OPTIONS)
  EXTOPS_ADD("_sequence_backward", SequenceBackwardTensors, EXTOPS_SEQUENCE_BACKWARD_OPTIONS)
  if constexpr (kCellStates<Cell> > 1) return;
  EXTOPS_ADD("_step", StepTensors, EXTOPS_STEP_OPTIONS)
  EXTOPS_ADD("_step_backward", StepBackwardTensors, "")
  EXTOPS_ADD("_step_parameters_backward", StepParametersBackwardTensors, EXTOPS_STEP_OPTIONS)
  EXTOPS_ADD("_step_input_backward", StepInputBackwardTensors, EXTOPS_STEP_OPTIONS)
#undef EXTOPS_ADD
}

}  // namespace extops
