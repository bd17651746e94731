// SPDX-License-Identifier: MIT
// Lists of method specs on the command line.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace fathom::cli {

// Splits a list of specs at its commas. Specs hold commas themselves, so an item without ':' that
// contains '=' continues the spec before it: "fathom:bits=28,k=512,dense,exact:k=128" is three
// specs. White space around items is dropped. Nothing is validated: an empty item is an empty spec,
// which MethodSpec::Parse refuses.
std::vector<std::string> SplitSpecs(std::string_view text);

// SplitSpecs of every text (an option given several times), each spec validated.
// Throws Error(kUsage) as MethodSpec::Parse and ValidateMethodSpec do.
std::vector<std::string> ParseSpecLists(const std::vector<std::string>& texts);

}  // namespace fathom::cli
