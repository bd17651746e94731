// SPDX-License-Identifier: MIT
// Capture files without a model: round trips, files of other stacks, and every shape that is wrong.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <thread>

#include "fathom/capture.h"
#include "fathom/error.h"
#include "memory/safetensors.h"
#include "support/random_data.h"
#include "support/temp_dir.h"

namespace fathom {
namespace {

constexpr std::int64_t kTokens = 100;
constexpr HeadGeometry kHeads = {4, 2, 16};

// A safetensors file by hand: shapes and, where they matter, values.
struct Fake {
  TensorType type = TensorType::kF32;
  std::vector<std::int64_t> shape;
  std::vector<float> floats = {};  // empty: zeros
  std::vector<std::int64_t> integers = {};
};
using Fakes = std::map<std::string, Fake>;

class CaptureTest : public testing::Test {
 protected:
  std::string Path() const { return (dir_.path() / "c.safetensors").string(); }

  // Layers 2 and 5 with q, k, v and q_stats alone, as another stack would write them.
  static Fakes Minimal() {
    Fakes fakes;
    for (const char* layer : {"layers.2.", "layers.5."}) {
      fakes[layer + std::string("q")] = {TensorType::kF32, {8, 4, 16}};
      fakes[layer + std::string("k")] = {TensorType::kF16, {kTokens, 2, 16}};
      fakes[layer + std::string("v")] = {TensorType::kBf16, {kTokens, 2, 16}};
      fakes[layer + std::string("q_stats")] = {TensorType::kF32, {19, 4, 16}};
    }
    return fakes;
  }
  static Fakes WithPositions() {
    Fakes fakes = Minimal();
    for (const char* layer : {"layers.2.", "layers.5."}) {
      std::vector<std::int64_t> q, stats;
      for (std::int64_t i = 0; i < 8; ++i) q.push_back(60 + 5 * i);
      for (std::int64_t i = 0; i < 19; ++i) stats.push_back(3 * i);
      fakes[layer + std::string("q_positions")] = {TensorType::kI64, {8}, {}, q};
      fakes[layer + std::string("q_stats_positions")] = {TensorType::kI64, {19}, {}, stats};
    }
    return fakes;
  }

  void WriteFakes(const Fakes& fakes, const std::map<std::string, std::string>& metadata) const {
    std::vector<SafetensorsSpec> specs;
    for (const auto& [name, fake] : fakes) specs.push_back({name, fake.type, fake.shape});
    SafetensorsWriter writer(Path(), specs, metadata);
    std::size_t i = 0;
    for (const auto& [name, fake] : fakes) {
      std::size_t n = 1;
      for (const std::int64_t size : fake.shape) n *= static_cast<std::size_t>(size);
      if (fake.type == TensorType::kI64) {
        std::vector<std::int64_t> values = fake.integers;
        values.resize(n);
        writer.WriteIntegers(i++, 0, values);
      } else {
        std::vector<float> values = fake.floats;
        values.resize(n);
        writer.WriteFloats(i++, 0, values);
      }
    }
    writer.Commit();
  }
  CaptureFile Open(const Fakes& fakes,
                   const std::map<std::string, std::string>& metadata = {}) const {
    WriteFakes(fakes, metadata);
    return CaptureFile(Path());
  }

  static void ExpectError(const std::function<void()>& action, ErrorCode code,
                          const std::vector<std::string>& parts) {
    try {
      action();
      ADD_FAILURE() << "no error where it should say " << parts.front();
    } catch (const Error& error) {
      const std::string message = error.what();
      EXPECT_EQ(error.code(), code) << message;
      for (const std::string& part : parts) {
        EXPECT_NE(message.find(part), std::string::npos) << part << " is not in: " << message;
      }
    }
  }
  void ExpectCorrupt(const Fakes& fakes, const std::vector<std::string>& parts) const {
    ExpectError([&] { Open(fakes); }, ErrorCode::kCorrupt, parts);
  }
  void ExpectShapeError(const std::string& name, std::vector<std::int64_t> shape,
                        std::vector<std::string> parts) const {
    Fakes fakes = WithPositions();
    ASSERT_EQ(fakes.count(name), 1U);
    fakes[name].shape = std::move(shape);
    parts.push_back("layer " + name.substr(7, 1) + ":");
    ExpectCorrupt(fakes, parts);
  }

