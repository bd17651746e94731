// SPDX-License-Identifier: MIT
#include "svg_plot.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>
#include <optional>
#include <string_view>

#include "common.h"
#include "svg_elements.h"
#include "svg_labels.h"
#include "table.h"

namespace fathom::cli {
namespace {

using svg::Attr;
using svg::Drawable;
using svg::kGrid;
using svg::kInk;
using svg::kSoftInk;
using svg::Line;
using svg::Number;
using svg::Text;

// Pixels.
constexpr double kMargin = 24;
constexpr double kPlotWidth = 470;
constexpr double kPlotHeight = 310;
constexpr double kAxisLeft = 62;    // room for the y axis' numbers
constexpr double kAxisBottom = 52;  // for the x axis' numbers and name
constexpr double kPanelTop = 50;    // for title and subtitle
constexpr double kPanelGap = 20;
constexpr double kTitleHeight = 34;
constexpr double kLegendRow = 24;
constexpr double kMarker = 4.2;
constexpr double kLabelSize = 12;
constexpr double kLabelHeight = kLabelSize + 2;
constexpr double kTickSize = 12;
constexpr double kPanelTitleSize = 14;

constexpr const char* kPointColour = "#4d4d4d";
// Okabe and Ito's palette, which colour-blind readers can tell apart; yellow is too light here.
constexpr std::array kColours = {"#0072b2", "#d55e00", "#009e73", "#cc79a7",
                                 "#e69f00", "#56b4e9", "#000000"};
constexpr std::array kDashes = {"7 4", "2 3", "10 3 2 3"};

// Marker number `shape` around a point: circle, square, triangle, diamond, triangle on its tip.
std::string Marker(std::size_t shape, double x, double y, const std::string& colour) {
  const std::string paint =
      Attr("fill", colour) + Attr("stroke", "#ffffff") + Attr("stroke-width", 1) + "/>\n";
  const double r = kMarker;
  const auto at = [&](double dx, double dy) {
    return Number(x + dx * r) + "," + Number(y + dy * r) + " ";
  };
  switch (shape % 5) {
    case 0:
      return "<circle" + Attr("cx", x) + Attr("cy", y) + Attr("r", r) + paint;
    case 1:
      return "<rect" + Attr("x", x - r * .9) + Attr("y", y - r * .9) + Attr("width", r * 1.8) +
             Attr("height", r * 1.8) + paint;
    case 2:
      return "<polygon" + Attr("points", at(0, -1.3) + at(1.2, .9) + at(-1.2, .9)) + paint;
    case 3:
      return "<polygon" + Attr("points", at(0, -1.35) + at(1.35, 0) + at(0, 1.35) + at(-1.35, 0)) +
             paint;
    default:
      return "<polygon" + Attr("points", at(0, 1.3) + at(1.2, -.9) + at(-1.2, -.9)) + paint;
  }
}

struct LogAxis {
  double low = 0, high = 0;    // log10 of the values at the ends
  double first = 0, last = 0;  // their pixels

  double Pixel(double value) const {
    return first + (std::log10(value) - low) / (high - low) * (last - first);
  }
};

bool Drawable(const PlotSeries& series, const PlotPoint& point) {
  return Drawable(point.y) && (series.kind == PlotKind::kLevel || Drawable(point.x));
}

// Range of values in log10.
struct Range {
  double low = std::numeric_limits<double>::infinity();
  double high = -std::numeric_limits<double>::infinity();

