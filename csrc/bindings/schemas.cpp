#include "schemas.h"

#include <iterator>
#include <string>

namespace {

// A schema as torch wants it, from the rows of a table.
std::string make_schema(const std::string& name, const std::string& rows, const char* options) {
  std::string arguments, results;
  for (size_t begin = 0, end; (end = rows.find("; ", begin)) != std::string::npos; begin = end + 2) {
    const bool is_result = rows.compare(begin, 3, "-> ") == 0;
    const size_t first = begin + (is_result ? 3 : 0);
    std::string& list = is_result ? results : arguments;
    list += (list.empty() ? "" : ", ") + rows.substr(first, rows.find('[', first) - first);
  }
  return name + "(" + arguments + options + ") -> (" + results + ")";
}

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

}  // namespace

const char* extops_schema(size_t index) {
  return index < std::size(kOperators) ? kOperators[index].schema.c_str() : nullptr;
}

const char* extops_sizes(size_t index) { return kOperators[index].sizes; }

const char* extops_rows(size_t index) { return kOperators[index].rows; }
