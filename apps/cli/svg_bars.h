// SPDX-License-Identifier: MIT
// Stacked bars as SVG text, without dependencies: panels below each other, a linear axis each, one
// legend.
#pragma once

#include <string>
#include <vector>

namespace fathom::cli {

struct StackedBar {
  std::string name;
  std::vector<double> parts;  // in the order of the figure's; what is not positive is not drawn
  std::string note;  // behind the bar, after its sum, or all there is of a bar without parts
};

struct BarPanel {
  std::string title;
  std::vector<StackedBar> bars;
};

struct BarFigure {
  std::string title;
  std::string x_label;
  std::vector<std::string> parts;  // names for the legend
  std::vector<BarPanel> panels;
};

// A complete document with a white background. Bars several times longer than most of their panel
// would squeeze the others: they are cut at the edge, and marked. Texts may hold any UTF-8.
std::string RenderBars(const BarFigure& figure);

}  // namespace fathom::cli
