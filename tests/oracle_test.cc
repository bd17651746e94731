// SPDX-License-Identifier: MIT
// Agreement with an independent implementation of the reads in numpy, which knows none of our code:
// its figures of a small capture stand in tests/data/capture-960.oracle.json. The capture: layer 3
// of the bundled model on the first 960 tokens of multi-query-16k.txt, the last 32 positions
// measured, every 8th before for statistics, bf16; every 4th position measured at k = 64.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "fathom/eval.h"

namespace fathom {
namespace {

std::string DataFile(const std::string& name) {
  return std::string(FATHOM_SOURCE_DIR) + "/tests/data/" + name;
}

// The same read in our words: the numpy code plans every head by itself, takes twice the rms as the
// range of planes, knows no residual unless asked, and does not rotate published planes unless
// asked.
std::string OurSpec(const std::string& theirs) {
  std::string spec = theirs;
  const auto add = [&spec](const std::string& option) {
    spec += (spec.find(':') == std::string::npos ? ":" : ",") + option;
  };
  const bool fathom = theirs.rfind("fathom", 0) == 0;
  const bool paper = theirs.find("preset=paper") != std::string::npos;
  if (paper && theirs.find("basis=") == std::string::npos) add("basis=raw");
  if (fathom && !paper) add("plan=measured,range=rms");
  if (theirs.find("residual=") == std::string::npos) add("residual=off");
  return spec;
}

TEST(Oracle, SmallCaptureGivesTheSameFigures) {
  std::ifstream file(DataFile("capture-960.oracle.json"));
  const auto expected = nlohmann::json::parse(file);
  ASSERT_GE(expected.size(), 11U);
  const CaptureFile capture(DataFile("capture-960.safetensors"));
  ErrorOptions options;
  for (const auto& row : expected) options.methods.push_back(OurSpec(row.at("method")));
  options.k = {64};
  options.every = 4;
  options.fit_on_measured = true;
  options.n_threads = 2;
  const ErrorReport report = EvaluateError(capture, options);
  ASSERT_EQ(report.rows.size(), expected.size());
  for (std::size_t i = 0; i < report.rows.size(); ++i) {
    const ErrorRow& ours = report.rows[i];
    const auto& theirs = expected[i];
    const std::string method = theirs.at("method");
    EXPECT_EQ(ours.samples, theirs.at("samples").get<std::int64_t>()) << method;
    // It counts no bits of exact scores.
    if (method != "exact") {
      EXPECT_NEAR(ours.read_bits, theirs.at("read_bits").get<double>(), 1e-3) << method;
    }
    const double mean = theirs.at("mean").get<double>();
    // Our scan rounds the weights of a query to bytes, its decoders are exact.
    EXPECT_NEAR(ours.mean, mean, (method.starts_with("fathom") ? 0.02 : 0.01) * mean) << method;
    EXPECT_NEAR(ours.recall, theirs.at("recall").get<double>(), 0.01) << method;
  }
}

}  // namespace
}  // namespace fathom
