// SPDX-License-Identifier: MIT
// `fathom run --session` and `fathom session` as a user meets them, with the bundled model.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "support/program.h"

namespace fathom {
namespace {

using nlohmann::json;

const std::string kModel = FATHOM_SOURCE_DIR "/models/fathom-recall-15m-q8_0.gguf";

class SessionCli : public test::ProgramTest {
 protected:
  SessionCli() {
    std::ifstream file(FATHOM_SOURCE_DIR "/models/questions/single-needle-4k.txt",
                       std::ios::binary);
    text_ = {std::istreambuf_iterator<char>(file), {}};
    text_.resize(6000);
    document_ = Write("document.txt", text_);
  }

  std::string Dir() const {
    return " --session-dir " + test::Quoted((folder_ / "sessions").string()) + " ";
  }
  std::string RunArguments(const std::string& more) const {
    return "run -m " + kModel + Dir() + "--method fathom:bits=28,k=128,min=256 -n 12 " + more;
  }
  json RunJson(const std::string& more) const {
    const test::ProgramResult result = Run(RunArguments(more + " --json"));
    EXPECT_EQ(result.code, 0) << more << "\n" << result.err;
    EXPECT_TRUE(json::accept(result.out)) << result.out;
    return json::parse(result.out, nullptr, false);
  }
  json ListJson() const {
    return json::parse(Run("session list --json" + Dir()).out, nullptr, false);
  }
  static std::string AnswerOf(const json& report) {
    return report["runs"][0]["answers"][0]["text"];
  }

