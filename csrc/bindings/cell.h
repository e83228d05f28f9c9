// The tables of a cell's operators, from the constants of the cell: one of the package or a user's, with parameters as
// torch's modules have them.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "make_schema.h"
#include "step.h"

namespace extops {

#define EXTOPS_CELL_SEQUENCE(IN, UPSTREAM, OUT) \
  EXTOPS_SEQUENCE(IN, OUT, Cell::kGates, EXTOPS_PARAMETERS(IN, UPSTREAM, Cell::kInput, Cell::kRecurrent))
#define EXTOPS_CELL_SEQUENCE_BACKWARD(IN, UPSTREAM, OUT) \
  EXTOPS_SEQUENCE_BACKWARD(IN, UPSTREAM, OUT, Cell::kGates, EXTOPS_WEIGHT_HH(IN, Cell::kRecurrent))

template <class Cell>
EXTOPS_ARGUMENTS(SequenceTensors, SequenceTableSizes, EXTOPS_SEQUENCE_SIZES, EXTOPS_CELL_SEQUENCE)
template <class Cell>
EXTOPS_ARGUMENTS(SequenceBackwardTensors, SequenceTableSizes, EXTOPS_SEQUENCE_SIZES, EXTOPS_CELL_SEQUENCE_BACKWARD)
template <class Cell>
EXTOPS_ARGUMENTS(StepTensors, StepSizes, EXTOPS_STEP_SIZES, EXTOPS_STEP)
template <class Cell>
EXTOPS_ARGUMENTS(StepBackwardTensors, StepSizes, EXTOPS_STEP_SIZES, EXTOPS_STEP_BACKWARD)
template <class Cell>
EXTOPS_ARGUMENTS(StepParametersBackwardTensors, StepSizes, EXTOPS_STEP_SIZES, EXTOPS_STEP_PARAMETERS_BACKWARD)
template <class Cell>
EXTOPS_ARGUMENTS(StepInputBackwardTensors, StepSizes, EXTOPS_STEP_SIZES, EXTOPS_STEP_INPUT_BACKWARD)

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
  EXTOPS_ADD("_step", StepTensors, EXTOPS_STEP_OPTIONS)
  EXTOPS_ADD("_step_backward", StepBackwardTensors, "")
  EXTOPS_ADD("_step_parameters_backward", StepParametersBackwardTensors, EXTOPS_STEP_OPTIONS)
  EXTOPS_ADD("_step_input_backward", StepInputBackwardTensors, EXTOPS_STEP_OPTIONS)
#undef EXTOPS_ADD
}

}  // namespace extops
