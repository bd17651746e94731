// SPDX-License-Identifier: MIT
// Backend::RankAttend against the calls that it is made of, and against `ref`.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <functional>
#include <limits>
#include <stdexcept>

#include "backend/rest.h"
#include "base/half.h"
#include "support/backend_cases.h"
#include "support/compare.h"

namespace fathom::test {
namespace {

struct StepCase {
  IndexCase index;
  std::int32_t group = 4;
  std::int64_t tail = 5;  // n_tokens = n_index + tail
  std::int64_t keep = 64;
  float exp_scale = 0.125F;
  float least_weight = 0;
  float factor = 0.7F;
  float least_share = 0.015F;  // some blocks are read and some are not
  bool block_means = true;
};

constexpr std::size_t kHeads = 2;

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

std::vector<Half> RandomHalves(std::int64_t n, std::uint64_t seed) {
  std::vector<Half> halves;
  for (const float x : RandomNormal(n, seed)) halves.push_back(FloatToHalf(x));
  return halves;
}

// Everything that a call reads, and the tables as a planner makes them.
class Step final : public RankPlanner {
 public:
  Step(const StepCase& shape, const Backend& packer) : c(shape) {
    c.index.codec = Codec::kMean;
    const std::int32_t dim = c.index.head_dim;
    for (std::size_t h = 0; h < kHeads; ++h) index.push_back(MakeIndex(c.index, packer, 20 + h));
    n_tokens = index[0].n_tokens + c.tail;
    n_blocks = n_tokens / kBlockTokens;
    q = RandomNormal(std::int64_t{kHeads} * c.group * dim, 30);
    rows = RandomHalves(std::int64_t{kHeads} * n_tokens * 2 * dim, 31);
    means = RandomHalves(std::int64_t{kHeads} * n_blocks * dim, 32);
    mean = RandomNormal(std::int64_t{kHeads} * dim, 33);
    offset = RandomNormal(std::int64_t{kHeads} * c.group, 34);
    for (float& x : offset) x -= 24;  // the rest weighs about as much as what is attended
    noise.assign(offset.size(), 0.3F);
    factor.assign(offset.size(), c.factor);
  }

  void PlanHead(std::int64_t kv_head) override {
    ++planned[Size(kv_head)];
    if (kv_head == throws_at) throw std::runtime_error("no plan");
    const std::int32_t dim = c.index.head_dim;
    const auto level = RandomLevels(dim, 0.5, 5, 40 + Size(kv_head));
    const TestIndex& of_head = index[Size(kv_head)];
    BuildScanTable({dim, c.group, c.index.mean_bits, q.data() + kv_head * c.group * dim,
                    level.data(), of_head.mean_step.data(), of_head.weight.data()},
                   &tables[Size(kv_head)]);
  }

