// SPDX-License-Identifier: MIT
#include "common.h"

#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>

namespace fathom::cli {
namespace {

std::atomic<bool> interrupted{false};
static_assert(std::atomic<bool>::is_always_lock_free, "written by a signal handler");

void OnInterrupt(int /*signal*/) {
  interrupted = true;
  std::signal(SIGINT, SIG_DFL);
}

constexpr std::int32_t kMaxLayer = 9999;

Error LayersError(const std::string& text) {
  return {ErrorCode::kUsage,
          "--layers '" + text + "' is no list of layers; write 0,3-5 for example"};
}

std::int32_t ParseLayer(std::string_view number, const std::string& text) {
  std::int32_t layer = -1;
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), layer);
  if (error != std::errc() || end != number.data() + number.size() || layer < 0 ||
      layer > kMaxLayer) {
    throw LayersError(text);
  }
  return layer;
}

void WriteFile(const std::string& path, std::string_view text, const char* mode) {
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), mode), std::fclose);
  bool good = file != nullptr;
  if (good) good = std::fwrite(text.data(), 1, text.size(), file.get()) == text.size();
  if (good) good = std::fclose(file.release()) == 0;
  if (!good) {
    throw Error(ErrorCode::kIo, "cannot write '" + path + "': " + std::strerror(errno));
  }
}

}  // namespace

void CatchInterrupt() { std::signal(SIGINT, OnInterrupt); }
bool Interrupted() { return interrupted; }

std::string ReadText(const std::string& path) {
  const auto fail = [&] {
    return Error(ErrorCode::kIo, "cannot read '" + path + "': " + std::strerror(errno));
  };
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> owned(nullptr, std::fclose);
  std::FILE* file = stdin;
  if (path != "-") {
    owned.reset(std::fopen(path.c_str(), "rb"));
    if (!owned) throw fail();
    file = owned.get();
  }
  std::string text;
  std::array<char, 1 << 16> buffer{};
  for (std::size_t n = 0; (n = std::fread(buffer.data(), 1, buffer.size(), file)) > 0;)
    text.append(buffer.data(), n);
  if (std::ferror(file) != 0) throw fail();
  return text;
}

void WriteText(const std::string& path, std::string_view text) { WriteFile(path, text, "wb"); }
void CheckWritable(const std::string& path) { WriteFile(path, "", "ab"); }

void WriteOut(std::string_view text) {
  // What printf could not write, when its buffer was full, nobody has asked about.
  if (std::ferror(stdout) != 0) {
    throw Error(ErrorCode::kIo, "cannot write to standard output: an earlier part was refused");
  }
  if (std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0) {
    return;
  }
  throw Error(ErrorCode::kIo,
              std::string("cannot write to standard output: ") + std::strerror(errno));
}

std::string JsonText(const nlohmann::json& json) {
  return json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::int64_t ParseTokens(const std::string& text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const std::string unit(end, text.data() + text.size());
  std::int64_t scale = 0;
  if (unit.empty()) scale = 1;
  if (unit == "k" || unit == "K") scale = 1024;
  if (unit == "m" || unit == "M") scale = 1024 * 1024;
  if (error != std::errc() || scale == 0 || value < 1 || value > (std::int64_t{1} << 30) / scale) {
    throw Error(ErrorCode::kUsage,
                "'" + text + "' is not a number of tokens; write 4096, 32k or 1M");
  }
  return value * scale;
}

std::vector<std::int32_t> ParseLayers(const std::string& text) {
  std::vector<std::int32_t> layers;
  if (text.empty()) return layers;
  std::istringstream parts(text + ",");
  for (std::string part; std::getline(parts, part, ',');) {
    const std::size_t dash = part.find('-');
    const std::string_view view = part;
    const std::int32_t first = ParseLayer(view.substr(0, dash), text);
    const std::int32_t last =
        dash == std::string::npos ? first : ParseLayer(view.substr(dash + 1), text);
    if (last < first) throw LayersError(text);
    for (std::int32_t layer = first; layer <= last; ++layer) layers.push_back(layer);
  }
  return layers;
}

std::string Grouped(std::int64_t number) {
  std::string text = std::to_string(number < 0 ? -number : number);
  for (std::size_t at = text.size(); at > 3;) text.insert(at -= 3, ",");
  return number < 0 ? "-" + text : text;
}

std::string ByteText(double bytes) {
  constexpr std::array units = {"B", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < units.size()) {
    bytes /= 1024;
    ++unit;
  }
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), unit == 0 ? "%.0f %s" : "%.1f %s", bytes, units.at(unit));
  return text.data();
}

std::string LayersText(const std::vector<std::int32_t>& layers) {
  std::string text;
  for (std::size_t i = 0; i < layers.size();) {
    std::size_t j = i;
    while (j + 1 < layers.size() && layers[j + 1] == layers[j] + 1) ++j;
    text += (text.empty() ? "" : ",") + std::to_string(layers[i]);
    if (j > i) text += "-" + std::to_string(layers[j]);
    i = j + 1;
  }
  return text;
}

std::shared_ptr<const Calibration> LoadStatistics(const std::string& path) {
  return path.empty() ? nullptr : Calibration::Open(path);
}

std::string Plain(double number) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.10g", number);
  return text.data();
}

std::string StopName(StopReason stop) {
  switch (stop) {
    case StopReason::kEndOfText:
      return "end";
    case StopReason::kLength:
      return "length";
    case StopReason::kContext:
      return "context";
    case StopReason::kCancelled:
      return "interrupted";
  }
  return "";
}

int ExitCode(ErrorCode code) {
  if (code == ErrorCode::kUsage) return kExitUsage;
  return code == ErrorCode::kCancelled ? kExitInterrupted : kExitFailure;
}

void AddMachineOptions(Command command, int* threads, std::string* backend) {
  command.AddOption("-t,--threads", *threads, "threads; 0 takes all processors")
      .TypeName("N")
      .ShowDefault()
      .InRange(0, 1024);
  command.AddOption("--backend", *backend, "kernels: cpu, cpu/avx2, ref, ... (see fathom info)")
      .TypeName("NAME")
      .ShowDefault();
}

void AddDeviceOptions(Command command, std::string* device, std::string* decode_attention) {
  command
      .AddOption("--device", *device,
                 "cpu, or cuda: the model runs on the GPU; rows and index stay in host memory")
      .TypeName("NAME")
      .ShowDefault();
  command
      .AddOption(
          "--decode-attention", *decode_attention,
          "with --device cuda: device, whole decode steps on the GPU where it knows the method's "
          "scan, or cpu, their attention by --backend")
      .TypeName("NAME")
      .ShowDefault();
}

}  // namespace fathom::cli
