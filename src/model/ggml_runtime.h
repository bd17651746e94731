// SPDX-License-Identifier: MIT
// One-time set-up of ggml and libllama, and what they would have printed.
#pragma once

#include <string>
#include <string_view>

namespace fathom {

// Installs the log callbacks (the library prints nothing) and initialises libllama. Cheap after the
// first call; safe from any thread. Every entry point of this module calls it before anything else.
void InitGgml();

// While it lives, errors that ggml or libllama log on this thread are collected here.
class LogCapture {
 public:
  LogCapture();
  ~LogCapture();
  LogCapture(const LogCapture&) = delete;
  LogCapture& operator=(const LogCapture&) = delete;

  // The errors as one line without function names, or `fallback` when there were none.
  std::string Text(std::string_view fallback) const;

 private:
  std::string text_;
  std::string* outer_;  // the capture that this one hides
};

// A string from a file, made safe for an error message: quoted, printable ASCII, at most 80 bytes.
std::string Quoted(std::string_view text);

}  // namespace fathom