  void Add(double value) {
    low = std::min(low, std::log10(value));
    high = std::max(high, std::log10(value));
  }
  // Room around the values, a part of their span but at least `least` in log10 altogether; 1..10
  // without values.
  Range Padded(double part, double least) const {
    if (low > high) return {0, 1};
    const double pad = std::max((high - low) * part, (least - (high - low)) / 2);
    return {low - pad, high + pad};
  }
};

// Round numbers within an axis, four or more of them where its span allows.
std::vector<double> Ticks(const LogAxis& axis, bool powers_of_two) {
  using Steps = std::vector<double>;
  std::vector<double> ticks;
  const auto fill = [&](double base, const Steps& steps) {
    ticks.clear();
    const double log_base = std::log10(base);
    const int end = static_cast<int>(std::ceil(axis.high / log_base));
    for (int power = static_cast<int>(std::floor(axis.low / log_base)); power <= end; ++power) {
      for (const double step : steps) {
        const double tick = step * std::pow(base, power);
        const double at = std::log10(tick);
        if (at >= axis.low && at <= axis.high) ticks.push_back(tick);
      }
    }
  };
  constexpr std::size_t kEnough = 4;
  if (powers_of_two) fill(2, {1});
  if (ticks.size() >= kEnough) return ticks;
  for (const Steps& steps : {Steps{1}, Steps{1, 3}, Steps{1, 2, 5}, Steps{1, 1.5, 2, 3, 4, 5, 7},
                             Steps{1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9}}) {
    fill(10, steps);
    if (ticks.size() >= kEnough) return ticks;
  }
  return ticks;
}

// Names of curves over all panels, in the order of their colours.
std::vector<std::string> CurveNames(const PlotFigure& figure) {
  std::vector<std::string> names;
  for (const auto& row : figure.rows) {
    for (const PlotPanel& panel : row) {
      for (const PlotSeries& series : panel.series) {
        if (series.kind == PlotKind::kCurve &&
            std::find(names.begin(), names.end(), series.name) == names.end()) {
          names.push_back(series.name);
        }
      }
    }
  }
  return names;
}

Range XRange(const PlotFigure& figure) {
  Range range;
  for (const auto& row : figure.rows) {
    for (const PlotPanel& panel : row) {
      for (const PlotSeries& series : panel.series) {
        if (series.kind == PlotKind::kLevel) continue;
        for (const PlotPoint& point : series.points)
          if (Drawable(series, point)) range.Add(point.x);
      }
    }
  }
  return range.Padded(0.07, 0.6);
}

// Values of y. Levels far from everything else are left out: they would squeeze it.
Range YRange(const PlotPanel& panel) {
  Range range;
  Range levels;
  for (const PlotSeries& series : panel.series) {
    for (const PlotPoint& point : series.points) {
      if (!Drawable(series, point)) continue;
      if (series.kind == PlotKind::kLevel) {
        levels.Add(point.y);
        continue;
      }
      range.Add(point.y);
      if (!Drawable(point.y_error)) continue;
      range.Add(point.y + point.y_error);
      range.Add(std::max(point.y - point.y_error, point.y / 2));  // a longer bar is cut
    }
  }
  if (range.low > range.high) return levels;
  constexpr double kFar = 0.25;  // log10
  const Range near = range.Padded(0, range.high - range.low + 2 * kFar);
  for (const PlotSeries& series : panel.series) {
    if (series.kind != PlotKind::kLevel || series.points.empty()) continue;
    const PlotPoint& level = series.points.front();
    if (!Drawable(series, level)) continue;
    const double at = std::log10(level.y);
    if (at >= near.low && at <= near.high) range.Add(level.y);
  }
  return range;
}

// Draws one panel whose plot area has its top left corner at (left, top).
class PanelDrawer {
 public:
  PanelDrawer(const PlotPanel& panel, const std::vector<std::string>& curves, const Range& x_range,
              double left, double top)
      : panel_(panel),
        curves_(curves),
        left_(left),
        top_(top),
        right_(left + kPlotWidth),
        bottom_(top + kPlotHeight),
        placer_({left + 2, top + 2, right_ - 2, bottom_ - 2}) {
    const Range y_range = YRange(panel).Padded(0.08, 0.3);
    x_ = {x_range.low, x_range.high, left_, right_};
    y_ = {y_range.low, y_range.high, bottom_, top_};
  }

  std::string Draw() {
    DrawFrame();
    for (const PlotSeries& series : panel_.series) DrawLines(series);
    for (const PlotSeries& series : panel_.series) DrawMarkers(series);
    for (const PlotKind kind : {PlotKind::kLevel, PlotKind::kPoint}) {
      for (const PlotSeries& series : panel_.series)
        if (series.kind == kind) DrawLabels(series);
    }
    return svg_;
  }

 private:
  void DrawFrame() {
    svg_ += Text(left_, top_ - 28, FitText(panel_.title, kPanelTitleSize, kPlotWidth), "start",
                 kPanelTitleSize, kInk, Attr("font-weight", "600"));
    svg_ += Text(left_, top_ - 11, FitText(panel_.subtitle, kLabelSize, kPlotWidth), "start",
                 kLabelSize, kSoftInk);
    for (const double tick : Ticks(y_, false)) {
      const double y = y_.Pixel(tick);
      svg_ += Line(left_, y, right_, y, kGrid, 1);
      svg_ += Text(left_ - 8, y + 4, Plain(tick), "end", kTickSize, kInk);
    }
    for (const double tick : Ticks(x_, true)) {
      const double x = x_.Pixel(tick);
      svg_ += Line(x, top_, x, bottom_, kGrid, 1);
      svg_ += Line(x, bottom_, x, bottom_ + 4, kSoftInk, 1);
      svg_ += Text(x, bottom_ + 18, Plain(tick), "middle", kTickSize, kInk);
    }
    svg_ += Line(left_, top_, left_, bottom_, kSoftInk, 1);
    svg_ += Line(left_, bottom_, right_, bottom_, kSoftInk, 1);
  }

