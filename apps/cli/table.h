// SPDX-License-Identifier: MIT
// Plain text tables: the first column left-aligned, the others right-aligned.
#pragma once

#include <string>
#include <vector>

namespace fathom::cli {

class Table {
 public:
  explicit Table(std::vector<std::string> header) : rows_{std::move(header)} {}
  // Shorter rows are filled with empty cells.
  void Add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  std::string ToString() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

// Fixed decimals: Fixed(3.14159, 2) == "3.14".
std::string Fixed(double value, int decimals);

}  // namespace fathom::cli
