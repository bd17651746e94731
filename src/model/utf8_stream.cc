// SPDX-License-Identifier: MIT
#include <algorithm>
#include <cstdint>

#include "fathom/model.h"

namespace fathom {
namespace {

// Bytes of the character that this lead byte begins, or 0 when it begins none.
std::size_t SequenceLength(std::uint8_t lead) {
  if (lead >= 0xC2 && lead <= 0xDF) return 2;
  if (lead >= 0xE0 && lead <= 0xEF) return 3;
  if (lead >= 0xF0 && lead <= 0xF4) return 4;
  return 0;
}

// Whether a second byte may follow the lead byte: no overlong forms, surrogates, or > U+10FFFF.
bool IsSecondByte(std::uint8_t lead, std::uint8_t second) {
  std::uint8_t low = 0x80;
  std::uint8_t high = 0xBF;
  if (lead == 0xE0) low = 0xA0;
  if (lead == 0xED) high = 0x9F;
  if (lead == 0xF0) low = 0x90;
  if (lead == 0xF4) high = 0x8F;
  return second >= low && second <= high;
}

// Bytes at the end of the text that more bytes could complete to a character: 0 to 3.
std::size_t IncompleteTail(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<std::uint8_t>(text[i]); };
  for (std::size_t tail = 1; tail <= std::min<std::size_t>(3, text.size()); ++tail) {
    const std::size_t lead = text.size() - tail;
    if ((byte(lead) & 0xC0) == 0x80) continue;  // a continuation byte: its lead is further left
    const bool fits = tail < SequenceLength(byte(lead)) &&
                      (tail == 1 || IsSecondByte(byte(lead), byte(lead + 1)));
    return fits ? tail : 0;
  }
  return 0;
}

}  // namespace

std::string Utf8Stream::Push(std::string_view bytes) {
  std::string text = std::move(pending_);
  text += bytes;
  const std::size_t whole = text.size() - IncompleteTail(text);
  pending_ = text.substr(whole);
  text.resize(whole);
  return text;
}

std::string Utf8Stream::Flush() {
  std::string text = std::move(pending_);
  pending_.clear();
  return text;
}

}  // namespace fathom