  test::TempDir dir_;
};

CaptureGeometry TestGeometry() {
  CaptureGeometry g;
  g.n_tokens = kTokens;
  g.heads = kHeads;
  g.layers = {1, 3};
  g.q_positions = {90, 91, 97, 99};
  g.stats_positions = {0, 16, 33, 89};
  g.model = "test model";
  g.architecture = "qwen3";
  g.rope = "neox";
  g.text = "text.txt";
  g.has_qk_norm = true;
  g.has_qkv_bias = false;
  return g;
}

struct Data {
  std::vector<float> q = test::RandomNormal(kTokens * 4 * 16, 1);
  std::vector<float> k = test::RandomNormal(kTokens * 2 * 16, 2);
  std::vector<float> v = test::RandomNormal(kTokens * 2 * 16, 3);
};

// All layers in chunks of `chunk` tokens; layer l has the data times l + 1.
void WriteAll(CaptureWriter& writer, const Data& data, std::int64_t chunk) {
  for (std::int64_t first = 0; first < kTokens; first += chunk) {
    const std::int64_t n = std::min(chunk, kTokens - first);
    for (std::int32_t layer = 0; layer < 5; ++layer) {
      const auto scaled = [&](const std::vector<float>& x, std::int64_t width) {
        std::vector<float> part(x.begin() + first * width, x.begin() + (first + n) * width);
        for (float& value : part) value *= static_cast<float>(layer + 1);
        return part;
      };
      writer.Write(layer, first, n, scaled(data.q, 64).data(), scaled(data.k, 32).data(),
                   scaled(data.v, 32).data());
    }
  }
}

TEST_F(CaptureTest, RoundTripWhateverTheChunk) {
  const Data data;
  for (const CaptureType type : {CaptureType::kF32, CaptureType::kBf16}) {
    for (const std::int64_t chunk : {1, 7, 100}) {
      {
        CaptureWriter writer(Path(), TestGeometry(), type);
        WriteAll(writer, data, chunk);
        writer.Commit();
      }
      const CaptureFile file(Path());
      const CaptureGeometry& g = file.geometry();
      EXPECT_EQ(g.n_tokens, kTokens);
      EXPECT_EQ(g.heads, kHeads);
      EXPECT_EQ(g.layers, (std::vector<std::int32_t>{1, 3}));
      EXPECT_EQ(g.q_positions, TestGeometry().q_positions);
      EXPECT_EQ(g.stats_positions, TestGeometry().stats_positions);
      EXPECT_TRUE(file.positions_known());
      EXPECT_EQ(g.model, "test model");
      EXPECT_EQ(g.text, "text.txt");
      EXPECT_EQ(g.has_qk_norm, std::optional(true));
      EXPECT_EQ(g.has_qkv_bias, std::optional(false));
      const auto stored = [&](float x) {
        return type == CaptureType::kF32 ? x : Bf16ToFloat(FloatToBf16(x));
      };
      std::vector<float> k(60 * 32), v(60 * 32);
      file.LoadRows(3, 40, 60, k.data(), v.data());
      for (std::size_t i = 0; i < k.size(); ++i) {
        ASSERT_EQ(k[i], stored(data.k[40 * 32 + i] * 4.0F)) << i;
        ASSERT_EQ(v[i], stored(data.v[40 * 32 + i] * 4.0F)) << i;
      }
      const std::vector<float> q = file.LoadQueries(1);
      const std::vector<float> stats = file.LoadStatsQueries(1);
      ASSERT_EQ(q.size(), 4U * 64);
      ASSERT_EQ(stats.size(), 4U * 64);
      for (std::size_t i = 0; i < q.size(); ++i) {
        const auto at = [&](const std::vector<std::int64_t>& positions) {
          return data.q[static_cast<std::size_t>(positions[i / 64]) * 64 + i % 64] * 2.0F;
        };
        ASSERT_EQ(q[i], stored(at(g.q_positions))) << i;
        ASSERT_EQ(stats[i], stored(at(g.stats_positions))) << i;
      }
    }
  }
}

TEST_F(CaptureTest, FilesOfOtherStacks) {
  Fakes fakes = Minimal();
  fakes["tokens"] = {TensorType::kI64, {kTokens}};  // what we do not know is left alone
  const CaptureFile file = Open(fakes, {{"format", "pt"}});
  const CaptureGeometry& g = file.geometry();
  EXPECT_FALSE(file.positions_known());
  EXPECT_EQ(g.layers, (std::vector<std::int32_t>{2, 5}));
  EXPECT_EQ(g.q_positions, (std::vector<std::int64_t>{92, 93, 94, 95, 96, 97, 98, 99}));
  ASSERT_EQ(g.stats_positions.size(), 19U);
  for (std::int64_t i = 0; i < 19; ++i) {  // 76 positions from 16 to 91
    EXPECT_EQ(g.stats_positions[static_cast<std::size_t>(i)], 16 + 4 * i);
  }
  EXPECT_EQ(g.model, "");
  EXPECT_EQ(g.has_qk_norm, std::nullopt);
  EXPECT_EQ(g.has_qkv_bias, std::nullopt);
  // Too many to leave out the first 16.
  for (const char* name : {"layers.2.q_stats", "layers.5.q_stats"}) fakes[name].shape[0] = 92;
  const auto all = Open(fakes).geometry().stats_positions;
  for (std::int64_t i = 0; i < 92; ++i) EXPECT_EQ(all[static_cast<std::size_t>(i)], i);
}

TEST_F(CaptureTest, PositionsMayBeI64AndAnywhere) {
  const CaptureFile file = Open(WithPositions());
  EXPECT_TRUE(file.positions_known());
  EXPECT_EQ(file.geometry().q_positions.front(), 60);
  EXPECT_EQ(file.geometry().q_positions.back(), 95);
  EXPECT_EQ(file.geometry().stats_positions.back(), 54);
}

TEST_F(CaptureTest, EveryShapeIsChecked) {
  ExpectShapeError("layers.2.q", {8, 4}, {"layers.2.q ", "[8, 4]"});
  ExpectShapeError("layers.2.q", {0, 4, 16}, {"layers.2.q ", "n >= 1"});
  ExpectShapeError("layers.2.q_stats", {0, 4, 16}, {"layers.2.q_stats", "n >= 1"});
  ExpectShapeError("layers.2.q", {101, 4, 16}, {"layers.2.q ", "101 positions", "100 tokens"});
  ExpectShapeError("layers.2.q_stats", {93, 4, 16}, {"q_stats 93", "100 tokens"});
  ExpectShapeError("layers.2.q", {8, 3, 16}, {"3 query heads and 2 KV heads", "multiple"});
  ExpectShapeError("layers.2.q", {8, 34, 16}, {"17 query heads per KV head", "at most 16"});
  ExpectShapeError("layers.2.q", {8, 4, 32}, {"layers.2.q ", "[8, 4, 16]"});
  ExpectShapeError("layers.2.q_stats", {19, 2, 16}, {"layers.2.q_stats", "[19, 4, 16]"});
  ExpectShapeError("layers.2.k", {kTokens, 2, 24}, {"head_dim is 24", "multiple of 16 up to 256"});
  ExpectShapeError("layers.2.k", {kTokens, 2, 272}, {"head_dim is 272"});
  ExpectShapeError("layers.2.k", {kTokens, 0, 16}, {"0 KV heads"});
  ExpectShapeError("layers.2.v", {99, 2, 16}, {"layers.2.v", "[99, 2, 16]", "[100, 2, 16]"});
  ExpectShapeError("layers.5.q", {7, 4, 16}, {"layers.5.q ", "by layer 2", "[8, 4, 16]"});
  ExpectShapeError("layers.5.k", {99, 2, 16}, {"layers.5.k", "[100, 2, 16]"});
  ExpectShapeError("layers.5.v", {kTokens, 1, 16}, {"layers.5.v", "[100, 2, 16]"});
  ExpectShapeError("layers.5.q_stats", {18, 4, 16}, {"layers.5.q_stats", "[19, 4, 16]"});
  ExpectShapeError("layers.5.q_positions", {7}, {"layers.5.q_positions", "[8]"});
  ExpectShapeError("layers.2.q_stats_positions", {19, 1}, {"layers.2.q_stats_positions", "[19]"});
}

TEST_F(CaptureTest, TypesAndMissingTensors) {
  for (const char* part : {"q", "k", "v", "q_stats"}) {
    Fakes fakes = Minimal();
    fakes[std::string("layers.5.") + part].type = TensorType::kI64;
    ExpectCorrupt(fakes, {"layer 5", std::string("layers.5.") + part, "I64"});
    fakes.erase(std::string("layers.5.") + part);
    ExpectCorrupt(fakes, {"layer 5", std::string("layers.5.") + part, "missing"});
  }
  Fakes fakes = WithPositions();
  fakes["layers.5.q_positions"].type = TensorType::kF32;
  ExpectCorrupt(fakes, {"layer 5", "layers.5.q_positions", "F32"});
  fakes.erase("layers.5.q_positions");
  ExpectCorrupt(fakes, {"layer 5", "layers.5.q_positions", "missing"});
  ExpectCorrupt({{"weight", {TensorType::kF32, {4}}}}, {"not a capture"});
}

TEST_F(CaptureTest, PositionsAreChecked) {
  const auto expect = [&](const std::string& name, std::size_t i, std::int64_t value,
                          const std::vector<std::string>& parts) {
    Fakes fakes = WithPositions();
    fakes[name].integers[i] = value;
    ExpectCorrupt(fakes, parts);
  };
  expect("layers.2.q_positions", 7, 100, {"layer 2", "q_positions[7] is 100", "below 100"});
  expect("layers.2.q_positions", 3, 70, {"q_positions[3] is 70", "after 70", "ascend"});
  expect("layers.2.q_stats_positions", 0, -1, {"q_stats_positions[0] is -1"});
  expect("layers.2.q_stats_positions", 18, 60, {"q_stats_positions[18] is 60", "below 60"});
  expect("layers.5.q_positions", 7, 96, {"layer 5", "layers.5.q_positions", "differs"});
  expect("layers.5.q_stats_positions", 0, 1, {"layers.5.q_stats_positions", "differs"});
}

TEST_F(CaptureTest, MetadataIsChecked) {
  ExpectError(
      [&] {
        Open(Minimal(), {{"fathom_capture", "2"}});
      },
      ErrorCode::kUnsupported, {"version '2'"});
  ExpectError(
      [&] {
        Open(Minimal(), {{"has_qk_norm", "yes"}});
      },
      ErrorCode::kCorrupt, {"has_qk_norm", "'yes'"});
}

TEST_F(CaptureTest, ValuesThatRowsCannotHoldAreNamed) {
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto at = [](std::size_t n, std::size_t index, float value) {
    std::vector<float> x(n);
    x[index] = value;
    return x;
  };
  std::vector<float> k(kTokens * 32), v(kTokens * 32);
  const std::vector<std::string> place = {"layer 5", "head 1", "channel 3"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), place.begin(), place.end());
    return more;
  };
  for (const float bad : {nan, inf, -inf, 65536.0F}) {
    Fakes fakes = WithPositions();
    fakes["layers.5.k"] = {TensorType::kF32, {kTokens, 2, 16}, at(3200, 17 * 32 + 16 + 3, bad)};
    const CaptureFile file = Open(fakes);
    file.LoadRows(2, 0, kTokens, k.data(), v.data());
    file.LoadRows(5, 0, 17, k.data(), v.data());
    ExpectError([&] { file.LoadRows(5, 10, 20, k.data(), v.data()); }, ErrorCode::kCorrupt,
                with({"layers.5.k", "position 17"}));
  }
  for (const float bad : {nan, inf}) {
    Fakes fakes = WithPositions();
    fakes["layers.5.v"] = {TensorType::kF16, {kTokens, 2, 16}, at(3200, 99 * 32 + 16 + 3, bad)};
    fakes["layers.5.q"].floats = at(8 * 64, 2 * 64 + 16 + 3, bad);
    fakes["layers.5.q_stats"].floats = at(19 * 64, 6 * 64 + 16 + 3, bad);
    const CaptureFile file = Open(fakes);
    ExpectError([&] { file.LoadRows(5, 99, 1, k.data(), v.data()); }, ErrorCode::kCorrupt,
                with({"layers.5.v", "position 99"}));
    ExpectError([&] { file.LoadQueries(5); }, ErrorCode::kCorrupt,
                with({"layers.5.q,", "position 70"}));
    ExpectError([&] { file.LoadStatsQueries(5); }, ErrorCode::kCorrupt,
                with({"layers.5.q_stats", "position 18"}));
    EXPECT_EQ(file.LoadQueries(2).size(), 8U * 64);
  }
}

