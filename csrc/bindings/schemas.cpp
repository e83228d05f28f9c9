#include "schemas.h"

#include <iterator>

#include "cell.h"

namespace {

using extops::Operator;

std::vector<Operator> make_operators() {
  std::vector<Operator> operators;
#define EXTOPS_CELL_TABLES(cell, Cell) extops::add_operators<extops::Cell>(#cell, operators);
  EXTOPS_CELLS(EXTOPS_CELL_TABLES)
#define EXTOPS_ELEMENTWISE_TABLE(Function, schema) operators.push_back({schema, "", ""});
  EXTOPS_ELEMENTWISE(EXTOPS_ELEMENTWISE_TABLE)
  return operators;
}

const std::vector<Operator> kOperators = make_operators();

#define EXTOPS_CELL_TEXT(cell, Cell) describe_cell<extops::Cell>(#cell),
const std::string kCells[] = {EXTOPS_CELLS(EXTOPS_CELL_TEXT)};

}  // namespace

const char* extops_schema(size_t index) {
  return index < kOperators.size() ? kOperators[index].schema.c_str() : nullptr;
}

const char* extops_sizes(size_t index) { return kOperators[index].sizes; }

const char* extops_rows(size_t index) { return kOperators[index].rows.c_str(); }

const char* extops_cell(size_t index) { return index < std::size(kCells) ? kCells[index].c_str() : nullptr; }
