// SPDX-License-Identifier: MIT
// Progress of long work on standard error: a bar that redraws on a terminal, a line every tenth
// otherwise.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace fathom::cli {

class Progress {
 public:
  // unit: what is counted, "tokens".
  Progress(std::string label, std::string unit);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // The time left is that of work whose cost per unit grows linearly, as dense attention's does.
  void Update(std::int64_t done, std::int64_t total);

 private:
  std::string label_;
  std::string unit_;
  bool terminal_;
  bool drawn_ = false;
  std::int64_t last_tenth_ = 0;
  std::int64_t last_done_ = 0;
  double last_seconds_ = 0;
  double unit_seconds_ = 0;  // recent seconds per unit, smoothed
  std::chrono::steady_clock::time_point start_;
};

}  // namespace fathom::cli