  std::string text_;
  std::string document_;
};

TEST_F(SessionCli, PrefillsOnceAndGoesOn) {
  const std::string question = "-f " + document_ + " -p 'What is this about?'";
  const json plain = RunJson(question);
  const json first = RunJson(question + " --session doc");
  EXPECT_EQ(first["session"]["reused_tokens"], 0);
  EXPECT_GT(first["session"]["saved_tokens"].get<int>(), 1000);
  EXPECT_EQ(AnswerOf(first), AnswerOf(plain));

  // Another question: only its own tokens are new.
  const test::ProgramResult second =
      Run(RunArguments("-f " + document_ + " -p 'Who is named?' --session doc"));
  EXPECT_EQ(second.code, 0) << second.err;
  EXPECT_NE(second.err.find("session 'doc': reused 1,"), std::string::npos) << second.err;
  const json again = RunJson(question + " --session doc");
  EXPECT_GT(again["session"]["reused_tokens"].get<int>(), 1000);
  EXPECT_LT(again["prefill"]["n_tokens"].get<int>(), 20);
  EXPECT_EQ(AnswerOf(again), AnswerOf(first));

  // The next turn, without the document; then on, without a question.
  const json turn = RunJson("--session doc -p 'And then?'");
  EXPECT_GT(turn["session"]["saved_tokens"].get<int>(),
            again["session"]["saved_tokens"].get<int>());
  const json on = RunJson("--session doc");
  EXPECT_GE(on["session"]["saved_tokens"].get<int>(), turn["session"]["saved_tokens"].get<int>());

  // Several turns in one run.
  const json turns = RunJson("--session doc -p 'First?' -p 'Second?'");
  EXPECT_EQ(turns["runs"][0]["answers"].size(), 2U);

  const json list = ListJson();
  ASSERT_EQ(list["sessions"].size(), 1U);
  EXPECT_EQ(list["sessions"][0]["name"], "doc");
  EXPECT_EQ(list["sessions"][0]["n_tokens"], turns["session"]["saved_tokens"]);
  EXPECT_EQ(Run("session verify doc" + Dir()).code, 0);
}

TEST_F(SessionCli, LongerAndContradictingDocuments) {
  RunJson("-f " + document_ + " -p 'Why?' --session doc");
  const std::string longer = Write("longer.txt", text_ + text_.substr(0, 2000));
  const json grown = RunJson("-f " + longer + " -p 'Why?' --session doc");
  EXPECT_GT(grown["session"]["reused_tokens"].get<int>(), 1000);
  EXPECT_GT(grown["prefill"]["n_tokens"].get<int>(), 300);

  std::string changed = text_;
  changed[700] = changed[700] == 'x' ? 'y' : 'x';
  const std::string other = Write("other.txt", changed);
  const std::string arguments = RunArguments("-f " + other + " -p 'Why?' --session doc");
  ExpectError(arguments, 2,
              {"differs from session 'doc'", "fathom session fork doc", "--session-replace"});
  const test::ProgramResult replaced = Run(arguments + " --session-replace");
  EXPECT_EQ(replaced.code, 0) << replaced.err;
  EXPECT_NE(replaced.err.find("differs from session 'doc' from token"), std::string::npos);
}

TEST_F(SessionCli, AnotherMethodMakesItsOwnIndex) {
  RunJson("-f " + document_ + " -p 'Why?' --session doc");
  const test::ProgramResult other =
      Run("run -m " + kModel + Dir() + "--method dense -n 4 -p 'And?' --session doc");
  EXPECT_EQ(other.code, 0) << other.err;
  EXPECT_NE(other.err.find("was kept with fathom:"), std::string::npos) << other.err;
  // Without --method, the one it was kept with last.
  const test::ProgramResult same = Run("run -m " + kModel + Dir() + "-n 4 -p 'And?' --session doc");
  EXPECT_EQ(same.err.find("was kept with"), std::string::npos) << same.err;
}

TEST_F(SessionCli, ForkTruncateExportImportRemove) {
  RunJson("-f " + document_ + " --session a");
  const std::string tar = test::Quoted((folder_ / "a.tar").string());
  for (const std::string& command :
       std::vector<std::string>{"fork a b", "truncate b 100", "info b", "verify b",
                                "export a " + tar, "rm a", "import " + tar + " c", "list"}) {
    const test::ProgramResult result = Run("session " + command + Dir());
    EXPECT_EQ(result.code, 0) << command << "\n" << result.err;
  }
  const json list = ListJson();
  ASSERT_EQ(list["sessions"].size(), 2U);
  EXPECT_EQ(list["sessions"][0]["n_tokens"], 100);
  EXPECT_GT(list["sessions"][1]["n_tokens"].get<int>(), 1000);
}

TEST_F(SessionCli, BadRequestsAreRefused) {
  RunJson("-f " + document_ + " --session a");
  ExpectError("session info b" + Dir(), 2, {"no session 'b'", "there are: a"});
  ExpectError("session rm b" + Dir(), 2, {"no session 'b'"});
  ExpectError("session fork a a" + Dir(), 2, {"a session 'a' already"});
  ExpectError("session fork a x/y" + Dir(), 2, {"separator"});
  ExpectError("session truncate a 1000000" + Dir(), 2, {"1000000"});
  ExpectError("session import /no/such c" + Dir(), 1, {"/no/such"});
  ExpectError("session import " + document_ + " c" + Dir(), 1, {"document.txt"});
  ExpectError("session frobnicate" + Dir(), 2, {"frobnicate", "verify"});
  ExpectError(RunArguments("--session new"), 2, {"no session 'new' to continue", "-f FILE"});
  ExpectError(RunArguments("--session 'a/b' -p Why"), 2, {"separator"});
  ExpectError(RunArguments("--session a -p Why -c 64"), 2, {"64"});
  ExpectError(RunArguments("--session a -p Why --compare dense"), 2, {"--compare", "fork"});
  ExpectError(RunArguments("--session-replace -p Why"), 2, {"--session NAME"});
  ExpectError(RunArguments("--session a -p Why --session-budget 3x"), 2, {"'3x'", "20G"});
  ExpectError(RunArguments("--session b -p Why --session-budget 1k"), 2,
              {"budget of 1024", "--session-budget"});
  ExpectError("run -m " + kModel + " --session a -p Why --session-dir /proc/none", 1,
              {"/proc/none", "--session-dir"});
}

}  // namespace
}  // namespace fathom