TEST_F(CaptureTest, ReaderRefusesWhatIsNotThere) {
  const CaptureFile file = Open(Minimal());
  std::vector<float> k(kTokens * 32), v(kTokens * 32);
  ExpectError([&] { file.LoadQueries(3); }, ErrorCode::kUsage, {"layer 3", "2 layers, 2 to 5"});
  ExpectError([&] { file.LoadRows(2, 90, 11, k.data(), v.data()); }, ErrorCode::kUsage,
              {"11 tokens from 90", "100"});
  ExpectError([&] { file.LoadRows(2, -1, 1, k.data(), v.data()); }, ErrorCode::kUsage, {"-1"});
  ExpectError([&] { CaptureFile((dir_.path() / "none").string()); }, ErrorCode::kIo, {"none"});
}

TEST_F(CaptureTest, WriterRefusesImpossibleGeometries) {
  const auto expect = [&](const std::function<void(CaptureGeometry&)>& edit,
                          const std::string& part) {
    CaptureGeometry g = TestGeometry();
    edit(g);
    ExpectError([&] { CaptureWriter(Path(), g, CaptureType::kF32); }, ErrorCode::kUsage, {part});
  };
  expect([](CaptureGeometry& g) { g.n_tokens = 0; }, "no tokens");
  expect([](CaptureGeometry& g) { g.heads.n_heads = 3; }, "3 query heads");
  expect([](CaptureGeometry& g) { g.heads.head_dim = 20; }, "head_dim is 20");
  expect([](CaptureGeometry& g) { g.layers = {}; }, "no layers");
  expect([](CaptureGeometry& g) { g.layers = {3, 1}; }, "layer 1");
  expect([](CaptureGeometry& g) { g.q_positions = {}; }, "q_positions is empty");
  expect([](CaptureGeometry& g) { g.q_positions.back() = 100; }, "is 100");
  expect([](CaptureGeometry& g) { g.stats_positions.back() = 90; }, "is 90");
  EXPECT_TRUE(std::filesystem::is_empty(dir_.path()));
}

