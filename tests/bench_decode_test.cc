// SPDX-License-Identifier: MIT
// `fathom bench decode` on the bundled model: its report has what it promises. Nothing here depends
// on how long anything takes.
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "support/program.h"

namespace fathom {
namespace {

using nlohmann::json;

const std::string kSource = FATHOM_SOURCE_DIR;
const std::string kArguments =
    "-m " + test::Quoted(kSource + "/models/fathom-recall-15m-q8_0.gguf") + " -f " +
    test::Quoted(kSource + "/models/questions/single-needle-4k.txt") +
    " --ctx 256 --steps 1 --methods dense fathom:k=64,min=0 --json ";

class BenchDecode : public test::ProgramTest {
 protected:
  BenchDecode() : ProgramTest("bench decode ") {}

  // Samples by runner at 256 tokens.
  std::map<std::string, json> Samples(const std::string& arguments) const {
    const test::ProgramResult result = Run(kArguments + arguments);
    EXPECT_EQ(result.code, 0) << result.err;
    const json report = json::parse(result.out, nullptr, false);
    EXPECT_FALSE(report.is_discarded()) << result.out;
    EXPECT_EQ(report["threads"], 2);
    EXPECT_EQ(report["machine"].size(), 1U);
    EXPECT_GT(report["machine"][0]["read_gb_s"].get<double>(), 0);
    std::map<std::string, json> samples;
    for (const json& sample : report["samples"]) {
      EXPECT_GT(sample["step_ms"].get<double>(), 0);
      EXPECT_GT(sample["prefill_tokens_per_second"].get<double>(), 0);
      if (sample["context"] == 256) samples[sample["runner"].get<std::string>()] = sample;
    }
    return samples;
  }
};

TEST_F(BenchDecode, ComparesMethodsWithLibllama) {
  const auto samples = Samples("-t 2");
  ASSERT_EQ(samples.size(), 4U);
  for (const auto& [runner, sample] : samples) {
    EXPECT_GT(sample["ratio"].get<double>(), 0) << runner;
    const bool ours = runner.rfind("libllama", 0) != 0;
    EXPECT_EQ(sample.contains("gb_s"), ours) << runner;
    EXPECT_EQ(sample.contains("read_share"), ours) << runner;
  }
  EXPECT_GT(samples.at("fathom:k=64,min=0")["index_bytes_per_step"].get<double>(), 0);
  EXPECT_EQ(samples.at("dense")["index_bytes_per_step"], 0);
}

TEST_F(BenchDecode, WithoutLibllamaThereAreNoRatios) {
  const auto samples = Samples("-t 2 --no-llama");
  ASSERT_EQ(samples.size(), 2U);
  for (const auto& [runner, sample] : samples) EXPECT_FALSE(sample.contains("ratio")) << runner;
}

TEST_F(BenchDecode, LibllamaRunsWithTheSettingThatIsAskedFor) {
  const auto samples = Samples("-t 2 --llama-flash on");
  EXPECT_EQ(samples.size(), 3U);
  EXPECT_TRUE(samples.contains("libllama, flash attention on"));
  EXPECT_TRUE(samples.at("dense").contains("ratio"));
}

TEST_F(BenchDecode, BadRequestsAreRefused) {
  ExpectError("-f text.txt", 2, {"--model"});
  ExpectError(kArguments + " --steps 0", 2, {"--steps"});
  ExpectError(kArguments + " --ctx 3z", 2, {"3z", "32k"});
  ExpectError(kArguments + " --llama-flash no", 2, {"--llama-flash: no not in", "both"});
  ExpectError("-m nowhere.gguf -f text.txt", 1, {"nowhere.gguf"});
}

}  // namespace
}  // namespace fathom
