#include "schemas.h"

#include <iterator>

#include "make_schema.h"

namespace {

struct Operator {
  std::string schema;
  const char* sizes;
  const char* rows;
};

#define EXTOPS_TABLE(name, Arguments, options) \
  {make_schema(#name, Arguments::kRows, options), Arguments::kSizes, Arguments::kRows},
#define EXTOPS_ELEMENTWISE_TABLE(Function, schema) {schema, "", ""},
#define EXTOPS_GENERIC_TABLE(name, Arguments) EXTOPS_TABLE(name, Arguments, "")
const Operator kOperators[] = {EXTOPS_OPERATORS(EXTOPS_TABLE, EXTOPS_GENERIC_TABLE)
                                   EXTOPS_ELEMENTWISE(EXTOPS_ELEMENTWISE_TABLE)};

#define EXTOPS_CELL_TEXT(cell, Cell) describe_cell<extops::Cell>(#cell),
const std::string kCells[] = {EXTOPS_CELLS(EXTOPS_CELL_TEXT)};

}  // namespace

const char* extops_schema(size_t index) {
  return index < std::size(kOperators) ? kOperators[index].schema.c_str() : nullptr;
}

const char* extops_sizes(size_t index) { return kOperators[index].sizes; }

const char* extops_rows(size_t index) { return kOperators[index].rows; }

const char* extops_cell(size_t index) { return index < std::size(kCells) ? kCells[index].c_str() : nullptr; }