  std::size_t Style(const PlotSeries& series) const {
    const auto at = std::find(curves_.begin(), curves_.end(), series.name);
    return static_cast<std::size_t>(at - curves_.begin());
  }
  std::string Colour(const PlotSeries& series) const {
    if (series.kind != PlotKind::kCurve) return kPointColour;
    return kColours.at(Style(series) % kColours.size());
  }

  void DrawLines(const PlotSeries& series) {
    if (series.kind == PlotKind::kLevel) {
      if (series.points.empty() || !Drawable(series, series.points.front())) return;
      const double y = y_.Pixel(series.points.front().y);
      if (y < top_ || y > bottom_) return;  // DrawLabels says so
      svg_ += Line(left_, y, right_, y, kPointColour, 1.4,
                   Attr("stroke-dasharray", kDashes.at(n_levels_++ % kDashes.size())));
      placer_.AddLine(left_, y, right_, y);
    }
    if (series.kind != PlotKind::kCurve) return;
    const PlotPoint* before = nullptr;
    for (const PlotPoint& point : series.points) {
      if (!Drawable(series, point)) continue;
      if (before != nullptr) {
        const double x0 = x_.Pixel(before->x);
        const double y0 = y_.Pixel(before->y);
        const double x1 = x_.Pixel(point.x);
        const double y1 = y_.Pixel(point.y);
        svg_ += Line(x0, y0, x1, y1, Colour(series), 2.2, Attr("stroke-linecap", "round"));
        placer_.AddLine(x0, y0, x1, y1);
      }
      before = &point;
    }
  }

  void DrawMarkers(const PlotSeries& series) {
    if (series.kind == PlotKind::kLevel) return;
    const std::size_t shape = series.kind == PlotKind::kCurve ? Style(series) : 0;
    for (const PlotPoint& point : series.points) {
      if (!Drawable(series, point)) continue;
      const double x = x_.Pixel(point.x);
      const double y = y_.Pixel(point.y);
      if (Drawable(point.y_error)) {
        const double high = std::max(y_.Pixel(point.y + point.y_error), top_);
        const double low = point.y > point.y_error
                               ? std::min(y_.Pixel(point.y - point.y_error), bottom_)
                               : bottom_;
        svg_ += Line(x, low, x, high, Colour(series), 1.3, Attr("stroke-opacity", 0.7));
      }
      svg_ += Marker(shape, x, y, Colour(series));
      placer_.AddBox({x - kMarker - 1, y - kMarker - 1, x + kMarker + 1, y + kMarker + 1});
    }
  }

  void DrawLabels(const PlotSeries& series) {
    const std::string name = FitText(series.name, kLabelSize, kPlotWidth * 0.6);
    for (const PlotPoint& point : series.points) {
      if (!Drawable(series, point)) continue;
      const double y = y_.Pixel(point.y);
      if (series.kind == PlotKind::kLevel) return DrawLevelLabel(name, y, point.y);
      const double x = x_.Pixel(point.x);
      const PlacedLabel label =
          placer_.BesidePoint(x, y, TextWidth(name, kLabelSize), kLabelHeight);
      if (label.leader) {
        svg_ += Line(x, y, label.lead_x, label.lead_y, "#9a9a9a", 0.8);
        placer_.AddLine(x, y, label.lead_x, label.lead_y);
      }
      // The text's true width is not known: it keeps to the side of its point.
      if (label.box.left >= x) {
        DrawLabel(label.box.left, label.box.bottom, name, "start");
      } else if (label.box.right <= x) {
        DrawLabel(label.box.right, label.box.bottom, name, "end");
      } else {
        DrawLabel((label.box.left + label.box.right) / 2, label.box.bottom, name, "middle");
      }
    }
  }

  // A level beyond the plot is named at its edge, with its value and an arrow.
  void DrawLevelLabel(std::string name, double y, double value) {
    if (y < top_ || y > bottom_) {
      std::array<char, 32> text{};
      std::snprintf(text.data(), text.size(), "%.3g", value);
      name += std::string(": ") + text.data() + (y < top_ ? " \xE2\x86\x91" : " \xE2\x86\x93");
      y = std::clamp(y, top_, bottom_);
    }
    const PlacedLabel label = placer_.OnLevel(y, TextWidth(name, kLabelSize), kLabelHeight);
    DrawLabel(label.box.right, label.box.bottom, name, "end");
  }

