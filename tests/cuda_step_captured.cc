// SPDX-License-Identifier: MIT
// The data of a benchmark's step made of a capture: rows, tables, statistics and queries are those
// of the capture repeated, and what is selected with them is what the host's methods select over
// the same rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "backend/cuda/host_copy.h"
#include "fathom/capture.h"
#include "fathom/error.h"
#include "fathom/method.h"
#include "method/residual.h"
#include "support/captured_step.h"

namespace fathom::test {
namespace {

// A shape with more layers, KV heads and query heads than the capture; sequences begin at other
// blocks. Rows whole and folded at two tiles.
TEST_F(CudaStep, CapturedRowsRepeat) {
  const TempDir folder;
  const std::string path = WriteCapture(folder);
  const HeadGeometry heads = {12, 3, 64};
  for (const int batch : {1, 2}) {
    for (const std::int64_t modulus : {std::int64_t{0}, 2 * kTile}) {
      SCOPED_TRACE(testing::Message() << "batch " << batch << ", modulus " << modulus);
      const std::int64_t n = 1100;
      const CapturedRun run(path, heads, 3, batch, n, "dense", true, modulus);
      EXPECT_EQ(run.data->keys().n_tokens, kTile);
      EXPECT_EQ(run.keys->tiling()->shift, batch == 1 ? kTileBlocks : kTileBlocks / 2);
      const std::int64_t row = 2 * heads.head_dim;
      for (std::int32_t layer = 0; layer < 3; ++layer) {
        const cuda::LayerRows made = run.rows->Of(layer);
        for (std::int32_t h = 0; h < run.sizes.n_heads(); ++h) {
          ASSERT_EQ(HostHalfs(made.source.rows, h, run.modulus * row),
                    run.Rows(layer, h, 0, run.modulus))
              << "layer " << layer << ", head " << h;
          const cuda::Resident& resident = made.source.resident;
          ASSERT_EQ(ToHost(resident.sinks + h * kSinks * row, Size(kSinks * row)),
                    run.Rows(layer, h, 0, kSinks));
          const auto ring =
              ToHost(resident.recent + h * cuda::kRing * row, Size(cuda::kRing * row));
          for (std::int64_t i = n - cuda::kRing; i < n; ++i) {
            const auto slot = ring.begin() + i % cuda::kRing * row;
            ASSERT_EQ(std::vector<Half>(slot, slot + row), run.Rows(layer, h, i, 1)) << i;
          }
        }
      }
    }
  }
}

TEST_F(CudaStep, CapturedValueMeansAreTheBlocks) {
  const TempDir folder;
  const CapturedRun run(WriteCapture(folder), kHeads, 2, 3, 3 * kTile, "dense", true);
  const std::int64_t blocks = run.n_tokens / kBlockTokens;
  for (std::int32_t layer = 0; layer < 2; ++layer) {
    const cuda::LayerRows made = run.rows->Of(layer);
    for (std::int32_t h = 0; h < run.sizes.n_heads(); ++h) {
      ValueMeans expected(64, ResidualRule::kBlock);
      expected.MoveTo(run.Rows(layer, h, 0, blocks * kBlockTokens).data(), blocks * kBlockTokens,
                      kSinks);
      ASSERT_EQ(DeviceHalfs(made.value_means, h, blocks * 64),
                std::vector<Half>(expected.block_means(), expected.block_means() + blocks * 64))
          << "layer " << layer << ", head " << h;
      // The host leaves the sinks out, once.
      const auto mean = ToHost(made.mean_value + h * 64, 64);
      const std::vector<float> host(expected.mean().begin(), expected.mean().end());
      EXPECT_TRUE(Near(mean, host, .1)) << "layer " << layer << ", head " << h;
    }
  }
  EXPECT_EQ(ToHost(run.rows->Of(0).factor, 12), std::vector<float>(12, 1.0F));
}

// Sequence s of step t takes measured position 3 t + s; the current token is the rows' own.
TEST_F(CudaStep, CapturedQueriesTakeTurns) {
  const TempDir folder;
  const HeadGeometry heads = {12, 3, 64};
  CapturedRun run(WriteCapture(folder), heads, 3, 3, 1100, "dense", true);
  const cuda::DeviceBuffer<float> q(run.q.size()), k(run.k.size()), v(run.v.size());
  cuda::Graph graph(run.stream.get(), [&](cudaStream_t s) {
    for (std::int32_t layer = 0; layer < 3; ++layer) {
      run.keys->TakeStep(layer, run.rows->Vectors(layer, q.data(), k.data(), v.data()), s);
    }
    run.keys->NextStep(s);
  });
  for (std::int64_t step = 0; step < 4; ++step) {
    graph.Launch(run.stream.get());
    run.stream.Wait();
    const auto taken = ToHost(q.data(), q.size());
    const auto key = ToHost(k.data(), k.size()), value = ToHost(v.data(), v.size());
    const std::vector<float>& captured = run.data->queries(0);  // the last layer's, 2 % 2
    for (std::int32_t h = 0; h < run.sizes.n_heads(); ++h) {
      const std::size_t position = Size((step * 3 + h / 3) % 8);
      const Half* row = run.Row(2, h, run.n_tokens - 1);
      for (std::size_t j = 0; j < 64; ++j) {
        ASSERT_EQ(key[Size(h) * 64 + j], HalfToFloat(row[j]));
        ASSERT_EQ(value[Size(h) * 64 + j], HalfToFloat(row[64 + j]));
        for (std::size_t g = 0; g < 4; ++g) {
          const std::size_t from = position * 4 + Size(h % 3 % 2) * 2 + g % 2;
          ASSERT_EQ(taken[(Size(h) * 4 + g) * 64 + j], captured[from * 64 + j])
              << "step " << step << ", head " << h << ", query head " << g;
        }
      }
    }
  }
  // What the multiplier is fitted on are the last 16 of the others.
  const auto fit = run.keys->FitQueries();
  ASSERT_EQ(fit.size(), 16U * 3);
  for (std::size_t i = 0; i < fit.size(); ++i) {
    ASSERT_EQ(fit[i].size(), Size(heads.n_heads * 64));
    const float* from =
        run.data->samples()[i % 3 % 2].recent.query(static_cast<std::int64_t>(i / 3));
    EXPECT_TRUE(std::equal(from + 64, from + 128, fit[i].begin() + 64));             // head 0, g 1
    EXPECT_TRUE(std::equal(from + 3 * 64, from + 4 * 64, fit[i].begin() + 7 * 64));  // head 1, g 3
  }
}

// --- against the host's methods over the same rows
// ------------------------------------------------

// A session of one sequence of the batch.
class HostSession {
 public:
  HostSession(const CapturedRun& run, int sequence, const std::string& spec)
      : rows_(run.sizes.n_layers, run.sizes.heads, run.n_tokens) {
    const HeadGeometry& heads = run.sizes.heads;
    const std::size_t dim = Size(heads.head_dim), width = Size(heads.n_kv_heads) * dim;
    std::vector<float> k(Size(run.n_tokens) * width), v(k.size());
    for (std::int32_t layer = 0; layer < run.sizes.n_layers; ++layer) {
      for (std::int64_t i = 0; i < run.n_tokens; ++i) {
        for (std::int32_t h = 0; h < heads.n_kv_heads; ++h) {
          const Half* row = run.Row(layer, sequence * heads.n_kv_heads + h, i);
          for (std::size_t j = 0; j < dim; ++j) {
            const std::size_t at = Size(i) * width + Size(h) * dim + j;
            k[at] = HalfToFloat(row[j]);
            v[at] = HalfToFloat(row[dim + j]);
          }
        }
      }
      rows_.Write(layer, 0, run.n_tokens, k.data(), v.data());
    }
    rows_.Commit(run.n_tokens);
    queries_ = run.data->samples();  // requires the capture's heads and layers
    MethodSpec parsed = MethodSpec::Parse(spec);
    parsed.options["min"] = "0";
    parsed.options["k"] = std::to_string(kK);
    method_ = MakeMethod(parsed, {.rows = &rows_, .backend = backend_.get(), .queries = &queries_});
    method_->BuildIndex(run.n_tokens);
  }

