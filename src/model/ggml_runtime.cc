// SPDX-License-Identifier: MIT
#include "model/ggml_runtime.h"

#include <ggml.h>
#include <llama.h>

#include <mutex>

namespace fathom {
namespace {

constexpr std::size_t kMaxCapturedBytes = 2048;  // enough for the lines before a failure

thread_local std::string* current_capture = nullptr;

// Called from C code: nothing may be thrown. Lines may come in parts (GGML_LOG_LEVEL_CONT); only
// whole errors matter here.
void OnLog(ggml_log_level level, const char* text, void* /*user_data*/) {
  if (level != GGML_LOG_LEVEL_ERROR || current_capture == nullptr || text == nullptr) return;
  try {
    if (current_capture->size() < kMaxCapturedBytes) current_capture->append(text);
  } catch (...) {  // out of memory while reporting an error: lose the text, keep the error
  }
}

// "gguf_init_from_reader: failed to read magic" -> "failed to read magic".
std::string_view WithoutFunctionName(std::string_view line) {
  const std::size_t colon = line.find(": ");
  if (colon == std::string_view::npos) return line;
  if (line.substr(0, colon).find(' ') != std::string_view::npos) return line;
  return line.substr(colon + 2);
}

}  // namespace

void InitGgml() {
  static std::once_flag once;
  std::call_once(once, [] {
    llama_log_set(&OnLog, nullptr);  // passes it on to ggml
    ggml_log_set(&OnLog, nullptr);
    llama_backend_init();
  });
}

LogCapture::LogCapture() : outer_(current_capture) { current_capture = &text_; }

LogCapture::~LogCapture() { current_capture = outer_; }

std::string LogCapture::Text(std::string_view fallback) const {
  std::string out;
  std::string_view rest = text_;
  while (!rest.empty()) {
    const std::size_t end = std::min(rest.find('\n'), rest.size());
    const std::string_view line = WithoutFunctionName(rest.substr(0, end));
    rest.remove_prefix(std::min(end + 1, rest.size()));
    if (line.empty()) continue;
    if (!out.empty()) out += "; ";
    for (const char c : line) out += (c >= 0x20 && c < 0x7f) ? c : '?';
  }
  return out.empty() ? std::string(fallback) : out;
}

std::string Quoted(std::string_view text) {
  constexpr std::size_t kMaxBytes = 80;
  std::string out = "'";
  for (const char c : text.substr(0, kMaxBytes)) out += (c >= 0x20 && c < 0x7f) ? c : '?';
  if (text.size() > kMaxBytes) out += "...";
  return out + "'";
}

}  // namespace fathom
