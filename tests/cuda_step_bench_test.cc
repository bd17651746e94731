// SPDX-License-Identifier: MIT
// RunStepBench as a whole on the smallest shape: every kind of method, synthetic and captured keys.
// What it measures is looked at only for being there; what is selected is judged in cuda_step_test.
#include "fathom/step_bench.h"

#include <gtest/gtest.h>

#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "backend/cuda/cuda_backend.h"
#include "fathom/error.h"
#include "support/captured_step.h"

namespace fathom::test {
namespace {

class CudaStepBench : public testing::Test {
 protected:
  void SetUp() override {
    const std::string reason = ProbeCuda();
    if (!reason.empty()) GTEST_SKIP() << reason;
  }

  // Two layers, few tokens: the link and the kernels are the same.
  static StepBenchOptions Options(const std::string& method) {
    StepBenchOptions options;
    options.shape = ShapeOf({8, 2, 64}, 2);
    options.shape.n_embd = 128;
    options.shape.n_ff = 192;
    options.shape.n_vocab = 256;
    options.shape.has_qk_norm = true;
    options.n_tokens = 1100;
    options.method = method;
    options.k = kK;
    options.steps = 3;
    return options;
  }

  static void Expect(const StepBenchResult& r, const StepBenchOptions& options) {
    EXPECT_EQ(r.steps, 3);
    EXPECT_EQ(r.batch, options.batch);
    EXPECT_EQ(r.stages.size(), std::size(kStepStages));
    EXPECT_GT(r.wall_ms, 0);
    EXPECT_GT(r.link_bytes, 0);
    EXPECT_TRUE(r.pinned);
    if (options.method == "dense") {
      EXPECT_EQ(r.winners_per_head, 1100);
      return;
    }
    EXPECT_GT(r.read_bits, 0);
    EXPECT_GE(r.winners_per_head, kK - kAlwaysKept - 8);
    EXPECT_LE(r.winners_per_head, 4 * kK);
  }
};

TEST_F(CudaStepBench, SyntheticKeys) {
  for (const char* method : {"fathom:bits=28", "sparq:r=16", "dense"}) {
    SCOPED_TRACE(method);
    const StepBenchOptions options = Options(method);
    const StepBenchResult r = RunStepBench(options);
    Expect(r, options);
    EXPECT_EQ(r.keys.file, "");
    EXPECT_EQ(r.random_index, options.method == "sparq:r=16");
  }
}

TEST_F(CudaStepBench, CapturedKeys) {
  const TempDir folder;
  const std::string path = WriteCapture(folder);
  const std::vector<std::pair<const char*, const char*>> runs = {
      {"fathom:bits=28", "host"}, {"fathom:bits=28", "hbm"},
      {"sparq:r=16", "host"},     {"fathom:budget=48,preset=paper", "hbm"},
      {"loki:r=16", "hbm"},       {"double-sparsity:c=16", "host"},
      {"landmark", "host"},       {"exact", "hbm"},
      {"dense", "host"},
  };
  for (const auto& [method, placement] : runs) {
    SCOPED_TRACE(testing::Message() << method << ", " << placement);
    StepBenchOptions options = Options(method);
    options.keys = path;
    options.placement = placement;
    options.batch = 2;
    const StepBenchResult r = RunStepBench(options);
    Expect(r, options);
    EXPECT_EQ(r.keys.file, "made.safetensors");
    EXPECT_EQ(r.keys.model, "made");
    EXPECT_EQ(r.keys.n_tokens, kTile);
    EXPECT_FALSE(r.random_index);
    EXPECT_EQ(r.row_modulus, 0);
  }
}

// The multiplier was fitted on the capture's earlier queries, which are like the timed ones here
// and eight times those of the dense layers.
TEST_F(CudaStepBench, CapturedQueriesReadTheBitsAskedFor) {
  const TempDir folder;
  StepBenchOptions options = Options("fathom:bits=28");
  options.keys = WriteCapture(folder);
  EXPECT_NEAR(RunStepBench(options).read_bits, 28, 4);
  options.method = "fathom:bits=10";
  EXPECT_NEAR(RunStepBench(options).read_bits, 10, 2);
}

TEST_F(CudaStepBench, RowsOfCapturesFoldAtTiles) {
  const TempDir folder;
  StepBenchOptions options = Options("sparq:r=16");
  options.keys = WriteCapture(folder);
  options.fold_tokens = 2 * kTile;
  EXPECT_EQ(RunStepBench(options).row_modulus, 2 * kTile);
  options.fold_tokens = 512;
  try {
    RunStepBench(options);
    FAIL() << "rows of other tokens";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    for (const char* part : {"512", "448", "multiple"}) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  }
}

}  // namespace
}  // namespace fathom::test
