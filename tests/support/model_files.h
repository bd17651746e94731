// SPDX-License-Identifier: MIT
// The model and the texts that come with the repository.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "fathom/model.h"

namespace fathom::testing {

inline std::string ModelPath(const std::string& file) {
  return std::string(FATHOM_SOURCE_DIR "/models/") + file;
}
inline std::string BundledPath() { return ModelPath("fathom-recall-15m-q8_0.gguf"); }

// The first tokens of all texts, one behind the other.
inline std::vector<Token> NovelTokens(const Model& model, std::size_t count) {
  const std::filesystem::path folder = ModelPath("questions");
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() == ".txt") files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  std::string text;
  for (const auto& file : files) {
    std::ifstream in(file);
    text.append(std::istreambuf_iterator<char>(in), {});
  }
  std::vector<Token> tokens = model.Tokenize(text, false);
  EXPECT_GE(tokens.size(), count) << "no text in " << folder;
  tokens.resize(std::min(tokens.size(), count));
  return tokens;
}

}  // namespace fathom::testing
