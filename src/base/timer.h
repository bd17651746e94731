// SPDX-License-Identifier: MIT
#pragma once

#include <chrono>

namespace fathom {

// Seconds on a clock that never goes back; only differences mean anything.
inline double NowSeconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace fathom