  StepCase c;
  std::vector<TestIndex> index;
  std::int64_t n_tokens = 0, n_blocks = 0;
  std::vector<float> q, mean, offset, noise, factor;
  std::vector<Half> rows, means;
  std::array<ScanTable, kHeads> tables;
  std::array<std::atomic<int>, kHeads> planned{};
  std::int64_t throws_at = -1;
};

struct StepResult {
  std::vector<std::vector<std::int32_t>> tokens;
  std::vector<std::vector<std::uint16_t>> mask;
  std::vector<float> out, lse, rest, mass;
  std::vector<std::int64_t> n_values, n_read;
};

using StepCall = std::function<void(const RankAttendArgs&)>;

StepResult RunStep(Step* step, const StepCall& call) {
  const StepCase& c = step->c;
  const std::int64_t dim = c.index.head_dim;
  const std::size_t group = Size(c.group);
  const std::int64_t index_blocks = step->index[0].n_tokens / kBlockTokens;
  const bool has_rest = c.exp_scale != 0;
  StepResult r;
  r.tokens.assign(kHeads, std::vector<std::int32_t>(Size(step->n_tokens), -1));
  r.mask.assign(kHeads, std::vector<std::uint16_t>(Size(step->n_tokens), 0));
  r.out.assign(step->q.size(), 7.0F);
  r.lse.assign(kHeads * group, 7.0F);
  r.rest.assign(step->q.size(), 7.0F);
  r.mass.assign(kHeads * group, 7.0F);
  r.n_values.assign(kHeads, -1);
  r.n_read.assign(kHeads, -1);
  std::vector<float> left(kHeads * group * Size(index_blocks)), cut(kHeads * group);
  std::vector<std::int64_t> n(kHeads, -1);
  std::vector<RankHead> rank(kHeads);
  std::vector<AttendHead> attend(kHeads);
  std::vector<RestHead> rest(has_rest ? kHeads : 0);
  for (std::size_t h = 0; h < kHeads; ++h) {
    const std::size_t first = h * group;
    rank[h] = {step->index[h].views,
               {&step->tables[h], 1},
               r.tokens[h].data(),
               r.mask[h].data(),
               &n[h],
               left.data() + first * Size(index_blocks),
               index_blocks,
               cut.data() + first};
    attend[h] = {step->rows.data() + static_cast<std::int64_t>(h) * step->n_tokens * 2 * dim,
                 step->q.data() + first * Size(dim),
                 r.tokens[h].data(),
                 r.mask[h].data(),
                 0,
                 r.out.data() + first * Size(dim),
                 r.lse.data() + first,
                 step->mean.data() + h * Size(dim),
                 &r.n_values[h]};
    if (!has_rest) continue;
    rest[h] = {step->offset.data() + first,
               step->noise.data() + first,
               step->factor.data() + first,
               c.block_means ? step->means.data() + h * Size(step->n_blocks) * Size(dim) : nullptr,
               step->mean.data() + h * Size(dim),
               r.rest.data() + first * Size(dim),
               r.mass.data() + first,
               &r.n_read[h]};
  }
  RankAttendArgs args;
  args.rank = {c.index.head_dim,
               c.group,
               c.index.segment_blocks,
               c.index.mean_bits,
               kSinks,
               std::min(step->index[0].n_tokens, step->n_tokens - kWindow),
               step->n_tokens,
               c.keep,
               c.exp_scale,
               rank,
               step};
  args.attend = attend;
  args.scale = 0.125F;
  args.least_weight = c.least_weight;
  args.least_share = c.least_share;
  args.rest = rest;
  call(args);
  for (std::size_t h = 0; h < kHeads; ++h) {
    EXPECT_EQ(attend[h].n_attended, n[h]);
    r.tokens[h].resize(Size(n[h]));
    r.mask[h].resize(Size(n[h]));
  }
  return r;
}

class BackendStep : public BackendTest {
 protected:
  StepResult InOne(Step* step, const Backend& backend) const {
    return RunStep(step, [&](const RankAttendArgs& args) { backend.RankAttend(args); });
  }
  StepResult ByCalls(Step* step, const Backend& backend) const {
    return RunStep(step, [&](const RankAttendArgs& args) { RankThenAttend(backend, args); });
  }

  static void ExpectAlike(const StepResult& actual, const StepResult& expected, double bound,
                          const StepCase& c) {
    const std::string where = "dim " + std::to_string(c.index.head_dim) + " group " +
                              std::to_string(c.group) + " tail " + std::to_string(c.tail);
    ASSERT_EQ(actual.tokens, expected.tokens) << where;
    ASSERT_EQ(actual.mask, expected.mask) << where;
    EXPECT_TRUE(Near(actual.out, expected.out, bound)) << where;
    EXPECT_TRUE(Near(actual.lse, expected.lse, bound)) << where;
    EXPECT_TRUE(Near(actual.rest, expected.rest, bound)) << where;
    EXPECT_TRUE(Near(actual.mass, expected.mass, bound)) << where;
  }

