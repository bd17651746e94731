// SPDX-License-Identifier: MIT
#include "svg_elements.h"

#include <cmath>
#include <cstddef>

#include "common.h"
#include "table.h"

namespace fathom::cli {
namespace {

const std::string kReplacement = "\xEF\xBF\xBD";  // U+FFFD

// Bytes of the character beyond ASCII that begins at `at`, 0 where none does. Lets through a few
// code points that Unicode has not assigned, but nothing that ends outside the text.
std::size_t CharacterBytes(const std::string& text, std::size_t at) {
  const auto first = static_cast<unsigned char>(text[at]);
  const std::size_t n = first >= 0xF5   ? 0
                        : first >= 0xF0 ? 4
                        : first >= 0xE0 ? 3
                        : first >= 0xC2 ? 2
                                        : 0;
  if (n == 0 || at + n > text.size()) return 0;
  for (std::size_t i = 1; i < n; ++i) {
    if ((static_cast<unsigned char>(text[at + i]) & 0xC0) != 0x80) return 0;
  }
  return n;
}

}  // namespace

std::string XmlEscape(const std::string& text) {
  std::string escaped;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x80) {
      const std::size_t n = CharacterBytes(text, i);
      escaped += n > 0 ? text.substr(i, n) : kReplacement;
      i += n > 0 ? n - 1 : 0;
    } else if (c == '&') {
      escaped += "&amp;";
    } else if (c == '<') {
      escaped += "&lt;";
    } else if (c == '>') {
      escaped += "&gt;";
    } else if (c == '"') {
      escaped += "&quot;";
    } else if (c == '\'') {
      escaped += "&#39;";
    } else if (byte < 0x20 && c != '\t' && c != '\n') {
      escaped += kReplacement;
    } else {
      escaped += c;
    }
  }
  return escaped;
}

namespace svg {

bool Drawable(double value) { return value > 0 && std::isfinite(value); }

std::string Number(double value) { return Plain(std::round(value * 100) / 100); }

std::string Attr(const char* name, const std::string& value) {
  return std::string(" ") + name + "=\"" + value + "\"";
}
std::string Attr(const char* name, double value) { return Attr(name, Number(value)); }

std::string Line(double x0, double y0, double x1, double y1, const std::string& colour,
                 double width, const std::string& more) {
  return "<line" + Attr("x1", x0) + Attr("y1", y0) + Attr("x2", x1) + Attr("y2", y1) +
         Attr("stroke", colour) + Attr("stroke-width", width) + more + "/>\n";
}

std::string Text(double x, double y, const std::string& text, const char* anchor, double size,
                 const std::string& colour, const std::string& more) {
  return "<text" + Attr("x", x) + Attr("y", y) + Attr("text-anchor", anchor) +
         Attr("font-size", size) + Attr("fill", colour) + more + ">" + XmlEscape(text) +
         "</text>\n";
}

std::string Document(const std::string& title, double width, double height,
                     const std::string& elements) {
  return "<svg xmlns=\"http://www.w3.org/2000/svg\"" + Attr("width", width) +
         Attr("height", height) + Attr("viewBox", "0 0 " + Number(width) + " " + Number(height)) +
         Attr("role", "img") + Attr("font-family", "Helvetica, Arial, 'DejaVu Sans', sans-serif") +
         ">\n<title>" + XmlEscape(title) + "</title>\n<rect" + Attr("width", width) +
         Attr("height", height) + Attr("fill", "#ffffff") + "/>\n" + elements + "</svg>\n";
}

}  // namespace svg
}  // namespace fathom::cli
