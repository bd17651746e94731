// SPDX-License-Identifier: MIT
// What `fathom eval answers` reads and computes, without a model: lists of specs, question files
// and their errors, shares and their standard errors.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <limits>

#include "../apps/cli/eval_score.h"
#include "../apps/cli/question_file.h"
#include "../apps/cli/specs.h"
#include "fathom/error.h"
#include "support/temp_dir.h"

namespace fathom::cli {
namespace {

namespace fs = std::filesystem;
using Specs = std::vector<std::string>;

TEST(SplitSpecs, CommasSeparateSpecsAndOptions) {
  EXPECT_EQ(SplitSpecs("dense"), (Specs{"dense"}));
  EXPECT_EQ(SplitSpecs("fathom:bits=28,k=512,dense,exact:k=128"),
            (Specs{"fathom:bits=28,k=512", "dense", "exact:k=128"}));
  EXPECT_EQ(SplitSpecs("fathom:preset=paper,budget=48,k=512,fathom:bits=28,k=512"),
            (Specs{"fathom:preset=paper,budget=48,k=512", "fathom:bits=28,k=512"}));
  EXPECT_EQ(SplitSpecs(" dense , exact:k=128 , min=0 "), (Specs{"dense", "exact:k=128,min=0"}));
}

TEST(SplitSpecs, LeavesWhatIsWrongToTheParser) {
  EXPECT_EQ(SplitSpecs(""), (Specs{""}));
  EXPECT_EQ(SplitSpecs("dense,,exact"), (Specs{"dense", "", "exact"}));
  EXPECT_EQ(SplitSpecs("dense,"), (Specs{"dense", ""}));
  EXPECT_EQ(SplitSpecs("k=5,dense"), (Specs{"k=5", "dense"}));  // nothing to continue
  for (const char* text : {"", "dense,", "dense,,exact", "k=5,dense", "dense,fathm"})
    EXPECT_THROW(ParseSpecLists({text}), Error) << text;
}

TEST(SplitSpecs, ListsAddUpAndAreValidated) {
  EXPECT_EQ(ParseSpecLists({"dense,exact:k=128", "fathom:bits=28,k=512"}),
            (Specs{"dense", "exact:k=128", "fathom:bits=28,k=512"}));
  EXPECT_TRUE(ParseSpecLists({}).empty());
  try {
    ParseSpecLists({"dense", "fathom:bits=28,k=36"});
    FAIL() << "k=36 was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    EXPECT_NE(std::string(error.what()).find("k=36"), std::string::npos) << error.what();
  }
}

class QuestionFile : public testing::Test {
 protected:
  void SetUp() override {
    Write("a.txt", "The locker is 12.\n");
    Write("b.txt", "The locker is 34.\n");
    Write("blank.txt", " \n");
  }

  std::string Write(const std::string& name, const std::string& content) const {
    dir_.Write(name, content);
    return (folder_ / name).string();
  }

  // The error's message holds the file's name and all parts.
  void ExpectError(const std::string& json, ErrorCode code, const Specs& parts) const {
    const std::string path = Write("set.json", json);
    try {
      ReadQuestionFile(path);
      FAIL() << "accepted: " << json;
    } catch (const Error& error) {
      const std::string what = error.what();
      EXPECT_EQ(error.code(), code) << what;
      EXPECT_NE(what.find("set.json"), std::string::npos) << what;
      for (const auto& part : parts) {
        EXPECT_NE(what.find(part), std::string::npos) << part << " is not in: " << what;
      }
    }
  }

  // An entry with a.txt whose questions are given.
  static std::string Entry(const std::string& questions) {
    return R"({"document": "a.txt", "task": "t", "tokens": 5, "questions": )" + questions + "}";
  }
  static std::string Good() { return Entry(R"([{"question": "Q?", "expected": ["12"]}])"); }

