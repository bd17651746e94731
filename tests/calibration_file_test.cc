// SPDX-License-Identifier: MIT
// Statistics files: what is saved is opened again bit for bit, and every damage is refused with a
// message that names it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <map>

#include "fathom/calibrate.h"
#include "fathom/error.h"
#include "memory/safetensors.h"
#include "method/calibration_layout.h"
#include "support/calibration_capture.h"
#include "support/temp_dir.h"

namespace fathom {
namespace {

namespace fs = std::filesystem;
using Shape = std::vector<std::int64_t>;

// A tensor to be spoilt; values of all types as doubles.
struct Part {
  TensorType type = TensorType::kF32;
  Shape shape;
  std::vector<double> values;
};
struct Content {
  std::map<std::string, Part> parts;
  std::map<std::string, std::string> metadata;
};

std::string ReadAll(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

Content Load(const std::string& path) {
  const SafetensorsFile file(path, "statistics file");
  Content content;
  content.metadata = file.metadata();
  for (const SafetensorsTensor& tensor : file.tensors()) {
    Part part = {tensor.type, tensor.shape, {}};
    if (tensor.type == TensorType::kF64) {
      part.values.resize(static_cast<std::size_t>(tensor.elements));
      file.ReadDoubles(tensor, 0, tensor.elements, part.values.data());
    } else if (tensor.type == TensorType::kI64) {
      const auto integers = file.ReadIntegers(tensor);
      part.values.assign(integers.begin(), integers.end());
    } else {
      std::vector<float> floats(static_cast<std::size_t>(tensor.elements));
      file.ReadFloats(tensor, 0, tensor.elements, floats.data());
      part.values.assign(floats.begin(), floats.end());
    }
    content.parts[tensor.name] = std::move(part);
  }
  return content;
}

void Store(const std::string& path, const Content& content) {
  std::vector<SafetensorsSpec> specs;
  for (const auto& [name, part] : content.parts) specs.push_back({name, part.type, part.shape});
  SafetensorsWriter writer(path, specs, content.metadata);
  std::size_t i = 0;
  for (const auto& [name, part] : content.parts) {
    std::vector<double> values = part.values;
    std::int64_t n = 1;
    for (const std::int64_t size : part.shape) n *= size;
    values.resize(static_cast<std::size_t>(n));
    if (part.type == TensorType::kF64) {
      writer.WriteDoubles(i, 0, values);
    } else if (part.type == TensorType::kI64) {
      writer.WriteIntegers(i, 0, std::vector<std::int64_t>(values.begin(), values.end()));
    } else {
      writer.WriteFloats(i, 0, std::vector<float>(values.begin(), values.end()));
    }
    ++i;
  }
  writer.Commit();
}

class CalibrationFileTest : public testing::Test {
 protected:
  void SetUp() override {
    test::WriteSyntheticCapture(Path("capture"), 1);
    CalibrateOptions options;
    options.methods = {"fathom:k=64", "exact:k=64,residual=mean"};
    options.budgets = {{"fathom:k=64", 26}};
    options.n_threads = 1;
    made_ = Calibrate(CaptureFile(Path("capture")), options).calibration;
    made_->Save(Path("good"));
    good_ = Load(Path("good"));
  }
  std::string Path(const std::string& name) const { return (dir_.path() / name).string(); }

  void ExpectError(const std::function<void()>& action, ErrorCode code,
                   const std::vector<std::string>& parts) const {
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
  void ExpectRefused(const Content& content, const std::vector<std::string>& parts,
                     ErrorCode code = ErrorCode::kCorrupt) const {
    Store(Path("bad"), content);
    ExpectError([&] { Calibration::Open(Path("bad")); }, code, parts);
  }
  // The good file with one tensor changed.
  void ExpectPartRefused(const std::string& name, const std::function<void(Part*)>& damage,
                         std::vector<std::string> parts) const {
    Content content = good_;
    ASSERT_TRUE(content.parts.contains(name)) << name;
    damage(&content.parts[name]);
    parts.push_back(name);
    ExpectRefused(content, parts);
  }

  test::TempDir dir_;
  std::shared_ptr<const Calibration> made_;
  Content good_;
};

TEST_F(CalibrationFileTest, OpensWhatWasSaved) {
  const auto read = Calibration::Open(Path("good"));
  EXPECT_EQ(read->layers, made_->layers);
  EXPECT_EQ(read->heads, made_->heads);
  EXPECT_EQ(read->n_tokens, made_->n_tokens);
  EXPECT_EQ(read->source, made_->source);
  EXPECT_EQ(read->model, made_->model);
  EXPECT_EQ(read->residual, made_->residual);
  EXPECT_EQ(read->residual.size(), 2U);
  EXPECT_EQ(read->budgets, made_->budgets);
  EXPECT_EQ(read->budgets.size(), 1U);
  std::size_t n_parts = 0;
  for (std::size_t slot = 0; slot < 2; ++slot) {
    for (std::size_t kv = 0; kv < 2; ++kv) {
      std::vector<std::vector<double>> values;
      const auto collect = [&](const std::string&, const Shape&, statistics_file::Rule,
                               const auto& part) { values.emplace_back(part.begin(), part.end()); };
      statistics_file::VisitHead(*made_, slot, kv, collect);
      const auto expected = std::exchange(values, {});
      statistics_file::VisitHead(*read, slot, kv, collect);
      EXPECT_EQ(values, expected);
      for (const auto& part : values) EXPECT_GE(part.size(), 16U);
      n_parts = values.size();
    }
  }
  EXPECT_EQ(n_parts, 3U + 4 * 5 + 2 * 2 + 3 * 8);
  EXPECT_EQ(read->head(1, 1, BasisRule::kBalanced).stats.basis.dim, 16);
  read->Save(Path("again"));
  EXPECT_EQ(ReadAll(Path("again")), ReadAll(Path("good")));
  EXPECT_FALSE(fs::exists(Path("again.partial")));
}

TEST_F(CalibrationFileTest, EveryTensorMustBeThereAndFinite) {
  ASSERT_EQ(good_.parts.size(), 2U * 51 + 3);
  for (const auto& [name, part] : good_.parts) {
    if (name.starts_with("layers.")) {
      Content without = good_;
      without.parts.erase(name);
      ExpectRefused(without, {name, "missing"});
    }
    if (name.starts_with("layers.3.")) continue;  // as layer 1
    const std::size_t last = part.values.size() - 1;
    if (part.type == TensorType::kI64) {
      ExpectPartRefused(name, [](Part* p) { p->values[3] = p->values[4]; },
                        {"each of the channels"});
      ExpectPartRefused(name, [&](Part* p) { p->values[last] = 16; }, {"[1][15] is 16"});
      ExpectPartRefused(name, [](Part* p) { p->values[0] = -1; }, {"[0][0] is no channel"});
    } else {
      ExpectPartRefused(name, [&](Part* p) { p->values[last] = NAN; }, {"is nan"});
      ExpectPartRefused(name, [](Part* p) { p->values[0] = INFINITY; }, {"[0]", "is inf"});
    }
    ExpectPartRefused(name, [](Part* p) { ++p->shape.back(); }, {"shape", "it must be"});
    ExpectPartRefused(name, [](Part* p) { p->shape.push_back(1); }, {"shape", "it must be"});
    const TensorType other = part.type == TensorType::kF64 ? TensorType::kF32 : TensorType::kF64;
    ExpectPartRefused(name, [&](Part* p) { p->type = other; }, {"dtype", "it must be"});
  }
}

TEST_F(CalibrationFileTest, ValuesOutOfRangeAreRefused) {
  const auto set = [](std::size_t at, double value) {
    return [at, value](Part* part) { part->values[at] = value; };
  };
  ExpectPartRefused("layers.3.klt.variance", set(17, -0.5), {"[1][1] is -0.5", "at least 0"});
  ExpectPartRefused("layers.1.raw.abs_key", set(2, -1), {"[0][2] is -1"});
  ExpectPartRefused("layers.1.centred.mean4.step", set(31, 0), {"[1][15] is 0", "above 0"});
  ExpectPartRefused("layers.1.klt.mean8.range", set(0, -2), {"[0][0] is -2"});
  ExpectPartRefused("layers.1.balanced.mean8.distortion", set(16, -1), {"[0][1][0] is -1"});
  for (const auto& [name, part] : good_.parts) {
    if (name.starts_with("residual.")) ExpectPartRefused(name, set(5, -0.1), {"[1][1] is -0.1"});
    if (name.starts_with("budgets.")) ExpectPartRefused(name, set(1, 0), {"[1] is 0"});
  }
  // Values that a file may well have.
  Content fine = good_;
  fine.parts["layers.1.raw.variance"].values[3] = 0;
  fine.parts["layers.1.raw.center"].values[3] = -7;
  fine.parts["something.else"] = {TensorType::kF32, {3}, {1, 2, 3}};
  Store(Path("fine"), fine);
  EXPECT_EQ(Calibration::Open(Path("fine"))->head(0, 0, BasisRule::kRaw).stats.variance[3], 0);
}

TEST_F(CalibrationFileTest, BasesMustBeExactPairs) {
  for (const std::string basis : {"layers.1.klt", "layers.3.balanced"}) {
    for (const std::string map : {".key_map", ".query_map"}) {
      ExpectPartRefused(
          basis + map, [](Part* part) { part->values[256 + 17 * 3] += 0.1; },
          {basis + ".key_map", basis + ".query_map", "KV head 1", "no exact pair", "0.001"});
    }
  }
  Content small = good_;
  small.parts["layers.1.klt.key_map"].values[5] += 1e-5;
  Store(Path("small"), small);
  EXPECT_NO_THROW(Calibration::Open(Path("small")));
}

TEST_F(CalibrationFileTest, MetadataIsChecked) {
  const auto with = [&](const std::string& key, const std::string& value) {
    Content content = good_;
    content.metadata[key] = value;
    return content;
  };
  ExpectRefused(with("fathom_statistics", "2"), {"version 2", "known is 1", "newer"},
                ErrorCode::kUnsupported);
  ExpectRefused(with("fathom_statistics", "one"), {"fathom_statistics", "'one'"});
  ExpectRefused(with("n_tokens", "-5"), {"n_tokens", "'-5'"});
  ExpectRefused(with("n_heads", ""), {"n_heads", "''"});
  ExpectRefused(with("n_heads", "5"), {"5 heads", "key_mean"});
  ExpectRefused(with("n_heads", "34"), {"34 heads", "16 heads per KV head"});
  ExpectRefused(with("n_heads", "6"), {"residual.", "[2, 6]"});
  Content content = good_;
  content.metadata.erase("fathom_statistics");
  ExpectRefused(content, {"not a statistics file", "fathom calibrate"});
  content = good_;
  std::erase_if(content.parts, [](const auto& part) { return part.first.starts_with("layers."); });
  ExpectRefused(content, {"no layer"});
  content = good_;
  content.parts["residual.a:b"] = content.parts.rbegin()->second;
  ExpectRefused(content, {"residual.a:b", "named after no method"});
}

TEST_F(CalibrationFileTest, OtherFilesAreRefused) {
  const auto open = [this](const std::string& name) {
    return [path = Path(name)] { Calibration::Open(path); };
  };
  ExpectError(open("nowhere"), ErrorCode::kIo, {"nowhere"});
  ExpectError(open("capture"), ErrorCode::kCorrupt, {"capture", "not a statistics file"});
  const std::string bytes = ReadAll(Path("good"));
  dir_.Write("half", bytes.substr(0, bytes.size() / 2));
  ExpectError(open("half"), ErrorCode::kCorrupt, {"half"});
  dir_.Write("text", "hello");
  ExpectError(open("text"), ErrorCode::kCorrupt, {"text"});
  ExpectError([&] { made_->Save(Path("no/folder")); }, ErrorCode::kIo, {"no/folder"});
}

}  // namespace
}  // namespace fathom