  // A white rim keeps the text readable on lines. It is a text of its own below the other: not
  // every viewer knows paint-order.
  void DrawLabel(double x, double bottom, const std::string& name, const char* anchor) {
    svg_ += Text(x, bottom - 4, name, anchor, kLabelSize, "#ffffff",
                 Attr("stroke", "#ffffff") + Attr("stroke-width", 3) +
                     Attr("stroke-linejoin", "round") + Attr("aria-hidden", "true"));
    svg_ += Text(x, bottom - 4, name, anchor, kLabelSize, kInk);
  }

  const PlotPanel& panel_;
  const std::vector<std::string>& curves_;
  double left_, top_, right_, bottom_;
  LogAxis x_, y_;
  LabelPlacer placer_;
  std::size_t n_levels_ = 0;
  std::string svg_;
};

constexpr double kLegendMark = 34;  // line and marker of an entry
constexpr double kLegendGap = 26;

// Rows of legend entries, as indices of curves.
std::vector<std::vector<std::size_t>> LegendRows(const std::vector<std::string>& curves,
                                                 double width) {
  std::vector<std::vector<std::size_t>> rows;
  double used = 0;
  for (std::size_t i = 0; i < curves.size(); ++i) {
    const double needed = kLegendMark + TextWidth(curves[i], kLabelSize) + kLegendGap;
    if (rows.empty() || used + needed > width) {
      rows.emplace_back();
      used = 0;
    }
    rows.back().push_back(i);
    used += needed;
  }
  return rows;
}

std::string Legend(const std::vector<std::string>& curves,
                   const std::vector<std::vector<std::size_t>>& rows, double left, double top) {
  std::string svg;
  double y = top;
  for (const auto& row : rows) {
    double x = left;
    for (const std::size_t i : row) {
      const std::string colour = kColours.at(i % kColours.size());
      svg += Line(x, y - 4, x + kLegendMark - 8, y - 4, colour, 2.2);
      svg += Marker(i, x + (kLegendMark - 8) / 2, y - 4, colour);
      svg += Text(x + kLegendMark, y, curves[i], "start", kLabelSize, kInk);
      x += kLegendMark + TextWidth(curves[i], kLabelSize) + kLegendGap;
    }
    y += kLegendRow;
  }
  return svg;
}

}  // namespace

std::string RenderSvg(const PlotFigure& figure) {
  std::size_t n_columns = 1;
  for (const auto& row : figure.rows) n_columns = std::max(n_columns, row.size());
  const double panel_width = kAxisLeft + kPlotWidth + kPanelGap;
  const double panel_height = kPanelTop + kPlotHeight + kAxisBottom;
  const double width = 2 * kMargin + static_cast<double>(n_columns) * panel_width;
  const double panels_height = static_cast<double>(figure.rows.size()) * panel_height;
  const std::vector<std::string> curves = CurveNames(figure);
  const auto legend = LegendRows(curves, width - 2 * kMargin - kAxisLeft);
  const double legend_top = kMargin + kTitleHeight + panels_height + kLegendRow;
  const double height = legend_top + static_cast<double>(legend.size()) * kLegendRow + kMargin / 2;

  std::string svg =
      Text(kMargin, kMargin + 12, figure.title, "start", 17, kInk, Attr("font-weight", "700"));
  const Range x_range = XRange(figure);
  for (std::size_t r = 0; r < figure.rows.size(); ++r) {
    const double top = kMargin + kTitleHeight + static_cast<double>(r) * panel_height + kPanelTop;
    for (std::size_t c = 0; c < figure.rows[r].size(); ++c) {
      if (figure.rows[r][c].series.empty()) continue;
      const double left = kMargin + static_cast<double>(c) * panel_width + kAxisLeft;
      svg += PanelDrawer(figure.rows[r][c], curves, x_range, left, top).Draw();
      svg += Text(left + kPlotWidth / 2, top + kPlotHeight + 38, figure.x_label, "middle",
                  kLabelSize, kSoftInk);
    }
    const std::string middle = Number(top + kPlotHeight / 2);
    svg += Text(kMargin + 4, top + kPlotHeight / 2, figure.y_label, "middle", kLabelSize, kSoftInk,
                Attr("transform", "rotate(-90 " + Number(kMargin + 4) + " " + middle + ")"));
  }
  svg += Legend(curves, legend, kMargin + kAxisLeft, legend_top);
  return svg::Document(figure.title, width, height, svg);
}

}  // namespace fathom::cli