  void Check(const StepCase& c) {
    Step step(c, ref());
    const StepResult actual = InOne(&step, backend());
    for (const std::atomic<int>& count : step.planned) EXPECT_EQ(count, 1);
    const StepResult calls = ByCalls(&step, backend());
    ExpectAlike(actual, calls, 2e-6, c);
    EXPECT_EQ(actual.n_values, calls.n_values);
    EXPECT_EQ(actual.n_read, calls.n_read);
    // The rest is right within 2 % (Backend::Rank), which decides for blocks near the limit.
    step.c.least_share = 0;
    ExpectAlike(InOne(&step, backend()), ByCalls(&step, ref()), 0.02, c);
  }
};

TEST_P(BackendStep, IsMadeOfItsCalls) {
  for (const std::int32_t group : {1, 2, 3, 4, 7, 8}) {
    Check({.index = {.head_dim = 64, .segment_blocks = 16, .blocks = {16, 16, 3}}, .group = group});
  }
  for (const std::int32_t dim : {64, 80, 128, 256}) {
    for (const std::int64_t tail : {0, 1, 63}) {
      Check({.index = {.head_dim = dim, .segment_blocks = 8, .blocks = {8, 3}},
             .group = 2,
             .tail = tail,
             .keep = 40});
    }
  }
}

// Several tasks for every part of a step, and the widest group.
TEST_P(BackendStep, ManyBlocks) {
  Check({.index = {.head_dim = 64, .segment_blocks = 64, .blocks = {64, 64, 64, 9}}, .keep = 300});
  Check({.index = {.head_dim = 64, .segment_blocks = 64, .blocks = {64, 64, 30}},
         .group = 16,
         .keep = 100});
}

TEST_P(BackendStep, AllCandidatesWin) {
  Check({.index = {.head_dim = 64, .segment_blocks = 8, .blocks = {3}},
         .tail = kWindow,
         .keep = 3 * kBlockTokens - kSinks});
}

TEST_P(BackendStep, Rules) {
  const StepCase c = {.index = {.head_dim = 64, .segment_blocks = 64, .blocks = {64, 20}},
                      .keep = 300};
  StepCase other = c;
  other.exp_scale = 0;
  Check(other);
  other = c;
  other.least_weight = 1e-4F;
  Check(other);
  other = c;
  other.block_means = false;
  Check(other);
  other = c;
  other.tail = -70;  // the index is ahead of the tokens that are visible
  Check(other);
}

// What was attended exactly stays as it is where nothing is to be added, or nothing usable.
TEST_P(BackendStep, WithoutWeightTheRestChangesNothing) {
  StepCase c = {.index = {.head_dim = 64, .segment_blocks = 64, .blocks = {30}}, .group = 3};
  c.exp_scale = 0;
  Step plain(c, ref());
  const StepResult expected = InOne(&plain, backend());
  c.exp_scale = 0.125F;
  c.factor = 0;
  Step none(c, ref());
  EXPECT_EQ(Bits(InOne(&none, backend()).out), Bits(expected.out));
  c.factor = 0.7F;
  Step damaged(c, ref());
  damaged.offset[4] = std::numeric_limits<float>::quiet_NaN();  // KV head 1, query head 1
  const StepResult actual = InOne(&damaged, backend());
  EXPECT_TRUE(std::isnan(actual.mass[4]));
  const auto of_head = [](const std::vector<float>& out, std::size_t h) {
    return Bits(std::span(out).subspan(h * 64, 64));
  };
  for (std::size_t h = 0; h < 6; ++h) {
    EXPECT_EQ(of_head(actual.out, h) == of_head(expected.out, h), h == 4) << h;
  }
}

TEST_P(BackendStep, ThreadsDoNotChangeResults) {
  Step step({.index = {.head_dim = 32, .segment_blocks = 64, .blocks = {64, 21}}, .keep = 200},
            ref());
  const StepResult one = InOne(&step, *WithThreads(1));
  for (const int n : {2, 3, 5, 16}) {
    const StepResult many = InOne(&step, *WithThreads(n));
    EXPECT_EQ(many.tokens, one.tokens) << n;
    EXPECT_EQ(Bits(many.out), Bits(one.out)) << n;
    EXPECT_EQ(Bits(many.rest), Bits(one.rest)) << n;
    EXPECT_EQ(Bits(many.mass), Bits(one.mass)) << n;
  }
}

// A caller's own parallel region leaves a call one thread, however many it asks for.
TEST_P(BackendStep, InsideAParallelRegion) {
  Step step({.index = {.head_dim = 32, .segment_blocks = 64, .blocks = {64, 21}}, .keep = 200},
            ref());
  const auto many = WithThreads(4);
  const StepResult expected = InOne(&step, *many);
  StepResult actual;
#pragma omp parallel num_threads(2)
#pragma omp single
  actual = InOne(&step, *many);
  EXPECT_EQ(actual.tokens, expected.tokens);
  EXPECT_EQ(Bits(actual.out), Bits(expected.out));
}

TEST_P(BackendStep, ThrowsWhatThePlannerThrows) {
  Step step({.index = {.head_dim = 16, .segment_blocks = 8, .blocks = {8}}}, ref());
  const StepResult expected = InOne(&step, backend());
  for (const std::int64_t head : {0, 1}) {
    step.throws_at = head;
    EXPECT_THROW(InOne(&step, backend()), std::runtime_error);
  }
  step.throws_at = -1;
  EXPECT_EQ(Bits(InOne(&step, backend()).out), Bits(expected.out));
}

FATHOM_TEST_ALL_BACKENDS(BackendStep);

}  // namespace
}  // namespace fathom::test
