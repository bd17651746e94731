// SPDX-License-Identifier: MIT
#include "svg_labels.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string_view>

namespace fathom::cli {
namespace {

constexpr double kOutsideCost = 1e6;
constexpr double kCoverCost = 1e4;
constexpr double kCrossCost = 60;
constexpr double kGap = 8;            // between a point and its label
constexpr double kLevelGap = 3;       // between a line and its label
constexpr int kShifts = 9;            // tried up and down
constexpr double kLeaderShift = 1.1;  // label heights from which a line leads to the point

bool IsContinuation(char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; }

double Overlap(const PixelBox& a, const PixelBox& b) {
  const double width = std::min(a.right, b.right) - std::max(a.left, b.left);
  const double height = std::min(a.bottom, b.bottom) - std::max(a.top, b.top);
  return width > 0 && height > 0 ? width * height : 0;
}

// Liang-Barsky: does any part of the segment lie in the box?
bool Crosses(double x0, double y0, double x1, double y1, const PixelBox& box) {
  double from = 0;
  double to = 1;
  const double step[] = {x0 - x1, x1 - x0, y0 - y1, y1 - y0};
  const double room[] = {x0 - box.left, box.right - x0, y0 - box.top, box.bottom - y0};
  for (int side = 0; side < 4; ++side) {
    if (step[side] == 0) {
      if (room[side] < 0) return false;
      continue;
    }
    const double at = room[side] / step[side];
    if (step[side] < 0) from = std::max(from, at);
    if (step[side] > 0) to = std::min(to, at);
  }
  return from <= to;
}

}  // namespace

double TextWidth(const std::string& text, double font_size) {
  constexpr std::string_view kNarrow = "ijlt.,:;'|!()[] ";
  constexpr std::string_view kWide = "mwMWGOQ%@";
  double ems = 0;
  for (const char c : text) {
    if (IsContinuation(c)) continue;
    const bool narrow = kNarrow.find(c) != std::string_view::npos;
    const bool wide = kWide.find(c) != std::string_view::npos;
    ems += narrow ? 0.36 : wide ? 0.92 : 0.62;
  }
  return ems * font_size;
}

std::string FitText(const std::string& text, double font_size, double width) {
  const std::string ellipsis = "\xE2\x80\xA6";
  if (TextWidth(text, font_size) <= width) return text;
  std::size_t head = text.size() / 2;
  std::size_t tail = head;
  std::string fitted = text;
  while (head > 0 && TextWidth(fitted, font_size) > width) {
    --head;
    tail = std::min(tail + 1, text.size());
    while (head > 0 && IsContinuation(text[head])) --head;
    while (tail < text.size() && IsContinuation(text[tail])) ++tail;
    fitted = text.substr(0, head) + ellipsis + text.substr(tail);
  }
  return fitted;
}

double LabelPlacer::Cost(const PixelBox& box) const {
  double cost = 0;
  const bool outside = box.left < bounds_.left || box.right > bounds_.right ||
                       box.top < bounds_.top || box.bottom > bounds_.bottom;
  if (outside) cost += kOutsideCost;
  for (const PixelBox& other : boxes_) {
    const double covered = Overlap(box, other);
    if (covered > 0) cost += kCoverCost + covered;
  }
  for (const Segment& line : lines_) {
    if (Crosses(line.x0, line.y0, line.x1, line.y1, box)) cost += kCrossCost;
  }
  return cost;
}

PlacedLabel LabelPlacer::BesidePoint(double x, double y, double width, double height) {
  PlacedLabel best;
  double best_cost = std::numeric_limits<double>::infinity();
  for (int shift = 0; shift <= 2 * kShifts; ++shift) {
    // 0, up, down, further up, further down, ...
    const int n_steps = (shift + 1) / 2;
    const double steps = shift % 2 == 1 ? -n_steps : n_steps;
    for (const double side : {1., -1., 0.}) {
      if (side == 0 && shift == 0) continue;  // on the point itself
      const double dy = side == 0 ? steps * (height + 1) : steps * height * 0.75;
      const double left = side > 0 ? x + kGap : side < 0 ? x - kGap - width : x - width / 2;
      const PixelBox box = {left, y + dy - height / 2, left + width, y + dy + height / 2};
      const double cost = Cost(box) + std::abs(dy) + (side < 0 ? 3 : side == 0 ? 5 : 0);
      if (cost >= best_cost) continue;
      best_cost = cost;
      best.box = box;
      best.leader = std::abs(dy) > kLeaderShift * height + (side == 0 ? 1 : 0);
      best.lead_x = std::clamp(x, box.left, box.right);
      best.lead_y = std::clamp(y, box.top, box.bottom);
    }
  }
  boxes_.push_back(best.box);
  return best;
}

PlacedLabel LabelPlacer::OnLevel(double y, double width, double height) {
  PlacedLabel best;
  double best_cost = std::numeric_limits<double>::infinity();
  constexpr int kPlaces = 24;
  const double room = std::max(bounds_.right - bounds_.left - width - 2 * kLevelGap, 0.);
  for (int place = 0; place <= kPlaces; ++place) {
    const double left = bounds_.right - width - kLevelGap - room * place / kPlaces;
    for (const bool above : {true, false}) {
      const double top = above ? y - kLevelGap - height : y + kLevelGap;
      const PixelBox box = {left, top, left + width, top + height};
      const double cost = Cost(box) + place + (above ? 0 : 4);
      if (cost >= best_cost) continue;
      best_cost = cost;
      best.box = box;
    }
  }
  boxes_.push_back(best.box);
  return best;
}

}  // namespace fathom::cli
