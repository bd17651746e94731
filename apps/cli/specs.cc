// SPDX-License-Identifier: MIT
#include "specs.h"

#include "fathom/method.h"

namespace fathom::cli {
namespace {

std::string_view Trim(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n";
  const auto first = text.find_first_not_of(kSpace);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kSpace) - first + 1);
}

}  // namespace

std::vector<std::string> SplitSpecs(std::string_view text) {
  constexpr auto kNone = std::string_view::npos;
  std::vector<std::string> specs;
  for (std::size_t at = 0; at != kNone;) {
    const std::size_t comma = text.find(',', at);
    const std::string_view item =
        Trim(text.substr(at, comma == kNone ? std::string_view::npos : comma - at));
    const bool continues = !specs.empty() && item.find(':') == kNone && item.find('=') != kNone;
    if (continues) {
      specs.back().append(",").append(item);
    } else {
      specs.emplace_back(item);
    }
    at = comma == kNone ? kNone : comma + 1;
  }
  return specs;
}

std::vector<std::string> ParseSpecLists(const std::vector<std::string>& texts) {
  std::vector<std::string> specs;
  for (const std::string& text : texts) {
    for (std::string& spec : SplitSpecs(text)) {
      ValidateMethodSpec(MethodSpec::Parse(spec));
      specs.push_back(std::move(spec));
    }
  }
  return specs;
}

}  // namespace fathom::cli
