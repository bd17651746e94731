// SPDX-License-Identifier: MIT
// Scatter and line plots as SVG text, without dependencies: panels in a grid, logarithmic axes, one
// legend, labels that avoid each other.
#pragma once

#include <string>
#include <vector>

namespace fathom::cli {

struct PlotPoint {
  double x = 0;
  double y = 0;
  double y_error = 0;  // half length of the bar through the point; 0 draws none
};

enum class PlotKind {
  kCurve,  // line with markers, in the legend; all series of one name have one colour
  kPoint,  // markers with their name beside them
  kLevel,  // dashed horizontal line at the first point's y with its name on it
};

// Points whose x or y is not positive and finite are not drawn (x of a level is not looked at).
struct PlotSeries {
  std::string name;
  PlotKind kind = PlotKind::kCurve;
  std::vector<PlotPoint> points;  // by x
};

struct PlotPanel {
  std::string title;
  std::string subtitle;
  std::vector<PlotSeries> series;
};

struct PlotFigure {
  std::string title;
  std::string x_label;
  std::string y_label;
  std::vector<std::vector<PlotPanel>> rows;  // of panels; one without series is left blank
};

// A complete document with a white background. All panels share the x axis, each has its own y
// axis. Texts may hold any UTF-8; they are escaped, and bytes that XML forbids are replaced.
std::string RenderSvg(const PlotFigure& figure);

}  // namespace fathom::cli
