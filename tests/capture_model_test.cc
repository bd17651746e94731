// SPDX-License-Identifier: MIT
// Captures of the bundled model: what they hold is what a session computes.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <map>

#include "base/half.h"
#include "fathom/fathom.h"
#include "memory/safetensors.h"
#include "support/compare.h"
#include "support/gguf_fixture.h"
#include "support/temp_dir.h"

namespace fathom {
namespace {

const std::string kFolder = std::string(FATHOM_SOURCE_DIR) + "/models/";
constexpr std::int64_t kTokens = 600;

class CaptureModelTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    shared_model = Model::Open(kFolder + "fathom-recall-15m-q8_0.gguf");
    std::ifstream file(kFolder + "questions/single-needle-4k.txt", std::ios::binary);
    const std::string text((std::istreambuf_iterator<char>(file)), {});
    text_tokens = shared_model->Tokenize(text, false);
    ASSERT_GT(text_tokens.size(), static_cast<std::size_t>(kTokens));
    text_tokens.resize(kTokens);
  }
  static void TearDownTestSuite() { shared_model.reset(); }

  CaptureOptions Options(const std::string& name = "c.safetensors") const {
    CaptureOptions options;
    options.path = (dir_.path() / name).string();
    options.positions = 40;
    options.stats_every = 9;
    options.text = "single-needle-4k.txt";
    return options;
  }

  // Everything of a layer as the observer of a session of its own sees it.
  struct Observed {
    std::vector<float> q, k, v;
  };
  static std::map<std::int32_t, Observed> Observe(std::int32_t chunk) {
    std::map<std::int32_t, Observed> layers;
    const HeadGeometry& heads = shared_model->info().heads;
    SessionOptions options;
    options.ctx_size = kTokens;
    options.method = "dense";
    options.chunk = chunk;
    options.prefill_observer = [&](std::int32_t layer, std::int64_t first, std::int64_t n,
                                   const float* q, const float* k, const float* v) {
      Observed& seen = layers[layer];
      const std::int64_t width = std::int64_t{heads.n_heads} * heads.head_dim;
      const std::int64_t kv_width = std::int64_t{heads.n_kv_heads} * heads.head_dim;
      EXPECT_EQ(static_cast<std::int64_t>(seen.q.size()), first * width);
      seen.q.insert(seen.q.end(), q, q + n * width);
      seen.k.insert(seen.k.end(), k, k + n * kv_width);
      seen.v.insert(seen.v.end(), v, v + n * kv_width);
    };
    Session session(shared_model, options);
    session.Prefill(text_tokens);
    return layers;
  }

