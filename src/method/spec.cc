// SPDX-License-Identifier: MIT
#include <algorithm>
#include <charconv>
#include <cmath>
#include <sstream>

#include "fathom/error.h"
#include "method/options.h"

namespace fathom {
namespace {

// The shortest text that reads back as the same number: "28", "28.5".
std::string NumberText(double value) {
  char buffer[32];
  const auto end = std::to_chars(buffer, buffer + sizeof(buffer), value).ptr;
  return {buffer, end};
}

template <typename Number>
bool ParseWhole(std::string_view text, Number* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size();
}

}  // namespace

MethodSpec MethodSpec::Parse(std::string_view text) {
  const auto fail = [&](const std::string& why) -> Error {
    return {ErrorCode::kUsage,
            "method spec '" + std::string(text) + "': " + why + "; write name:key=value,key=value"};
  };
  MethodSpec spec;
  const auto colon = text.find(':');
  spec.name = std::string(text.substr(0, colon));
  if (spec.name.empty()) throw fail("the name is missing");
  if (spec.name.find(',') != std::string::npos) throw fail("several specs are separated by spaces");
  if (colon == std::string_view::npos) return spec;
  std::string_view rest = text.substr(colon + 1);
  while (!rest.empty()) {
    const auto comma = rest.find(',');
    const std::string_view item = rest.substr(0, comma);
    rest = comma == std::string_view::npos ? std::string_view() : rest.substr(comma + 1);
    const auto equals = item.find('=');
    if (equals == std::string_view::npos || equals == 0 || equals + 1 == item.size()) {
      throw fail("'" + std::string(item) + "' is not key=value");
    }
    const bool added =
        spec.options
            .emplace(std::string(item.substr(0, equals)), std::string(item.substr(equals + 1)))
            .second;
    if (!added) throw fail("'" + std::string(item.substr(0, equals)) + "' is given twice");
  }
  return spec;
}

std::string MethodSpec::ToString() const {
  std::string text = name;
  char separator = ':';
  for (const auto& [key, value] : options) {
    text += separator + key + "=" + value;
    separator = ',';
  }
  return text;
}

const std::string* OptionReader::Find(std::string_view key) const {
  const auto found = spec_.options.find(std::string(key));
  return found == spec_.options.end() ? nullptr : &found->second;
}

bool OptionReader::Has(std::string_view key) const { return Find(key) != nullptr; }

void OptionReader::Fail(std::string_view key, std::string_view value,
                        std::string_view range) const {
  throw Error(ErrorCode::kUsage, "method " + spec_.name + ": " + std::string(key) + "=" +
                                     std::string(value) + " is not valid; it must be " +
                                     std::string(range));
}

std::int64_t OptionReader::Int(std::string_view key, std::int64_t fallback, std::int64_t low,
                               std::int64_t high) {
  const std::string range = std::to_string(low) + ".." + std::to_string(high);
  std::int64_t value = fallback;
  if (const std::string* text = Find(key)) {
    if (!ParseWhole(std::string_view(*text), &value) || value < low || value > high) {
      Fail(key, *text, "a whole number in " + range);
    }
  }
  read_.push_back({std::string(key), std::to_string(value), range});
  return value;
}

double OptionReader::Real(std::string_view key, double fallback, double low, double high) {
  const std::string range = NumberText(low) + ".." + NumberText(high);
  double value = fallback;
  if (const std::string* text = Find(key)) {
    // The comparison is false for NaN.
    if (!ParseWhole(std::string_view(*text), &value) || !(value >= low && value <= high)) {
      Fail(key, *text, "a number in " + range);
    }
  }
  read_.push_back({std::string(key), NumberText(value), range});
  return value;
}

std::string OptionReader::Choice(std::string_view key, std::string_view fallback,
                                 std::initializer_list<std::string_view> choices) {
  std::string range;
  for (const auto choice : choices) range += (range.empty() ? "" : "|") + std::string(choice);
  std::string value(fallback);
  if (const std::string* text = Find(key)) {
    if (std::find(choices.begin(), choices.end(), *text) == choices.end())
      Fail(key, *text, "one of " + range);
    value = *text;
  }
  read_.push_back({std::string(key), value, range});
  return value;
}

void OptionReader::Finish() const {
  for (const auto& [key, value] : spec_.options) {
    const auto same_key = [&key = key](const Read& read) { return read.key == key; };
    if (std::any_of(read_.begin(), read_.end(), same_key)) continue;
    std::string valid;
    for (const Read& read : read_) valid += (valid.empty() ? "" : ", ") + read.key;
    throw Error(ErrorCode::kUsage,
                "method " + spec_.name + " has no option '" + key + "'" +
                    (valid.empty() ? "; it takes none" : "; valid here: " + valid));
  }
}

std::string OptionReader::Canonical() const {
  std::string text = spec_.name;
  char separator = ':';
  for (const Read& read : read_) {
    text += separator + read.key + "=" + read.value;
    separator = ',';
  }
  return text;
}

std::string OptionReader::Help() const {
  std::string text;
  for (const Read& read : read_) {
    text += (text.empty() ? "" : ", ") + read.key + "=" + read.value + " (" + read.range + ")";
  }
  return text;
}

}  // namespace fathom