  const test::TempDir dir_;
  const fs::path folder_ = dir_.path();
};

TEST_F(QuestionFile, EntriesOfOneDocumentAreJoined) {
  const std::string path = Write(
      "set.json",
      R"([{"document": "b.txt", "task": "one", "questions": [{"question": "B?", "expected": ["34"]}]},
          {"document": "a.txt", "task": "one", "questions": [{"question": "A?", "expected": ["12"]}]},
          {"document": "b.txt", "task": "two", "tokens": 5, "questions": [
            {"question": "B2?", "expected": ["3", "4"]}, {"question": "B3?", "expected": ["34"]}]}])");
  const auto documents = ReadQuestionFile(path);
  ASSERT_EQ(documents.size(), 2U);
  EXPECT_EQ(documents[0].path, (folder_ / "b.txt").string());
  EXPECT_EQ(documents[0].text, "The locker is 34.\n");
  ASSERT_EQ(documents[0].questions.size(), 3U);
  EXPECT_EQ(documents[0].questions[0].task, "one");
  EXPECT_EQ(documents[0].questions[1].task, "two");
  EXPECT_EQ(documents[0].questions[1].text, "B2?");
  EXPECT_EQ(documents[0].questions[1].expected, (Specs{"3", "4"}));
  ASSERT_EQ(documents[1].questions.size(), 1U);
  EXPECT_EQ(documents[1].questions[0].text, "A?");
}

TEST_F(QuestionFile, ErrorsNameFileIndexAndKey) {
  const auto corrupt = ErrorCode::kCorrupt;
  ExpectError("[{", corrupt, {"JSON", "byte"});
  ExpectError("", corrupt, {"JSON"});
  ExpectError("{}", corrupt, {"array", "object"});
  ExpectError("[]", corrupt, {"empty"});
  ExpectError("[" + Good() + ", 7]", corrupt, {"[1]", "object", "number"});
  ExpectError(R"([{"task": "t", "questions": []}])", corrupt, {"[0]", "'document'"});
  ExpectError(R"([{"document": 3, "task": "t"}])", corrupt, {"[0].document", "string"});
  ExpectError(R"([{"document": "a.txt", "questions": []}])", corrupt, {"[0]", "'task'"});
  ExpectError("[" + Entry("[]") + "]", corrupt, {"[0].questions", "empty"});
  ExpectError("[" + Entry(R"("Q?")") + "]", corrupt, {"[0].questions", "array", "string"});
  ExpectError("[" + Good() + "," + Entry(R"([{"expected": ["12"]}])") + "]", corrupt,
              {"[1].questions[0]", "'question'"});
  ExpectError("[" + Entry(R"([{"question": " ", "expected": ["12"]}])") + "]", corrupt,
              {"[0].questions[0].question", "empty"});
  ExpectError("[" + Entry(R"([{"question": "Q?"}])") + "]", corrupt,
              {"[0].questions[0]", "'expected'"});
  ExpectError("[" + Entry(R"([{"question": "Q?", "expected": "12"}])") + "]", corrupt,
              {"[0].questions[0].expected", "array"});
  // Nothing expected, or an empty text, would make every answer right.
  ExpectError("[" + Entry(R"([{"question": "Q?", "expected": []}])") + "]", corrupt,
              {"[0].questions[0].expected", "empty"});
  ExpectError("[" + Entry(R"([{"question": "Q?", "expected": ["12", ""]}])") + "]", corrupt,
              {"[0].questions[0].expected[1]", "empty"});
  ExpectError("[" + Entry(R"([{"question": "Q?", "expected": [12]}])") + "]", corrupt,
              {"[0].questions[0].expected[0]", "string", "number"});
}

TEST_F(QuestionFile, DocumentsThatCannotBeRead) {
  ExpectError(R"([{"document": "gone.txt", "task": "t", "questions": []}])", ErrorCode::kIo,
              {"[0].document", "gone.txt", "No such file"});
  ExpectError(R"([{"document": "blank.txt", "task": "t", "questions": []}])", ErrorCode::kCorrupt,
              {"[0].document", "blank.txt", "empty"});
  EXPECT_THROW(ReadQuestionFile((folder_ / "none.json").string()), Error);
}

TEST(IsRight, WantsEveryText) {
  EXPECT_TRUE(IsRight("k27, m83", {"k27", "m83"}));
  EXPECT_FALSE(IsRight("k27, m8", {"k27", "m83"}));
  EXPECT_FALSE(IsRight("", {"1"}));
}

TEST(Score, ShareAndStandardError) {
  Score score;
  EXPECT_EQ(score.share(), 0);
  EXPECT_EQ(score.standard_error(), 0);
  for (int i = 0; i < 16; ++i) score.Add(i < 12);
  EXPECT_DOUBLE_EQ(score.share(), 0.75);
  EXPECT_DOUBLE_EQ(score.standard_error(), std::sqrt(0.75 * 0.25 / 16));  // 0.10825
}

TEST(Compare, PairsQuestions) {
  // Differences 0, -1, 0, +1, -1: mean -1/5; squares .04 + .64 + .04 + 1.44 + .64 = 2.8, / (5 * 4).
  const PairedDifference difference =
      Compare({true, false, false, true, false}, {true, true, false, false, true});
  EXPECT_EQ(difference.questions, 5);
  EXPECT_DOUBLE_EQ(difference.mean, -0.2);
  EXPECT_DOUBLE_EQ(difference.standard_error, std::sqrt(2.8 / 20));
  // Equal answers: no difference, and certain of it.
  EXPECT_EQ(Compare({true, false, true}, {true, false, true}).mean, 0);
  EXPECT_EQ(Compare({true, false, true}, {true, false, true}).standard_error, 0);
}

TEST(Compare, TakesTheCommonBeginning) {
  const PairedDifference difference = Compare({true, true}, {false, true, true, true});
  EXPECT_EQ(difference.questions, 2);
  EXPECT_DOUBLE_EQ(difference.mean, 0.5);
  EXPECT_DOUBLE_EQ(difference.standard_error, 0.5);
  EXPECT_EQ(Compare({}, {true}).questions, 0);
  EXPECT_EQ(Compare({true}, {false}).standard_error, 0);
}

}  // namespace
}  // namespace fathom::cli
