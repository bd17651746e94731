// SPDX-License-Identifier: MIT
// The one exception type of libfathom.
//
// Every public C++ function reports failure by throwing fathom::Error. The message is one line that
// names the value, the limit it broke and the remedy; it is meant to be shown to a user as it is.
// The library never prints and never aborts; broken preconditions of internal functions are
// assertions.
#pragma once

#include <stdexcept>
#include <string>

namespace fathom {

enum class ErrorCode {
  kUsage,        // the caller asked for something impossible: a bad option, a value out of range
  kUnsupported,  // valid, but this build, this machine or this version cannot do it
  kCorrupt,      // a file is damaged, truncated or not what it claims to be
  kIo,           // the operating system refused: missing file, no permission, disk full
  kNoMemory,     // more memory is needed than the machine has
  kCancelled,    // a callback asked to stop
  kInternal,     // a bug in fathom or in a library below it
};

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace fathom
