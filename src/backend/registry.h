// SPDX-License-Identifier: MIT
// The one table of backends. A new backend is a folder, its target, and one line in registry.cc.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "fathom/backend.h"

namespace fathom {

struct BackendEntry {
  const char* name;
  const char* description;
  std::string (*probe)();                           // why it cannot run here; empty when it can
  std::unique_ptr<Backend> (*make)(int n_threads);  // n_threads >= 1; only after a good probe
};

// Best last.
std::span<const BackendEntry> BackendTable();

}  // namespace fathom
