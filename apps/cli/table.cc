// SPDX-License-Identifier: MIT
#include "table.h"

#include <algorithm>
#include <cstdio>

namespace fathom::cli {

std::string Table::ToString() const {
  std::vector<std::size_t> width;
  for (const auto& row : rows_) {
    width.resize(std::max(width.size(), row.size()), 0);
    for (std::size_t c = 0; c < row.size(); ++c) width[c] = std::max(width[c], row[c].size());
  }
  std::string text;
  const auto add_row = [&](const std::vector<std::string>& row) {
    std::string line;
    for (std::size_t c = 0; c < width.size(); ++c) {
      const std::string cell = c < row.size() ? row[c] : "";
      const std::string space(width[c] - cell.size(), ' ');
      line += (c > 0 ? "  " : "") + (c == 0 ? cell + space : space + cell);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  };
  add_row(rows_.front());
  std::size_t total = width.size() * 2 - 2;
  for (const std::size_t w : width) total += w;
  text += std::string(total, '-') + "\n";
  for (std::size_t r = 1; r < rows_.size(); ++r) add_row(rows_[r]);
  return text;
}

std::string Fixed(double value, int decimals) {
  char text[64];
  std::snprintf(text, sizeof(text), "%.*f", decimals, value);
  return text;
}

}  // namespace fathom::cli
