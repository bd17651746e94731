// SPDX-License-Identifier: MIT
// Whole decode steps of our own read on a device, from the plan to the output, against the host:
// tables, winners and masks equal it to the last bit. cuda_step_rivals.cc has the other methods.
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "fathom/capture.h"
#include "support/cuda_mean_step.h"

namespace fathom::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

void ExpectStep(const StepCase& c, const MeanStep::EditFn& edit = {}) {
  SCOPED_TRACE(testing::Message() << c);
  MeanStep step(c, edit);
  step.ExpectTables();
  step.Expect(step.Run());
}

using Kind = DataKind;

TEST_F(CudaStep, WinnersEqualTheHost) {
  for (const std::int32_t group : {1, 2, 4, 7, 8, 16}) {
    const std::int32_t dim = std::vector<std::int32_t>{64, 80, 128, 256}[Size(group % 4)];
    ExpectStep({group % 2 == 0 ? Kind::kNormal : Kind::kHeavyTailed, {4096 + 70}, dim, group, 128});
    ExpectStep({Kind::kSmooth, {1100}, dim, group, 512, group % 2 == 0, false, 28, 8});
  }
}

TEST_F(CudaStep, LongSequences) {
  ExpectStep({Kind::kNormal, {70000}, 64, 4, 512});
  ExpectStep({Kind::kSmooth, {70000}, 64, 7, 128, true});
  ExpectStep({Kind::kHeavyTailed, {20000}, 128, 8, 512, true});
}

// Tables of more than 64 planes and of four parts, which the plain kernel filters.
TEST_F(CudaStep, ManyPlanes) {
  for (const bool on_host : {false, true}) {
    ExpectStep({Kind::kNormal, {4096 + 70}, 128, 4, 128, on_host, false, 100});
    ExpectStep({Kind::kHeavyTailed, {1100}, 256, 16, 128, on_host, false, 100, 8});
    ExpectStep({Kind::kNormal, {20000}, 80, 7, 512, on_host, false, 60});
  }
}

// Sequences of different lengths; the shortest is dense.
TEST_F(CudaStep, Batches) {
  for (const bool on_host : {false, true}) {
    ExpectStep({Kind::kNormal, {4096 + 70, 100, 20000}, 128, 4, 128, on_host});
    ExpectStep({Kind::kSmooth, {300, 20000, 1100}, 64, 7, 512, on_host, true});
  }
}

TEST_F(CudaStep, ResidualAsTheHostAddsIt) {
  for (const double bits : {28.0, 100.0}) {
    ExpectStep({Kind::kNormal, {4096 + 70}, 128, 4, 128, false, true, bits});
    ExpectStep({Kind::kSmooth, {20000}, 64, 8, 512, false, true, bits});
    ExpectStep({Kind::kHeavyTailed, {1100}, 80, 16, 128, true, true, bits});
  }
}

// More candidates than there is room for: of equal scores the smallest tokens win.
TEST_F(CudaStep, EqualScores) {
  const StepCase c{Kind::kConstant, {20000}, 64, 4, 128};
  MeanStep step(c);
  const StepResult r = step.Run();
  EXPECT_EQ(r.redo, (std::vector<std::int32_t>{1, 1}));
  step.Expect(r);
  for (std::int32_t i = 0; i < 96; ++i) ASSERT_EQ(r.tokens[0][Size(i)], i);
}

TEST_F(CudaStep, QueriesThatAreNotFinite) {
  for (const bool residual : {false, true}) {
    const StepCase c{Kind::kNormal, {4096 + 70}, 64, 4, 128, false, residual};
    const auto edit = [&c](StepRun* run) {
      run->q[Size(c.head_dim + 5)] = kNan;
      run->q[Size((c.group + 2) * c.head_dim)] = std::numeric_limits<float>::infinity();
    };
    MeanStep step(c, edit);
    const StepResult r = step.Run();
    EXPECT_EQ(r.redo, (std::vector<std::int32_t>{1, 1}));
    step.Expect(r);
  }
}

