// SPDX-License-Identifier: MIT
#include "progress.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include "common.h"

namespace fathom::cli {
namespace {

constexpr int kBarWidth = 30;
constexpr double kQuietSeconds = 2;
constexpr double kSmoothing = 0.7;

// "1:05", minutes and seconds.
std::string ClockText(double seconds) {
  char text[32];
  const long whole = std::lround(seconds);
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
  if (total <= 0 || done <= last_done_) return;
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  const double now = (seconds - last_seconds_) / static_cast<double>(done - last_done_);
  unit_seconds_ = last_done_ == 0 ? now : kSmoothing * unit_seconds_ + (1 - kSmoothing) * now;
  last_done_ = done;
  last_seconds_ = seconds;
  const std::int64_t tenth = done * 10 / total;
  if (!terminal_ && (tenth == last_tenth_ || seconds < kQuietSeconds)) return;
  last_tenth_ = tenth;

  // seconds(d) = a d + b d^2, from the time so far and the recent cost of a unit.
  const auto d = static_cast<double>(done);
  const auto all = static_cast<double>(total);
  const double b = std::max((unit_seconds_ - seconds / d) / d, 0.0);
  const double a = std::max(seconds / d - b * d, 0.0);
  const double left = a * (all - d) + b * (all * all - d * d);
  std::string bar;
  if (terminal_) {
    const auto filled = static_cast<std::size_t>(done * kBarWidth / total);
    bar = "[" + std::string(filled, '#') + std::string(kBarWidth - filled, '.') + "] ";
  }
  std::fprintf(stderr, "%s%s %s%3ld%%  %s of %s %s, %.0f %s/s, %s left%s",
               terminal_ ? "\r\033[K" : "", label_.c_str(), bar.c_str(),
               static_cast<long>(done * 100 / total), Grouped(done).c_str(), Grouped(total).c_str(),
               unit_.c_str(), unit_seconds_ > 0 ? 1 / unit_seconds_ : 0, unit_.c_str(),
               ClockText(left).c_str(), terminal_ ? "" : "\n");
  std::fflush(stderr);
  drawn_ = true;
}

}  // namespace fathom::cli
