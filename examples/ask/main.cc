// SPDX-License-Identifier: MIT
// ask MODEL DOCUMENT QUESTION: answers one question about a text file. The least a program needs.
#include <cstdint>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <string_view>

#include "fathom/fathom.h"

namespace {

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (!(text << file.rdbuf()))
    throw fathom::Error(fathom::ErrorCode::kIo, "cannot read '" + path + "', or it is empty");
  return text.str();
}

void Ask(const std::string& model_path, const std::string& document_path,
         const std::string& question) {
  const auto model = fathom::Model::Open(model_path);
  // The document first, then the question, as the model's chat template has it.
  const fathom::ChatMessage message{"user", ReadFile(document_path) + "\n\n" + question};
  const auto prompt = model->ChatTokens({&message, 1});

  const fathom::GenerateOptions generate{.max_tokens = 256, .sampling = {}};
  fathom::SessionOptions options;
  options.ctx_size = static_cast<std::int64_t>(prompt.size()) + generate.max_tokens;
  options.method = "fathom:bits=28,k=512";
  fathom::Session session(model, options);
  session.Prefill(prompt, [](std::int64_t done, std::int64_t total) {
    std::cerr << "\rread " << done << " of " << total << " tokens" << std::flush;
    return true;  // false would stop, as below
  });
  std::cerr << '\n';
  session.BuildIndex();
  fathom::Generate(session, generate, [](fathom::Token, std::string_view text) {
    std::cout << text << std::flush;
    return true;
  });
  std::cout << '\n';
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "Usage: ask MODEL.gguf DOCUMENT.txt QUESTION\n";
    return 2;
  }
  try {
    Ask(argv[1], argv[2], argv[3]);
  } catch (const fathom::Error& error) {
    std::cerr << "ask: " << error.what() << '\n';  // one line, written for people
    return 1;
  }
  return 0;
}