  void Attend(std::int32_t layer, const std::vector<float>& q) {
    std::vector<float> out(q.size());
    method_->Attend(layer, rows_.n_tokens(), q.data(), out.data());
  }
  AttendedTokens attended(std::int32_t kv_head) const { return method_->attended(kv_head); }

 private:
  std::unique_ptr<Backend> backend_ = MakeBackend("cpu", 1);
  RowStore rows_;
  std::vector<LayerQueries> queries_;
  std::unique_ptr<Method> method_;
};

// Exact scores of what a query head attends, largest first.
std::vector<float> ScoresOf(const CapturedRun& run, std::int32_t layer, std::int32_t head,
                            const float* q, std::int32_t g, std::span<const std::int32_t> tokens,
                            std::span<const std::uint16_t> mask) {
  std::vector<float> scores;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if ((mask[i] >> g & 1) == 0) continue;
    const Half* key = run.Row(layer, head, tokens[i]);
    double score = 0;
    for (std::int32_t j = 0; j < run.sizes.heads.head_dim; ++j) {
      score += static_cast<double>(q[j]) * HalfToFloat(key[j]);
    }
    scores.push_back(static_cast<float>(score));
  }
  std::ranges::sort(scores, std::greater<>());
  return scores;
}

// kScores: tokens with equally good scores, where these are floats added up in another order.
// kNearly: as many tokens for each query head, of which two may be others.
enum class Equal { kTokens, kScores, kNearly };

// What head h attended in the last step.
void ExpectWinnersOf(const CapturedRun& run, std::int32_t layer, std::int32_t h,
                     const std::vector<float>& q, const AttendedTokens& expected, Equal equal) {
  const cuda::Attended& list = run.attention.attended();
  const std::int32_t count = ToHost(list.count + h, 1).front();
  ASSERT_FALSE(expected.tokens.empty());
  ASSERT_GE(count, 0);
  const auto tokens = ToHost(list.tokens + h * list.capacity, Size(count));
  const auto mask = ToHost(list.mask + h * list.capacity, Size(count));
  if (equal == Equal::kTokens) {
    ASSERT_EQ(tokens, std::vector<std::int32_t>(expected.tokens.begin(), expected.tokens.end()));
    ASSERT_EQ(mask, std::vector<std::uint16_t>(expected.mask.begin(), expected.mask.end()));
    return;
  }
  const std::int32_t group = run.sizes.heads.group();
  for (std::int32_t g = 0; g < group; ++g) {
    const float* of_list = q.data() + Size((h * group + g) * run.sizes.heads.head_dim);
    const auto scores = ScoresOf(run, layer, h, of_list, g, tokens, mask);
    const auto wanted = ScoresOf(run, layer, h, of_list, g, expected.tokens, expected.mask);
    ASSERT_EQ(scores.size(), wanted.size());
    if (equal == Equal::kScores) {
      EXPECT_TRUE(Near(scores, wanted, 1e-5));
      continue;
    }
    std::vector<float> others;
    std::ranges::set_difference(scores, wanted, std::back_inserter(others), std::greater<>());
    EXPECT_LE(others.size(), 2U) << "query head " << g;
  }
}

void ExpectHostWinners(CapturedRun* run, const std::string& spec, Equal equal = Equal::kTokens) {
  std::vector<std::unique_ptr<HostSession>> hosts;
  for (int s = 0; s < run->sizes.batch; ++s) {
    hosts.push_back(std::make_unique<HostSession>(*run, s, spec));
  }
  const std::int32_t n_kv = run->sizes.heads.n_kv_heads;
  const std::int64_t width = std::int64_t{run->sizes.heads.n_heads} * run->sizes.heads.head_dim;
  for (int step = 0; step < 2; ++step) {
    for (std::int32_t layer = 0; layer < run->sizes.n_layers; ++layer) {
      run->Record(layer, run->stream.get());
      run->stream.Wait();
      const auto q = ToHost(run->q.data(), run->q.size());
      for (std::int32_t h = 0; h < run->sizes.n_heads(); ++h) {
        SCOPED_TRACE(testing::Message() << spec << (run->place.on_host ? ", host" : ", HBM")
                                        << ", batch " << run->sizes.batch << ", layer " << layer
                                        << ", head " << h << ", step " << step);
        HostSession& host = *hosts[Size(h / n_kv)];
        const auto first = q.begin() + h / n_kv * width;
        if (h % n_kv == 0) host.Attend(layer, {first, first + width});
        ExpectWinnersOf(*run, layer, h, q, host.attended(h % n_kv), equal);
      }
    }
    run->keys->NextStep(run->stream.get());
  }
}

// One tile: the statistics of the host are those of the capture, layer by layer and head by head.
TEST_F(CudaStep, CapturedStatisticsAreTheHosts) {
  const TempDir folder;
  const std::string path = WriteCapture(folder);
  for (const bool on_host : {false, true}) {
    for (const char* spec :
         {"fathom:bits=28", "fathom:budget=48,preset=paper,basis=raw", "double-sparsity:c=20"}) {
      const std::string device(std::string(spec).substr(0, std::string(spec).find(",basis")));
      CapturedRun run(path, kHeads, 2, 1, kTile, device, on_host);
      EXPECT_FALSE(run.index->is_random());
      ExpectHostWinners(&run, spec);
    }
  }
}

// Tables that need no statistics, repeated: equal scores go to the smaller token on both sides.
TEST_F(CudaStep, CapturedTablesRepeat) {
  const TempDir folder;
  const std::string path = WriteCapture(folder);
  for (const bool on_host : {false, true}) {
    for (const char* spec : {"sparq:r=16", "thumbnail", "full4"}) {
      CapturedRun run(path, kHeads, 2, 2, 1300, spec, on_host);
      EXPECT_FALSE(run.index->is_random());
      ExpectHostWinners(&run, spec);
    }
    CapturedRun run(path, kHeads, 2, 2, 1300, "exact", on_host);
    EXPECT_FALSE(run.index->is_random());
    ExpectHostWinners(&run, "exact", Equal::kScores);
  }
}

// Whose winners are whole chunks here, not on the host: the table itself.
TEST_F(CudaStep, CapturedLandmarksAreMeans) {
  const TempDir folder;
  const CapturedRun run(WriteCapture(folder), kHeads, 2, 2, 1300, "landmark", true);
  EXPECT_FALSE(run.index->is_random());
  const auto* table = reinterpret_cast<const Half*>(run.arena.data());
  const std::int64_t n_chunks = 1300 / kBlockTokens * kBlockTokens / 8, cap = 1024;
  for (std::int32_t h = 0; h < 4; ++h) {
    for (std::int64_t c = 0; c < n_chunks; ++c) {
      for (std::int64_t j = 0; j < 64; ++j) {
        float sum = 0;
        for (std::int64_t i = 8 * c; i < 8 * c + 8; ++i) sum += HalfToFloat(run.Row(0, h, i)[j]);
        ASSERT_EQ(table[(h * cap + c) * 64 + j], FloatToHalf(sum / 8)) << "chunk " << c;
      }
    }
  }
}

// The bundled model's keys, one tile of 15 blocks.
TEST_F(CudaStep, CapturedKeysOfAModel) {
  const std::string path = std::string(FATHOM_SOURCE_DIR) + "/tests/data/capture-960.safetensors";
  const HeadGeometry heads = CaptureFile(path).geometry().heads;
  for (const char* spec : {"fathom:bits=28", "sparq:r=32", "double-sparsity"}) {
    CapturedRun run(path, heads, 1, 1, 960, spec, true);
    ExpectHostWinners(&run, spec);
  }
}

// Words of planes as the arena has them: blocks recur after a tile, the second sequence begins in
// the middle of one.
TEST_F(CudaStep, CapturedPlanesRepeat) {
  const TempDir folder;
  const std::string path = WriteCapture(folder);
  for (const char* spec : {"fathom:bits=28", "fathom:budget=48,preset=paper"}) {
    SCOPED_TRACE(spec);
    const CapturedRun run(path, kHeads, 2, 2, 1300, spec, true);
    const std::int64_t cap = run.place.cap_blocks(), planes = 64 * kPlanes;
    const auto* words = reinterpret_cast<const std::uint64_t*>(run.arena.data());
    const auto word = [&](std::int64_t head, std::int64_t plane, std::int64_t block) {
      return words[(head * planes + plane) * cap + block];
    };
    std::int64_t changes = 0;
    for (std::int64_t kv = 0; kv < 2; ++kv) {
      for (std::int64_t p = 0; p < planes; ++p) {
        for (std::int64_t b = 0; b < 1300 / kBlockTokens; ++b) {
          ASSERT_EQ(word(kv, p, b), word(kv, p, b % kTileBlocks));
          ASSERT_EQ(word(2 + kv, p, b), word(kv, p, (b + run.shift()) % kTileBlocks));
          changes += word(kv, p, b) != word(kv, p, 0) ? 1 : 0;
        }
      }
    }
    EXPECT_GT(changes, 1000);
  }
}

// Synthetic keys in the same frame: the scans that see them find most of what a query looks for.
TEST_F(CudaStep, SyntheticStepsFindTheirKeys) {
  constexpr std::int64_t kTokens = 1300, kKeep = kK - kAlwaysKept;
  for (const char* spec :
       {"fathom:bits=28", "fathom:budget=48,preset=paper", "sparq:r=16", "landmark"}) {
    for (const bool on_host : {false, true}) {
      SCOPED_TRACE(testing::Message() << spec << (on_host ? ", host" : ", HBM"));
      CapturedRun run("", kHeads, 2, 2, kTokens, spec, on_host);
      const bool own = std::string(spec).starts_with("fathom");
      EXPECT_EQ(run.index->is_random(), !own);
      const std::vector<float> q = RandomNormal(static_cast<std::int64_t>(run.q.size()), 3);
      run.index->FitMultiplier({{q}});
      cuda::CopyToDevice(run.q.data(), q.data(), q.size(), run.stream.get());
      run.attention.Run(1, run.index->scan(), run.rows->Of(1), run.q.data(), run.out.data(),
                        run.stream.get());
      run.stream.Wait();
      const cuda::Attended& list = run.attention.attended();
      const auto count = ToHost(list.count, Size(run.sizes.n_heads()));
      for (std::int32_t h = 0; h < run.sizes.n_heads(); ++h) {
        ASSERT_GE(count[Size(h)], kK - 8) << "head " << h;
        if (!own) continue;
        const auto rows = HostHalfs(run.rows->Of(1).source.rows, h, kTokens * 128);
        std::vector<std::pair<double, std::int32_t>> best;
        for (std::int32_t i = kSinks; i < kTokens - kWindow; ++i) {
          double score = 0;
          for (std::size_t j = 0; j < 64; ++j) {
            score +=
                static_cast<double>(q[Size(h) * 128 + j]) * HalfToFloat(rows[Size(i) * 128 + j]);
          }
          best.emplace_back(-score, i);
        }
        std::ranges::sort(best);
        const auto tokens = ToHost(list.tokens + h * list.capacity, Size(count[Size(h)]));
        const auto mask = ToHost(list.mask + h * list.capacity, tokens.size());
        std::int64_t found = 0;
        for (std::int64_t i = 0; i < kKeep; ++i) {
          const auto at = std::ranges::lower_bound(tokens, best[Size(i)].second);
          if (at == tokens.end() || *at != best[Size(i)].second) continue;
          found += mask[Size(at - tokens.begin())] & 1;
        }
        EXPECT_GT(found, kKeep / 2) << "head " << h;
      }
    }
  }
}

// Loki maps queries to its basis, on the host in another order of additions.
TEST_F(CudaStep, CapturedPrincipalComponents) {
  const TempDir folder;
  const std::string path = WriteCapture(folder);
  for (const bool on_host : {false, true}) {
    CapturedRun run(path, kHeads, 2, 1, kTile, "loki:r=16", on_host);
    EXPECT_FALSE(run.index->is_random());
    ExpectHostWinners(&run, "loki:r=16", Equal::kNearly);
  }
}

TEST_F(CudaStep, CapturesThatDoNotFitAreRefused) {
  const TempDir folder;
  const auto refusal = [&](HeadGeometry capture, std::int64_t n_tokens,
                           std::int64_t first_sample = 16) -> std::string {
    const std::string path = WriteCapture(folder, capture, n_tokens, first_sample);
    try {
      const cuda::CaptureData data(path, ShapeOf(kHeads, 2));
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUsage);
      return error.what();
    }
    return "";
  };
  EXPECT_NE(refusal({4, 2, 32}, kTile).find("heads of 32 channels"), std::string::npos);
  EXPECT_NE(refusal(kHeads, 255).find("255 tokens"), std::string::npos);
  EXPECT_NE(refusal(kHeads, 300, 256).find("before token 256"), std::string::npos);
  EXPECT_EQ(refusal(kHeads, 300, 255), "");
  EXPECT_EQ(refusal(kHeads, 256), "");
}

}  // namespace
}  // namespace fathom::test
