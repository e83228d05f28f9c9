#pragma once

#include <string>
#include <utility>

#include "../cells/cell.h"

// A schema as torch wants it, from the rows of a table.
inline std::string make_schema(const std::string& name, const std::string& rows, const char* options) {
  std::string arguments, results;
  for (size_t begin = 0, end; (end = rows.find("; ", begin)) != std::string::npos; begin = end + 2) {
    const bool is_result = rows.compare(begin, 3, "-> ") == 0;
    const size_t first = begin + (is_result ? 3 : 0);
    std::string& list = is_result ? results : arguments;
    list += (list.empty() ? "" : ", ") + rows.substr(first, rows.find('[', first) - first);
  }
  return name + "(" + arguments + options + ") -> (" + results + ")";
}

// What Python needs to know of a cell.
template <class Cell>
std::string describe_cell(const char* name) {
  static_assert(extops::kIsOfC<Cell>);
  const std::pair<const char*, int> facts[] = {
      {"gates", Cell::kGates},
      {"input", Cell::kInput},
      {"first_input", extops::kFirstInputOf<Cell>},
      {"numbers", extops::kNumbersOf<Cell>},
      {"recurrent", Cell::kRecurrent},
      {"saves_new_c", Cell::kSavesNewC},
      {"states", extops::Gradients<Cell>::kIsHTheC ? 1 : 1 + extops::kCellStates<Cell>}};
  std::string text = name;
  for (const auto& [fact, number] : facts) text += std::string(" ") + fact + "=" + std::to_string(number);
  return text;
}
