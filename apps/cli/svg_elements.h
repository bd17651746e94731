// SPDX-License-Identifier: MIT
// What pictures are written of: SVG elements as text, one a line, and the document around them.
#pragma once

#include <string>

namespace fathom::cli::svg {

inline constexpr const char* kInk = "#222222";
inline constexpr const char* kSoftInk = "#5f5f5f";
inline constexpr const char* kGrid = "#e4e4e4";

// On a scale from 0: positive and finite.
bool Drawable(double value);

// At two decimals.
std::string Number(double value);

// An element's attribute, with the space before it.
std::string Attr(const char* name, const std::string& value);
std::string Attr(const char* name, double value);

// more: further attributes.
std::string Line(double x0, double y0, double x1, double y1, const std::string& colour,
                 double width, const std::string& more = "");
// anchor: start, middle or end. The text is escaped.
std::string Text(double x, double y, const std::string& text, const char* anchor, double size,
                 const std::string& colour, const std::string& more = "");

// A complete document with a white background. Pixels.
std::string Document(const std::string& title, double width, double height,
                     const std::string& elements);

}  // namespace fathom::cli::svg

namespace fathom::cli {

// Text for an XML document: & < > " ' escaped, control characters and what is not UTF-8 replaced by
// U+FFFD.
std::string XmlEscape(const std::string& text);

}  // namespace fathom::cli
