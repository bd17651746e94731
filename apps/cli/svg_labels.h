// SPDX-License-Identifier: MIT
// Places for labels in a plot: near what they name, off everything that is drawn already. Pixels,
// y down.
#pragma once

#include <string>
#include <vector>

namespace fathom::cli {

struct PixelBox {
  double left = 0, top = 0, right = 0, bottom = 0;
};

struct PlacedLabel {
  PixelBox box;  // of the text
  // Far enough from the point for a line between them, which ends at (lead_x, lead_y).
  bool leader = false;
  double lead_x = 0, lead_y = 0;
};

// A generous estimate for common sans-serif fonts; the viewer's font is not known.
double TextWidth(const std::string& text, double font_size);

// The text, or its two ends around an ellipsis where it is wider than that.
std::string FitText(const std::string& text, double font_size, double width);

class LabelPlacer {
 public:
  explicit LabelPlacer(PixelBox bounds) : bounds_(bounds) {}

  // Nothing may cover these.
  void AddBox(const PixelBox& box) { boxes_.push_back(box); }
  // Better not covered.
  void AddLine(double x0, double y0, double x1, double y1) { lines_.push_back({x0, y0, x1, y1}); }

  // A label of that size beside, above or below the point; it joins the boxes.
  PlacedLabel BesidePoint(double x, double y, double width, double height);
  // A label on a horizontal line across the bounds, at one of its ends if possible.
  PlacedLabel OnLevel(double y, double width, double height);

 private:
  struct Segment {
    double x0, y0, x1, y1;
  };
  // What a label at this place would cover; 0 is free.
  double Cost(const PixelBox& box) const;

  PixelBox bounds_;
  std::vector<PixelBox> boxes_;
  std::vector<Segment> lines_;
};

}  // namespace fathom::cli
