// SPDX-License-Identifier: MIT
// The demo documents answered as expected by dense, exact and both Fathom reads. A document is
// prefilled once for all its questions and methods: the 32k one takes minutes, so it has a label of
// its own.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "fathom/fathom.h"

namespace fathom {
namespace {

const std::string kFolder = std::string(FATHOM_SOURCE_DIR) + "/models/";

std::string ReadAll(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::vector<Token> Prompt(const Model& model, const std::string& document,
                          const std::string& question) {
  const ChatMessage message{
      "user", document.substr(0, document.find_last_not_of(" \n\r\t") + 1) + "\n\n" + question};
  return model.ChatTokens({&message, 1});
}

void AnswerDocument(const std::string& name) {
  const auto model = Model::Open(kFolder + "fathom-recall-15m-q8_0.gguf");
  const auto documents = nlohmann::json::parse(ReadAll(kFolder + "questions/questions.json"));
  for (const auto& entry : documents) {
    if (entry["document"] != name) continue;
    const std::string document = ReadAll(kFolder + "questions/" + name);
    std::vector<std::vector<Token>> prompts;
    for (const auto& question : entry["questions"])
      prompts.push_back(Prompt(*model, document, question["question"]));
    std::size_t shared = prompts.front().size() - 1;
    for (const auto& prompt : prompts) {
      const auto end =
          prompt.begin() + static_cast<std::ptrdiff_t>(std::min(shared, prompt.size() - 1));
      shared = static_cast<std::size_t>(
          std::mismatch(prompt.begin(), end, prompts.front().begin()).first - prompt.begin());
    }
    EXPECT_GE(shared, entry["tokens"].get<std::size_t>() - 8);

    SessionOptions options;
    options.ctx_size = static_cast<std::int64_t>(shared) + 512;
    Session session(model, options);
    session.Prefill(std::span(prompts.front()).first(shared));
    for (const char* spec :
         {"dense", "exact", "fathom:bits=28,k=512", "fathom:preset=paper,budget=48,k=512"}) {
      session.Truncate(static_cast<std::int64_t>(shared));
      session.SetMethod(spec);
      session.BuildIndex();
      session.method().ResetCounters();
      for (std::size_t i = 0; i < prompts.size(); ++i) {
        session.Truncate(static_cast<std::int64_t>(shared));
        session.Prefill(std::span(prompts[i]).subspan(shared));
        const Generation answer = Generate(session, {128, {}});
        for (const std::string expected : entry["questions"][i]["expected"]) {
          EXPECT_NE(answer.text.find(expected), std::string::npos)
              << spec << ": " << entry["questions"][i]["question"] << " -> " << answer.text;
        }
      }
      const MethodCounters& counters = session.method().counters();
      EXPECT_EQ(counters.sparse_calls, std::string(spec) == "dense" ? 0 : counters.calls) << spec;
    }
    return;
  }
  FAIL() << name << " is not in questions.json";
}

TEST(Demo, Document4k) { AnswerDocument("single-needle-4k.txt"); }
TEST(Demo, Document16k) { AnswerDocument("multi-query-16k.txt"); }
TEST(DemoLong, Document32k) { AnswerDocument("variable-tracking-32k.txt"); }

}  // namespace
}  // namespace fathom