  static void ExpectError(const std::function<void()>& action, ErrorCode code,
                          const std::string& part) {
    try {
      action();
      ADD_FAILURE() << "no error where it should say " << part;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  }

  static std::shared_ptr<const Model> shared_model;
  static std::vector<Token> text_tokens;
  test::TempDir dir_;
};
std::shared_ptr<const Model> CaptureModelTest::shared_model;
std::vector<Token> CaptureModelTest::text_tokens;

// Queries at the positions, from those of all tokens.
std::vector<float> At(const std::vector<float>& q, const std::vector<std::int64_t>& positions,
                      std::int64_t width) {
  std::vector<float> out;
  for (const std::int64_t p : positions) {
    out.insert(out.end(), q.begin() + p * width, q.begin() + (p + 1) * width);
  }
  return out;
}

TEST_F(CaptureModelTest, HoldsWhatTheSessionComputes) {
  const HeadGeometry& heads = shared_model->info().heads;
  const std::int64_t kv_width = std::int64_t{heads.n_kv_heads} * heads.head_dim;
  const std::int64_t width = std::int64_t{heads.n_heads} * heads.head_dim;
  const auto observed = Observe(512);
  SessionOptions session_options;
  session_options.ctx_size = kTokens;
  session_options.method = "dense";
  Session session(shared_model, session_options);
  session.Prefill(text_tokens);
  for (const CaptureType type : {CaptureType::kF32, CaptureType::kBf16}) {
    CaptureOptions options = Options();
    options.type = type;
    options.overwrite = true;
    const CaptureReport report = RunCapture(shared_model, text_tokens, options);
    EXPECT_EQ(report.type, type);
    EXPECT_EQ(report.file_bytes,
              static_cast<std::int64_t>(std::filesystem::file_size(options.path)));
    const CaptureFile file(options.path);
    const CaptureGeometry& g = file.geometry();
    EXPECT_EQ(g.n_tokens, kTokens);
    EXPECT_EQ(g.heads, heads);
    ASSERT_EQ(static_cast<std::int32_t>(g.layers.size()), shared_model->info().n_layers);
    ASSERT_EQ(g.q_positions.size(), 40U);
    EXPECT_EQ(g.q_positions.front(), 560);
    EXPECT_EQ(g.q_positions.back(), 599);
    ASSERT_EQ(g.stats_positions.size(), 61U);  // 16, 25, ..., 556
    EXPECT_EQ(g.stats_positions.front(), 16);
    EXPECT_EQ(g.stats_positions[1], 25);
    EXPECT_EQ(g.stats_positions.back(), 556);
    EXPECT_EQ(g.architecture, "qwen3");
    EXPECT_EQ(g.has_qk_norm, std::optional(true));
    EXPECT_EQ(g.has_qkv_bias, std::optional(false));
    // bf16 rounds by 2^-9 at most.
    const double bound = type == CaptureType::kF32 ? 0 : 0x1p-9;
    for (const std::int32_t layer : g.layers) {
      std::vector<float> k(kTokens * kv_width), v(kTokens * kv_width);
      file.LoadRows(layer, 0, kTokens, k.data(), v.data());
      std::vector<float> k_rows, v_rows, k_half, v_half;
      for (std::int64_t i = 0; i < kTokens * kv_width; ++i) {
        const auto head = static_cast<std::int32_t>(i % kv_width / heads.head_dim);
        const Half* row = session.rows().rows(layer, head) + i / kv_width * 2 * heads.head_dim +
                          i % heads.head_dim;
        k_rows.push_back(HalfToFloat(row[0]));
        v_rows.push_back(HalfToFloat(row[heads.head_dim]));
        const auto at = static_cast<std::size_t>(i);
        k_half.push_back(HalfToFloat(FloatToHalf(k[at])));
        v_half.push_back(HalfToFloat(FloatToHalf(v[at])));
      }
      EXPECT_TRUE(test::Near(k_half, k_rows, bound)) << layer;
      EXPECT_TRUE(test::Near(v_half, v_rows, bound)) << layer;
      EXPECT_TRUE(test::Near(file.LoadQueries(layer),
                             At(observed.at(layer).q, g.q_positions, width), bound))
          << layer;
      EXPECT_TRUE(test::Near(file.LoadStatsQueries(layer),
                             At(observed.at(layer).q, g.stats_positions, width), bound))
          << layer;
    }
  }
}

TEST_F(CaptureModelTest, ChunkSizeDoesNotMatter) {
  CaptureOptions options = Options("whole.safetensors");
  options.type = CaptureType::kF32;
  RunCapture(shared_model, text_tokens, options);
  const CaptureFile whole(options.path);
  options.path = Options("pieces.safetensors").path;
  options.chunk = 37;
  RunCapture(shared_model, text_tokens, options);
  const CaptureFile pieces(options.path);
  EXPECT_EQ(whole.geometry().q_positions, pieces.geometry().q_positions);
  EXPECT_EQ(whole.geometry().stats_positions, pieces.geometry().stats_positions);
  // ggml quantizes activations to 8 bits: a difference in the last bit of a sum can move one by
  // 1/127 of its block's maximum, and layers add to that. Values at a wrong position differ by
  // their own size.
  constexpr double kNoise = 0.05;
  const std::size_t row = static_cast<std::size_t>(whole.geometry().heads.n_kv_heads) *
                          static_cast<std::size_t>(whole.geometry().heads.head_dim);
  for (const std::int32_t layer : whole.geometry().layers) {
    std::vector<float> k(kTokens * row), v(kTokens * row), k2(kTokens * row), v2(kTokens * row);
    whole.LoadRows(layer, 0, kTokens, k.data(), v.data());
    pieces.LoadRows(layer, 0, kTokens, k2.data(), v2.data());
    EXPECT_TRUE(test::Near(k2, k, kNoise)) << layer;
    EXPECT_TRUE(test::Near(v2, v, kNoise)) << layer;
    EXPECT_TRUE(test::Near(pieces.LoadQueries(layer), whole.LoadQueries(layer), kNoise)) << layer;
    EXPECT_TRUE(test::Near(pieces.LoadStatsQueries(layer), whole.LoadStatsQueries(layer), kNoise))
        << layer;
  }
}

TEST_F(CaptureModelTest, DefaultsAndChosenLayers) {
  CaptureOptions options = Options();
  options.stats_every = 0;
  options.layers = {4, 1, 4};
  const CaptureReport report = RunCapture(shared_model, text_tokens, options);
  EXPECT_EQ(report.type, CaptureType::kBf16);  // no q/k/v biases
  EXPECT_NE(report.type_reason.find("no q/k/v biases"), std::string::npos);
  EXPECT_EQ(report.stats_every, 1);
  EXPECT_EQ(report.geometry.stats_positions.size(), 544U);  // 16 .. 559
  const CaptureFile file(options.path);
  EXPECT_EQ(file.geometry().layers, (std::vector<std::int32_t>{1, 4}));
  EXPECT_EQ(file.geometry().model, report.geometry.model);
}

TEST_F(CaptureModelTest, ModelsWithBiasesAreKeptInF32) {
  for (const bool biases : {false, true}) {
    testing::TinyModel tiny;
    tiny.architecture = "qwen2";
    tiny.qkv_bias = biases;
    const std::string path = (dir_.path() / "tiny.gguf").string();
    ASSERT_TRUE(testing::WriteTinyModel(tiny, path));
    const auto model = Model::Open(path);
    ASSERT_EQ(model->info().has_qkv_bias, biases);
    CaptureOptions options = Options();
    options.overwrite = true;
    const CaptureReport report = RunCapture(model, std::vector<Token>(100, Token{65}), options);
    EXPECT_EQ(report.type, biases ? CaptureType::kF32 : CaptureType::kBf16);
    EXPECT_EQ(report.type_reason.find("no q/k/v biases") == std::string::npos, biases);
    const CaptureFile file(options.path);
    EXPECT_EQ(file.geometry().has_qkv_bias, std::optional(biases));
    EXPECT_EQ(file.geometry().has_qk_norm, std::optional(false));
    EXPECT_EQ(file.geometry().heads, (HeadGeometry{4, 2, 16}));
    EXPECT_EQ(file.LoadQueries(1).size(), 40U * 64);
  }
}

TEST_F(CaptureModelTest, BadOptionsAndFailuresLeaveNoFile) {
  const auto run = [&](const std::function<void(CaptureOptions&)>& edit, std::size_t n = kTokens) {
    return [this, edit, n] {
      CaptureOptions options = Options();
      edit(options);
      RunCapture(shared_model, std::span(text_tokens).first(n), options);
    };
  };
  ExpectError(run([](CaptureOptions& o) { o.path = ""; }), ErrorCode::kUsage, "no file");
  ExpectError(run([](CaptureOptions& o) { o.positions = 0; }), ErrorCode::kUsage, "0 positions");
  ExpectError(run([](CaptureOptions& o) { o.positions = 584; }), ErrorCode::kUsage, "600 tokens");
  ExpectError(
      run([](CaptureOptions& o) { o.positions = std::numeric_limits<std::int64_t>::max(); }),
      ErrorCode::kUsage, "600 tokens");
  ExpectError(run([](CaptureOptions&) {}, 0), ErrorCode::kUsage, "0 tokens");
  ExpectError(run([](CaptureOptions& o) { o.stats_every = -1; }), ErrorCode::kUsage, "-1");
  ExpectError(run([](CaptureOptions& o) { o.layers = {6}; }), ErrorCode::kUsage, "layers 0 to 5");
  ExpectError(run([](CaptureOptions& o) { o.backend = "gpu"; }), ErrorCode::kUsage, "gpu");
  ExpectError(
      [&] {
        CaptureOptions options = Options();
        options.chunk = 64;
        RunCapture(shared_model, text_tokens, options,
                   [](std::int64_t done, std::int64_t) { return done < 100; });
      },
      ErrorCode::kCancelled, "128 of 600");
  EXPECT_TRUE(std::filesystem::is_empty(dir_.path()));
  dir_.Write("c.safetensors", "mine");
  ExpectError(run([](CaptureOptions&) {}), ErrorCode::kUsage, "exists");
  EXPECT_EQ(std::filesystem::file_size(Options().path), 4U);
}

}  // namespace
}  // namespace fathom
