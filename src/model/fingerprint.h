// SPDX-License-Identifier: MIT
#pragma once

#include <string>

#include "model/gguf_file.h"

namespace fathom {

// See Model::fingerprint.
std::string FileFingerprint(const GgufFile& file);

}  // namespace fathom
