// SPDX-License-Identifier: MIT
// `fathom calibrate` and --stats-file as a program on the bundled model: statistics of 1.5k tokens
// serve a question about 4k, evaluating the same tokens gives the same errors as without, and wrong
// use is refused.
#include <gtest/gtest.h>
#include <sys/wait.h>

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
const std::string kText = " -f '" + kSource + "/models/questions/single-needle-4k.txt' ";

class CalibrateProgram : public test::ProgramTest {
 protected:
  std::string Path(const std::string& name) const { return (folder_ / name).string(); }
  // The last line of standard error holds all parts; progress may come before.
  void ExpectError(const std::string& arguments, int code,
                   const std::vector<std::string>& parts) const {
    const ProgramResult result = Run(arguments);
    EXPECT_EQ(result.code, code) << arguments << "\n" << result.err;
    EXPECT_EQ(result.out, "") << arguments;
    const std::size_t line = result.err.rfind("fathom: ");
    ASSERT_NE(line, std::string::npos) << arguments << "\n" << result.err;
    for (const auto& part : parts) {
      EXPECT_NE(result.err.find(part, line), std::string::npos) << part << ": " << result.err;
    }
  }
};

TEST_F(CalibrateProgram, StatisticsServeAQuestion) {
  const std::string stats = " --stats-file " + Path("s.safetensors");
  ASSERT_EQ(Run("capture" + kModel + kText + "-c 1500 --positions 16 -o " + Path("c")).code, 0);
  const ProgramResult made = Run("calibrate " + Path("c") + " -o " + Path("s.safetensors") +
                                 " --budgets fathom@28 --json");
  ASSERT_EQ(made.code, 0) << made.err;
  const Json summary = Json::parse(made.out);
  EXPECT_EQ(summary["n_tokens"], 1500 - 16);
  EXPECT_EQ(summary["layers"], Json::array({0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(summary["bytes"], fs::file_size(Path("s.safetensors")));
  EXPECT_EQ(summary["residual"].size(), 1U);
  ASSERT_EQ(summary["budgets"].size(), 1U);
  const auto bits = summary["budgets"][0]["bits"].get<std::vector<double>>();
  ASSERT_EQ(bits.size(), 6U);
  double sum = 0;
  for (const double b : bits) sum += b;
  EXPECT_LE(sum, 6 * 28);
  EXPECT_GT(*std::max_element(bits.begin(), bits.end()), 28);

  const ProgramResult answer =
      Run("run" + kModel + kText + "-p 'What is the locker number of the harbour library?' -n 24" +
          stats + " --method fathom:budgets=file --compare loki");
  ASSERT_EQ(answer.code, 0) << answer.err;
  const std::size_t first = answer.out.find("4820617");
  ASSERT_NE(first, std::string::npos) << answer.out;
  EXPECT_NE(answer.out.find("4820617", first + 1), std::string::npos) << answer.out;
  ExpectError("run" + kModel + kText + "-p hi --method fathom:bits=20,budgets=file" + stats, 2,
              {"bits=20", "bits=28", "--budgets"});
}

TEST_F(CalibrateProgram, TheSameCaptureHasTheSameErrors) {
  const std::string capture = Path("c.safetensors");
  ASSERT_EQ(Run("capture" + kModel + kText + "-c 1000 --layers 1,4 -o " + capture).code, 0);
  const ProgramResult made =
      Run("calibrate " + capture + " --methods fathom:k=128 -o " + Path("s.safetensors"));
  ASSERT_EQ(made.code, 0) << made.err;
  EXPECT_NE(made.out.find("layers   1,4 (2)"), std::string::npos) << made.out;
  const std::string eval = "eval error " + capture +
                           " --k 128 --methods fathom,loki,fathom:preset=paper,basis=klt --json";
  const ProgramResult own = Run(eval);
  const ProgramResult with = Run(eval + " --stats-file " + Path("s.safetensors"));
  ASSERT_EQ(own.code, 0) << own.err;
  ASSERT_EQ(with.code, 0) << with.err;
  Json own_run = Json::parse(own.out)["runs"][0], with_run = Json::parse(with.out)["runs"][0];
  EXPECT_EQ(with_run["statistics"], Path("s.safetensors"));
  ASSERT_EQ(with_run["rows"].size(), 3U);
  EXPECT_EQ(with_run["rows"], own_run["rows"]);
  // Some layers serve an evaluation of them, not a session.
  ExpectError("run" + kModel + kText + "-p hi --stats-file " + Path("s.safetensors"), 2,
              {"layers 1, 4", "layers 0 to 5"});
  ASSERT_EQ(Run("capture" + kModel + kText + "-c 1000 --layers 2 -o " + Path("d")).code, 0);
  ExpectError("eval error " + Path("d") + " --k 128 --stats-file " + Path("s.safetensors"), 2,
              {"layers 1, 4", "layers 2;"});
  ExpectError("eval error " + capture + " --k 128 --stats-file " + capture, 1,
              {"not a statistics file"});
}

TEST_F(CalibrateProgram, WrongUseIsRefused) {
  const std::string out = " -o " + Path("s.safetensors");
  ExpectError("calibrate" + out, 2, {"give a capture", "-m MODEL -f TEXT -c N"});
  Write("there", "mine");
  ExpectError("calibrate" + kModel + kText + "-c 1k -o " + Path("there"), 2, {"exists", "--force"});
  EXPECT_EQ(ReadAll(folder_ / "there"), "mine");
  ExpectError("calibrate" + kModel + kText + out, 2, {"-c N"});
  ExpectError("calibrate some.safetensors" + kModel + out, 2, {"leave them out"});
  ExpectError("calibrate nowhere.safetensors" + out, 1, {"nowhere.safetensors"});
  ExpectError("calibrate" + kModel + kText + "-c 1k -o " + Path("no/s"), 1, {"no/s"});
  ExpectError("calibrate" + kModel + kText + "-c 1k --budgets fathom" + out, 2, {"SPEC@MEAN"});
  ExpectError("calibrate" + kModel + kText + "-c 1k --budgets fathom@2,5" + out, 2, {"SPEC@MEAN"});
  ExpectError("calibrate" + kModel + kText + "-c 200" + out, 2, {"72 tokens", "need 80"});
  EXPECT_FALSE(fs::exists(Path("s.safetensors.capture")));
  EXPECT_FALSE(fs::exists(Path("s.safetensors")));
}

TEST_F(CalibrateProgram, ATextIsCapturedMeanwhile) {
  Write("there", "mine");
  const ProgramResult made =
      Run("calibrate" + kModel + kText + "-c 900 --force -o " + Path("there"));
  ASSERT_EQ(made.code, 0) << made.err;
  EXPECT_NE(made.out.find("tokens   772 of single-needle-4k.txt"), std::string::npos) << made.out;
  EXPECT_FALSE(fs::exists(Path("there.capture")));
  ASSERT_EQ(Run("capture" + kModel + kText + "-c 900 -o " + Path("c")).code, 0);
  ASSERT_EQ(Run("calibrate " + Path("c") + " -o " + Path("s")).code, 0);
  EXPECT_EQ(ReadAll(folder_ / "there"), ReadAll(folder_ / "s"));
}

}  // namespace
}  // namespace fathom
