// SPDX-License-Identifier: MIT
#include "svg_bars.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <iterator>

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

// Pixels.
constexpr double kMargin = 24;
constexpr double kTitleHeight = 34;
constexpr double kNameWidth = 250;
constexpr double kPlotWidth = 560;
constexpr double kNoteWidth = 190;  // behind the longest bar
constexpr double kPanelTop = 30;
constexpr double kAxisBottom = 40;
constexpr double kPanelGap = 22;
constexpr double kBarStep = 26;
constexpr double kBarHeight = 17;
constexpr double kLegendRow = 22;
constexpr double kLegendMark = 18;
constexpr double kLegendGap = 20;
constexpr double kSize = 12;
constexpr double kWidth = 2 * kMargin + kNameWidth + kPlotWidth + kNoteWidth;

// Okabe and Ito's palette with a grey for the last, which is what is left.
constexpr std::array kColours = {"#56b4e9", "#f0e442", "#0072b2", "#d55e00",
                                 "#cc79a7", "#009e73", "#e69f00", "#9a9a9a"};

double Total(const StackedBar& bar) {
  double total = 0;
  for (const double part : bar.parts) total += Drawable(part) ? part : 0;
  return total;
}

// Three significant digits: "0.123", "12.3", "1,234".
std::string Short(double value) {
  if (value >= 100) return Grouped(std::llround(value));
  return Fixed(value, value >= 10 ? 1 : value >= 1 ? 2 : 3);
}

// Where the axis ends: behind the longest bar, or the longest of those up to four times the median.
double AxisEnd(const BarPanel& panel) {
  constexpr double kFar = 4;
  std::vector<double> totals;
  for (const StackedBar& bar : panel.bars) {
    if (const double total = Total(bar); total > 0) totals.push_back(total);
  }
  if (totals.empty()) return 1;
  std::sort(totals.begin(), totals.end());
  const double limit = kFar * totals[(totals.size() - 1) / 2];
  return *std::prev(std::upper_bound(totals.begin(), totals.end(), limit));
}

// Round steps, so that there are four to ten of them.
double TickStep(double end) {
  const double power = std::pow(10, std::floor(std::log10(end)));
  for (const double step : {0.1, 0.2}) {
    if (end <= 10 * step * power) return step * power;
  }
  return (end <= 5 * power ? 0.5 : 1) * power;
}

// Grows by elements.
class Svg {
 public:
  void Text(double x, double y, const std::string& text, const char* anchor, double size,
            const char* colour, const char* weight = "400") {
    elements_ += svg::Text(x, y, text, anchor, size, colour, Attr("font-weight", weight));
  }
  void Box(double x, double y, double width, double height, const char* colour) {
    elements_ += "<rect" + Attr("x", x) + Attr("y", y) + Attr("width", width) +
                 Attr("height", height) + Attr("fill", colour) + "/>\n";
  }
  void Line(double x0, double y0, double x1, double y1, const char* colour, double width) {
    elements_ += svg::Line(x0, y0, x1, y1, colour, width);
  }
  const std::string& elements() const { return elements_; }

 private:
  std::string elements_;
};

void DrawBar(const StackedBar& bar, double scale, double top, Svg* svg) {
  const double left = kMargin + kNameWidth;
  const double right = left + kPlotWidth;
  const double base = top + kBarHeight - 4;
  svg->Text(left - 8, base, FitText(bar.name, kSize, kNameWidth - 12), "end", kSize, kInk);
  double x = left;
  for (std::size_t i = 0; i < bar.parts.size() && x < right; ++i) {
    if (!Drawable(bar.parts[i])) continue;
    const double end = std::min(x + bar.parts[i] * scale, right);
    svg->Box(x, top, end - x, kBarHeight, kColours.at(i % kColours.size()));
    x = end;
  }
  const double total = Total(bar);
  if (total * scale > kPlotWidth * 1.0001) {  // cut: two white slits and an arrow
    for (const double at : {right - 14, right - 8}) {
      svg->Line(at - 3, top + kBarHeight + 1, at + 3, top - 1, "#ffffff", 2.5);
    }
    x = right;
  }
  std::string text = total > 0 ? Short(total) : "";
  if (total * scale > kPlotWidth * 1.0001) text = "\xE2\x86\x92 " + text;
  if (!bar.note.empty()) text += (text.empty() ? "" : ", ") + bar.note;
  const double room = kMargin + kNameWidth + kPlotWidth + kNoteWidth - x;
  svg->Text(x + 6, base, FitText(text, kSize, room), "start", kSize, total > 0 ? kInk : kSoftInk);
}

// Returns the y below the panel.
double DrawPanel(const BarPanel& panel, const std::string& x_label, double top, Svg* svg) {
  const double left = kMargin + kNameWidth;
  const double end = AxisEnd(panel);
  const double scale = kPlotWidth / end;
  svg->Text(kMargin, top + 14, FitText(panel.title, 14, kWidth - 2 * kMargin), "start", 14, kInk,
            "600");
  const double first = top + kPanelTop;
  const double bottom = first + kBarStep * static_cast<double>(panel.bars.size());
  const double step = TickStep(end);
  for (int i = 0; i * step <= end * 1.0001; ++i) {
    const double x = left + i * step * scale;
    svg->Line(x, first - 4, x, bottom, kGrid, 1);
    svg->Text(x, bottom + 16, Plain(i * step), "middle", kSize, kInk);
  }
  for (std::size_t i = 0; i < panel.bars.size(); ++i) {
    DrawBar(panel.bars[i], scale, first + kBarStep * static_cast<double>(i), svg);
  }
  svg->Line(left, first - 4, left, bottom, kSoftInk, 1);
  svg->Text(left + kPlotWidth / 2, bottom + 33, x_label, "middle", kSize, kSoftInk);
  return bottom + kAxisBottom + kPanelGap;
}

// Returns the y below the legend.
double DrawLegend(const std::vector<std::string>& parts, double top, Svg* svg) {
  double x = kMargin;
  double y = top;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const double width = kLegendMark + TextWidth(parts[i], kSize) + kLegendGap;
    if (x > kMargin && x + width > kWidth - kMargin) {
      x = kMargin;
      y += kLegendRow;
    }
    svg->Box(x, y, 12, 12, kColours.at(i % kColours.size()));
    svg->Text(x + kLegendMark, y + 10, parts[i], "start", kSize, kInk);
    x += width;
  }
  return y + kLegendRow + 8;
}

}  // namespace

std::string RenderBars(const BarFigure& figure) {
  Svg svg;
  svg.Text(kMargin, kMargin + 12, FitText(figure.title, 17, kWidth - 2 * kMargin), "start", 17,
           kInk, "700");
  double y = DrawLegend(figure.parts, kMargin + kTitleHeight, &svg);
  for (const BarPanel& panel : figure.panels) y = DrawPanel(panel, figure.x_label, y, &svg);
  return svg::Document(figure.title, kWidth, y, svg.elements());
}

}  // namespace fathom::cli
