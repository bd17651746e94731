// SPDX-License-Identifier: MIT
// `fathom eval answers` as a program on the bundled model: the 4k demo document is answered right
// by every method, the JSON holds every answer, and wrong use is refused before any work.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/program.h"

namespace fathom {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using test::ProgramResult;
using test::ReadAll;

const std::string kSource = FATHOM_SOURCE_DIR;
const std::string kModel = " -m '" + kSource + "/models/fathom-recall-15m-q8_0.gguf' ";
const std::string kDemo = " '" + kSource + "/models/questions/questions.json' ";
constexpr int kDemoQuestions = 5;  // of the first document, 4k

class EvalAnswers : public test::ProgramTest {
 protected:
  EvalAnswers() : ProgramTest("eval answers ") {}
};

void ExpectMethod(const Json& method, const std::string& spec, double read_bits) {
  EXPECT_EQ(method["spec"], spec);
  EXPECT_EQ(method["questions"], kDemoQuestions) << spec;
  EXPECT_EQ(method["right"], kDemoQuestions) << spec;
  EXPECT_EQ(method["share"], 1.0) << spec;
  EXPECT_EQ(method["standard_error"], 0.0) << spec;
  // One multiplier for all heads meets the bits on the queries that it was fitted on, and comes
  // near them on others.
  EXPECT_NEAR(method["read_bits"].get<double>(), read_bits, 0.1 * read_bits) << spec;
  EXPECT_GT(method["decode_ms_per_token"].get<double>(), 0) << spec;
  EXPECT_EQ(method["tasks"].size(), 1U) << spec;
  EXPECT_EQ(method["tasks"][0]["task"], "single needle") << spec;
  EXPECT_EQ(method.contains("versus_dense"), spec != "dense") << spec;
}

TEST_F(EvalAnswers, DemoDocumentIsAnsweredRightByAllMethods) {
  const std::string file = (folder_ / "report.json").string();
  const ProgramResult result = Run(kDemo + kModel + "--methods dense,fathom:bits=28,k=512 " +
                                   "--methods exact:k=128 --limit 5 --json -o " + file);
  ASSERT_EQ(result.code, 0) << result.err;
  const Json report = Json::parse(result.out);
  EXPECT_EQ(Json::parse(ReadAll(file)), report);
  EXPECT_EQ(report["question"], "sparse");
  EXPECT_EQ(report["interrupted"], false);
  ASSERT_EQ(report["documents"].size(), 1U);
  // The document and the start of its message, but nothing of the questions.
  EXPECT_NEAR(report["documents"][0]["n_tokens"].get<int>(), 3909, 8);
  ASSERT_EQ(report["methods"].size(), 3U);
  ExpectMethod(report["methods"][0], "dense", 0);
  ExpectMethod(report["methods"][1], "fathom:bits=28,k=512", 28);
  ExpectMethod(report["methods"][2], "exact:k=128", 2048);
  ASSERT_EQ(report["answers"].size(), 3U * kDemoQuestions);
  for (const Json& answer : report["answers"]) {
    EXPECT_EQ(answer["right"], true);
    EXPECT_NE(answer["text"].get<std::string>().find("4820617"), std::string::npos) << answer;
    EXPECT_EQ(answer["expected"], Json::array({"4820617"}));
    EXPECT_EQ(answer["stop"], "end");
    // Question and answer are decoded, all of it sparsely where the method is sparse.
    const int asked =
        answer["n_prompt_tokens"].get<int>() - report["documents"][0]["n_tokens"].get<int>();
    EXPECT_EQ(answer["decode_steps"], asked + answer["n_answer_tokens"].get<int>()) << answer;
    EXPECT_EQ(answer["sparse_calls"], answer["spec"] == "dense" ? Json(0) : answer["calls"]);
  }
}

TEST_F(EvalAnswers, DenseQuestionsAreNotDecoded) {
  const ProgramResult result =
      Run(kDemo + kModel + "--methods fathom:bits=28,k=512 --limit 1 --question dense --json");
  ASSERT_EQ(result.code, 0) << result.err;
  const Json report = Json::parse(result.out);
  EXPECT_EQ(report["question"], "dense");
  ASSERT_EQ(report["answers"].size(), 1U);
  const Json& answer = report["answers"][0];
  EXPECT_EQ(answer["right"], true) << answer;
  EXPECT_EQ(answer["decode_steps"], answer["n_answer_tokens"]) << answer;
  EXPECT_FALSE(report["methods"][0].contains("versus_dense"));  // there is nothing to compare with
}

TEST_F(EvalAnswers, WrongAnswersAreCountedAndShownByTask) {
  Write("note.txt", "The locker number of the harbour library is 4820617.\n");
  const std::string set = Write("set.json", R"([
    {"document": "note.txt", "task": "right", "questions": [
      {"question": "What is the locker number of the harbour library?", "expected": ["4820617"]}]},
    {"document": "note.txt", "task": "wrong", "questions": [
      {"question": "What is the locker number of the harbour library?", "expected": ["4820617", "x99"]},
      {"question": "Which locker does the harbour library use?", "expected": ["x99"]}]}])");
  const ProgramResult json = Run(set + kModel + "--methods dense --json");
  ASSERT_EQ(json.code, 0) << json.err;
  const Json report = Json::parse(json.out);
  EXPECT_EQ(report["documents"].size(), 1U);  // prefilled once for both entries
  const Json& method = report["methods"][0];
  EXPECT_EQ(method["questions"], 3);
  EXPECT_EQ(method["right"], 1);
  EXPECT_EQ(method["tasks"][0]["right"], 1);
  EXPECT_EQ(method["tasks"][1]["questions"], 2);
  EXPECT_EQ(method["tasks"][1]["right"], 0);

  const ProgramResult text = Run(set + kModel + "--methods dense,exact");
  ASSERT_EQ(text.code, 0) << text.err;
  for (const char* part : {"0.333", "0.272", "0.000 +- 0.000", "share by task", "wrong"}) {
    EXPECT_NE(text.out.find(part), std::string::npos) << part << "\n" << text.out;
  }
  EXPECT_NE(text.err.find("so far 3 of 3 questions, share 0.333"), std::string::npos) << text.err;
}

TEST_F(EvalAnswers, WrongUseIsRefusedBeforeAnyWork) {
  const std::string dense = "--methods dense ";
  ExpectError(kModel + dense, 2, {"questions"});
  ExpectError(kDemo + dense, 2, {"--model"});
  ExpectError(kDemo + kModel, 2, {"--methods"});
  ExpectError(kDemo + kModel + "--methods dense,fathm", 2, {"fathm"});
  ExpectError(kDemo + kModel + "--methods dense,exact:k=36", 2, {"k=36", "37"});
  ExpectError(kDemo + kModel + dense + "--question fast", 2, {"--question", "sparse"});
  ExpectError(kDemo + kModel + dense + "--backend gpu", 2, {"gpu"});
  ExpectError("nowhere.json" + kModel + dense, 1, {"nowhere.json", "No such file"});
  ExpectError(Write("bad.json", "[{}]") + kModel + dense, 1, {"bad.json", "[0]", "'document'"});
  ExpectError(kDemo + "-m nowhere.gguf " + dense, 1, {"nowhere.gguf"});
  ExpectError(kDemo + kModel + dense + "-o /nowhere/x.json", 1, {"/nowhere/x.json"});
}

}  // namespace
}  // namespace fathom
