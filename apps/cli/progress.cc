// SPDX-License-Identifier: MIT
#include "progress.h"

#include <unistd.h>

#include <cstdio>
#include <utility>

#include "common.h"

namespace fathom::cli {
namespace {

constexpr int kBarWidth = 30;
constexpr double kQuietSeconds = 2;

// "1:05", minutes and seconds.
std::string ClockText(double seconds) {
  char text[32];
  const auto whole = static_cast<long>(seconds + 0.5);
  std::snprintf(text, sizeof(text), "%ld:%02ld", whole / 60, whole % 60);
  return text;
}

}  // namespace

Progress::Progress(std::string label, std::string unit)
    : label_(std::move(label)),
      unit_(std::move(unit)),
      terminal_(isatty(STDERR_FILENO) != 0),
      start_(std::chrono::steady_clock::now()) {}

Progress::~Progress() {
  if (drawn_ && terminal_) std::fprintf(stderr, "\n");
}

void Progress::Update(std::int64_t done, std::int64_t total) {
  if (total <= 0) return;
  const std::int64_t tenth = done * 10 / total;
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  if (!terminal_ && (tenth == last_tenth_ || seconds < kQuietSeconds)) return;
  last_tenth_ = tenth;
  const double rate = seconds > 0 ? static_cast<double>(done) / seconds : 0;
  const double left = rate > 0 ? static_cast<double>(total - done) / rate : 0;
  std::string bar;
  if (terminal_) {
    const auto filled = static_cast<std::size_t>(done * kBarWidth / total);
    bar = "[" + std::string(filled, '#') + std::string(kBarWidth - filled, '.') + "] ";
  }
  std::fprintf(stderr, "%s%s %s%3ld%%  %s of %s %s, %.0f %s/s, %s left%s",
               terminal_ ? "\r\033[K" : "", label_.c_str(), bar.c_str(),
               static_cast<long>(done * 100 / total), Grouped(done).c_str(), Grouped(total).c_str(),
               unit_.c_str(), rate, unit_.c_str(), ClockText(left).c_str(), terminal_ ? "" : "\n");
  std::fflush(stderr);
  drawn_ = true;
}

}  // namespace fathom::cli