TEST_F(CaptureTest, WriterRefusesValuesThatCouldNotBeRead) {
  for (const CaptureType type : {CaptureType::kF32, CaptureType::kBf16}) {
    CaptureWriter writer(Path(), TestGeometry(), type);
    Data data;
    const auto write = [&] {
      writer.Write(3, 50, 50, data.q.data(), data.k.data(), data.v.data());
    };
    // Rounds to 65,536 in bf16.
    data.k[7 * 32] = 65450.0F;
    if (type == CaptureType::kBf16) {
      ExpectError(write, ErrorCode::kCorrupt, {"layers.3.k", "head 0", "position 57", "65280"});
    } else {
      write();
    }
    data.k[7 * 32] = 0;
    data.v[0] = std::numeric_limits<float>::quiet_NaN();
    ExpectError(write, ErrorCode::kCorrupt, {"layers.3.v", "position 50"});
    data.v[0] = 0;
    data.q[39 * 64 + 48] = std::numeric_limits<float>::infinity();
    ExpectError(write, ErrorCode::kCorrupt, {"layers.3.q_stats", "head 3", "position 89"});
    // A query that nobody asks for may be anything.
    std::swap(data.q[39 * 64 + 48], data.q[38 * 64 + 48]);
    write();
  }
  EXPECT_TRUE(std::filesystem::is_empty(dir_.path()));
}

TEST_F(CaptureTest, ThreadsReadOneFile) {
  {
    CaptureWriter writer(Path(), TestGeometry(), CaptureType::kBf16);
    WriteAll(writer, Data(), 13);
    writer.Commit();
  }
  const CaptureFile file(Path());
  const std::vector<float> expected = file.LoadQueries(3);
  std::vector<std::vector<float>> got(4);
  std::vector<std::thread> threads;
  threads.reserve(got.size());
  for (auto& mine : got) threads.emplace_back([&] { mine = file.LoadQueries(3); });
  for (std::thread& thread : threads) thread.join();
  for (const auto& mine : got) EXPECT_EQ(mine, expected);
}

}  // namespace
}  // namespace fathom