// Nearly all large scores in one block, or in one tile, which a sample may miss.
TEST_F(CudaStep, ScoresThatLieTogether) {
  for (const std::int64_t n_large : {64, 1024, 3000}) {
    const StepCase c{Kind::kNormal, {20000}, 64, 4, 512, false, true};
    const auto edit = [&](StepRun* run) {
      for (std::size_t h = 0; h < run->rows.size(); ++h) {
        const float* q = run->head_q(static_cast<std::int64_t>(h));
        for (std::int64_t i = 6400; i < 6400 + n_large; ++i) {
          for (std::size_t j = 0; j < 64; ++j) {
            Half& x = run->rows[h][Size(i) * 128 + j];
            float sum = HalfToFloat(x);
            for (std::size_t g = 0; g < 4; ++g) sum += 0.5F * q[g * 64 + j];
            x = FloatToHalf(sum);
          }
        }
      }
    };
    ExpectStep(c, edit);
  }
}

// A layer of a capture under a step of one sequence: tokens beyond its end begin again at its
// first.
class Captured {
 public:
  Captured() : file_(std::string(FATHOM_SOURCE_DIR) + "/tests/data/capture-960.safetensors") {
    const CaptureGeometry& g = file_.geometry();
    n_ = g.n_tokens;
    dim_ = Size(g.heads.head_dim);
    layer_ = g.layers.front();
    k_.resize(Size(n_) * kKvHeads * dim_);
    v_.resize(k_.size());
    file_.LoadRows(layer_, 0, n_, k_.data(), v_.data());
    q_ = file_.LoadQueries(layer_);
  }

  std::size_t n_queries() const { return file_.geometry().q_positions.size(); }

  void Edit(std::size_t query, StepRun* run) const {
    for (std::size_t h = 0; h < run->rows.size(); ++h) {
      std::vector<Half>& rows = run->rows[h];
      for (std::size_t i = 0; i < rows.size() / (2 * dim_); ++i) {
        const std::size_t from = (i % Size(n_) * kKvHeads + h) * dim_;
        for (std::size_t j = 0; j < dim_; ++j) {
          rows[i * 2 * dim_ + j] = FloatToHalf(k_[from + j]);
          rows[(i * 2 + 1) * dim_ + j] = FloatToHalf(v_[from + j]);
        }
      }
    }
    const auto at = q_.begin() + static_cast<std::ptrdiff_t>(query * run->q.size());
    run->q.assign(at, at + static_cast<std::ptrdiff_t>(run->q.size()));
  }

 private:
  CaptureFile file_;
  std::int64_t n_ = 0;
  std::size_t dim_ = 0;
  std::int32_t layer_ = 0;
  std::vector<float> k_, v_, q_;
};

// Keys and queries of the bundled model, as they are and tiled, which makes every score many times.
TEST_F(CudaStep, CapturedKeys) {
  const Captured captured;
  ASSERT_EQ(captured.n_queries(), 32U);
  for (std::size_t query = 3; query < captured.n_queries(); query += 4) {
    const auto edit = [&](StepRun* run) { captured.Edit(query, run); };
    ExpectStep({Kind::kNormal, {960}, 128, 4, 128, query % 8 == 3, true}, edit);
  }
  const auto edit = [&](StepRun* run) { captured.Edit(0, run); };
  ExpectStep({Kind::kNormal, {20000}, 128, 4, 512, true, true}, edit);
}

// A graph gives what single launches give, and follows sequences that grow by a block.
TEST_F(CudaStep, CapturedStepsFollowLengths) {
  for (const bool on_host : {false, true}) {
    const StepCase c{Kind::kNormal, {4096 + 70, 1100, 100}, 128, 4, 128, on_host, true};
    MeanStep step(c);
    const StepResult eager = step.Run();
    cuda::Graph graph(step.run.stream(), [&](cudaStream_t s) { step.Record(s); });
    for (int i = 0; i < 2; ++i) {
      graph.Launch(step.run.stream());
      const StepResult r = step.run.Read();
      EXPECT_EQ(r.count, eager.count);
      EXPECT_EQ(r.tokens, eager.tokens);
      EXPECT_EQ(r.mask, eager.mask);
      EXPECT_EQ(r.out, eager.out);
      step.Expect(r);
    }
    step.run.SetLengths({4096 + 70 + 64, 1100 + 64, 100 + 64});
    step.Grow();
    for (int i = 0; i < 2; ++i) {
      graph.Launch(step.run.stream());
      step.Expect(step.run.Read());
    }
  }
}

}  // namespace
}  // namespace fathom::test
