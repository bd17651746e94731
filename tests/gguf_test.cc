// SPDX-License-Identifier: MIT
// Opening GGUF files that are wrong in every way we could think of: each must give an Error of the
// right code that names the thing, and none may end the process.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <random>

#include "fathom/error.h"
#include "fathom/model.h"
#include "support/gguf_fixture.h"

namespace fathom::testing {
namespace {

using Tensors = std::vector<std::pair<std::string, std::vector<std::int64_t>>>;

std::string ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void WriteFile(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

// Opens the file and expects an Error whose message holds every one of the words.
void ExpectError(const std::string& path, ErrorCode code, const std::vector<std::string>& words) {
  try {
    Model::Open(path);
    ADD_FAILURE() << "no error for " << path;
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_EQ(error.code(), code) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    for (const std::string& word : words) {
      EXPECT_NE(message.find(word), std::string::npos) << "'" << word << "' is not in: " << message;
    }
  }
}

void ExpectModelError(const TinyModel& model, ErrorCode code,
                      const std::vector<std::string>& words) {
  const ScratchDir dir;
  const std::string path = dir.File("model.gguf");
  ASSERT_TRUE(WriteTinyModel(model, path));
  ExpectError(path, code, words);
}

TinyModel Edited(const std::string& architecture, std::function<void(gguf_context*)> edit) {
  TinyModel m;
  m.architecture = architecture;
  m.edit = std::move(edit);
  return m;
}

void ExpectKeyError(const std::string& key, const std::function<void(gguf_context*)>& edit,
                    ErrorCode code, std::vector<std::string> words) {
  SCOPED_TRACE(key);
  words.push_back(key);
  ExpectModelError(Edited("llama", edit), code, words);
}

TEST(GgufFile, OpensWhatIsRight) {
  for (const char* architecture : {"llama", "qwen2", "qwen3"}) {
    const ScratchDir dir;
    const std::string path = dir.File("model.gguf");
    TinyModel m;
    m.architecture = architecture;
    ASSERT_TRUE(WriteTinyModel(m, path));
    const auto model = Model::Open(path);
    const ModelInfo& info = model->info();
    EXPECT_EQ(info.path, path);
    EXPECT_EQ(info.architecture, architecture);
    EXPECT_EQ(info.name, "tiny");
    EXPECT_EQ(info.n_layers, 2);
    EXPECT_EQ(info.n_embd, 64);
    EXPECT_EQ(info.n_ff, 96);
    EXPECT_EQ(info.n_vocab, 260);
    EXPECT_EQ(info.n_ctx_train, 512);
    EXPECT_EQ(info.heads, (HeadGeometry{4, 2, 16}));
    EXPECT_EQ(info.has_qk_norm, info.architecture == "qwen3");
    EXPECT_FALSE(info.has_qkv_bias);
    EXPECT_TRUE(info.tied_output);
    EXPECT_EQ(info.file_bytes, static_cast<std::int64_t>(ReadFile(path).size()));
    EXPECT_EQ(info.weight_types.substr(0, 4), "F32 ");
  }
}

TEST(GgufFile, MissingUnreadableOrNotAFile) {
  const ScratchDir dir;
  ExpectError(dir.File("none.gguf"), ErrorCode::kIo, {"none.gguf", "No such file"});
  ExpectError(dir.File(""), ErrorCode::kIo, {"not a regular file"});
}

TEST(GgufFile, NotGguf) {
  const ScratchDir dir;
  const std::string path = dir.File("model.gguf");
  WriteFile(path, "");
  ExpectError(path, ErrorCode::kCorrupt, {"not a GGUF file", "0 bytes"});
  WriteFile(path, "GGUF");
  ExpectError(path, ErrorCode::kCorrupt, {"not a GGUF file", "4 bytes"});
  WriteFile(path, std::string(4096, 'x'));
  ExpectError(path, ErrorCode::kCorrupt, {"not a GGUF file"});
  for (const std::uint32_t version : {0U, 1U, 4U, 0x03000000U}) {
    std::string bytes = std::string("GGUF").append(156, '\0');
    std::memcpy(bytes.data() + 4, &version, 4);
    WriteFile(path, bytes);
    ExpectError(path, ErrorCode::kUnsupported, {"GGUF version " + std::to_string(version)});
  }
}

TEST(GgufFile, SmallFilesThatAskForGigabytes) {
  const ScratchDir dir;
  const std::string path = dir.File("model.gguf");
  for (const std::uint64_t count : {1ULL << 20, 1ULL << 32, 1ULL << 40, 1ULL << 62, ~0ULL}) {
    for (int field = 0; field < 4; ++field) {  // tensors, entries, key length, array size
      std::string bytes = std::string("GGUF").append(156, '\0');
      const auto put = [&](std::size_t at, std::uint64_t value, std::size_t size) {
        std::memcpy(bytes.data() + at, &value, size);
      };
      put(4, 3, 4);
      put(8, field == 0 ? count : 0, 8);
      put(16, field == 1 ? count : 1, 8);
      put(24, field == 2 ? count : 1, 8);  // length of the first key
      bytes[32] = 'k';
      put(33, 9, 4);  // an array
      put(37, 8, 4);  // of strings
      put(41, count, 8);
      WriteFile(path, bytes);
      ExpectError(path, ErrorCode::kCorrupt, {"GGUF"});
    }
  }
}

TEST(GgufFile, TruncatedAnywhere) {
  const ScratchDir dir;
  const std::string path = dir.File("model.gguf");
  ASSERT_TRUE(WriteTinyModel({}, path));
  const std::string bytes = ReadFile(path);
  const std::string cut = dir.File("cut.gguf");
  for (std::size_t i = 0; i < 300; ++i) {
    // Dense over the header, then over the data; the last cut takes a single byte of the last
    // tensor.
    const std::size_t size = i < 200 ? i * 97 % 20000 : bytes.size() * (i - 200) / 100;
    WriteFile(cut, bytes.substr(0, size));
    ExpectError(cut, ErrorCode::kCorrupt, {"cut.gguf"});
  }
  WriteFile(cut, bytes.substr(0, bytes.size() - 1));
  ExpectError(cut, ErrorCode::kCorrupt, {"truncated", "blk.1.ffn_down.weight"});
}

// Any outcome but a crash: some flipped bytes only change a weight.
void OpenDamaged(const std::string& path) {
  try {
    const auto model = Model::Open(path);
    model->Tokenize("hello <|im_end|> world", true);
    model->Piece(model->info().n_vocab - 1, true);
  } catch (const Error&) {
  }
}

TEST(GgufFile, DamagedBytesNeverCrash) {
  const ScratchDir dir;
  const std::string path = dir.File("model.gguf");
  ASSERT_TRUE(WriteTinyModel({}, path));
  const std::string bytes = ReadFile(path);
  const std::string damaged = dir.File("damaged.gguf");
  std::mt19937 rng(7);
  const std::size_t header = 12000;  // metadata and tensor table
  for (int i = 0; i < 600; ++i) {
    std::string copy = bytes;
    const std::size_t at = i < 200 ? static_cast<std::size_t>(i) * 7 : rng() % header;
    switch (i % 4) {
      case 0:
        copy[at] = static_cast<char>(copy[at] ^ (1 << rng() % 8));
        break;
      case 1:
        copy[at] = static_cast<char>(rng());
        break;
      case 2:
        std::memset(copy.data() + at, 0xFF, 8);
        break;
      default:
        std::memset(copy.data() + at, 0, 4);
        break;
    }
    WriteFile(damaged, copy);
    OpenDamaged(damaged);
  }
}

TEST(GgufFile, Architecture) {
  ExpectModelError(
      Edited("llama", [](auto* g) { gguf_set_val_str(g, "general.architecture", "mamba"); }),
      ErrorCode::kUnsupported, {"mamba", "llama, qwen2, qwen3"});
  ExpectModelError(Edited("llama", [](auto* g) { gguf_remove_key(g, "general.architecture"); }),
                   ErrorCode::kCorrupt, {"general.architecture", "missing"});
  ExpectModelError(Edited("llama", [](auto* g) { gguf_set_val_u32(g, "general.architecture", 3); }),
                   ErrorCode::kCorrupt, {"general.architecture", "string"});
}

TEST(GgufFile, MissingKeys) {
  for (const char* key : {"llama.block_count", "llama.context_length", "llama.embedding_length",
                          "llama.feed_forward_length", "llama.attention.head_count",
                          "llama.attention.layer_norm_rms_epsilon"}) {
    ExpectKeyError(key, [key](auto* g) { gguf_remove_key(g, key); }, ErrorCode::kCorrupt,
                   {"missing"});
  }
}

TEST(GgufFile, ImpossibleValues) {
  const auto u32 = [](const char* key, std::uint32_t value) {
    return [key, value](gguf_context* g) { gguf_set_val_u32(g, key, value); };
  };
  const auto f32 = [](const char* key, float value) {
    return [key, value](gguf_context* g) { gguf_set_val_f32(g, key, value); };
  };
  for (const char* key : {"llama.block_count", "llama.context_length", "llama.embedding_length",
                          "llama.feed_forward_length", "llama.attention.head_count",
                          "llama.attention.head_count_kv"}) {
    ExpectKeyError(key, u32(key, 0), ErrorCode::kCorrupt, {"is 0"});
    ExpectKeyError(key, u32(key, 0xFFFFFFFF), ErrorCode::kCorrupt, {"4294967295"});
    ExpectKeyError(key, f32(key, 2.0F), ErrorCode::kCorrupt, {"integer"});
  }
  ExpectKeyError("head_count_kv", u32("llama.attention.head_count_kv", 3), ErrorCode::kCorrupt,
                 {"multiple"});
  ExpectKeyError("llama.rope.freq_base", f32("llama.rope.freq_base", -1.0F), ErrorCode::kCorrupt,
                 {"positive"});
  ExpectKeyError("llama.rope.freq_base", f32("llama.rope.freq_base", NAN), ErrorCode::kCorrupt,
                 {"positive"});
  ExpectKeyError("llama.rope.dimension_count", u32("llama.rope.dimension_count", 18),
                 ErrorCode::kCorrupt, {"18"});
  ExpectKeyError("llama.rope.dimension_count", u32("llama.rope.dimension_count", 7),
                 ErrorCode::kCorrupt, {"even"});
  ExpectKeyError("key_length", u32("llama.attention.value_length", 32), ErrorCode::kUnsupported,
                 {"32", "differ"});
}

TEST(GgufFile, UnsupportedHeads) {
  TinyModel m;
  m.head_dim = 24;
  ExpectModelError(m, ErrorCode::kUnsupported, {"head_dim", "24", "multiples of 16"});
  m.head_dim = 272;
  ExpectModelError(m, ErrorCode::kUnsupported, {"head_dim", "272", "256"});
  m = {};
  m.n_heads = 17;
  m.n_kv_heads = 1;
  ExpectModelError(m, ErrorCode::kUnsupported, {"17 query heads per KV head", "16"});
}

TEST(GgufFile, UnsupportedFeatures) {
  const auto refuse = [](const char* key, const std::function<void(gguf_context*)>& edit,
                         const char* value) {
    ExpectKeyError(key, edit, ErrorCode::kUnsupported, {value});
  };
  const auto set = [](const char* key, auto value) {
    return [key, value](gguf_context* g) {
      if constexpr (std::is_same_v<decltype(value), const char*>) gguf_set_val_str(g, key, value);
      if constexpr (std::is_same_v<decltype(value), int>)
        gguf_set_val_u32(g, key, static_cast<std::uint32_t>(value));
      if constexpr (std::is_same_v<decltype(value), float>) gguf_set_val_f32(g, key, value);
      if constexpr (std::is_same_v<decltype(value), bool>) gguf_set_val_bool(g, key, value);
    };
  };
  for (const char* type : {"longrope", "dynamic", "", "YARN"}) {
    refuse("llama.rope.scaling.type", set("llama.rope.scaling.type", type), type);
  }
  refuse("llama.expert_count", set("llama.expert_count", 8), "8");
  refuse("llama.logit_scale", set("llama.logit_scale", 0.5F), "0.5");
  refuse("llama.attention.sliding_window", set("llama.attention.sliding_window", 128), "128");
  refuse("llama.attention.causal", set("llama.attention.causal", false), "0");
  refuse("llama.attention.temperature_scale", set("llama.attention.temperature_scale", 0.1F),
         "not known");
  refuse("llama.rope.freq_base_swa", set("llama.rope.freq_base_swa", 1e4F), "not known");
  refuse("llama.rope.scaling.yarn_beta_fast", set("llama.rope.scaling.yarn_beta_fast", 16.0F),
         "16");
  refuse("llama.rope.scaling.yarn_ext_factor", set("llama.rope.scaling.yarn_ext_factor", 0.5F),
         "0.5");
  refuse("llama.rope.scaling.alpha", set("llama.rope.scaling.alpha", 1000.0F), "not known");
  ExpectModelError(Edited("llama", set("split.count", 3)), ErrorCode::kUnsupported,
                   {"3 parts", "llama-gguf-split"});
  const std::vector<std::uint32_t> widths = {96, 64};
  refuse(
      "llama.feed_forward_length",
      [&](gguf_context* g) {
        gguf_set_arr_data(g, "llama.feed_forward_length", GGUF_TYPE_UINT32, widths.data(),
                          widths.size());
      },
      "differs between layers");
}

TEST(GgufFile, NeutralValuesAreAccepted) {
  const ScratchDir dir;
  const std::string path = dir.File("model.gguf");
  ASSERT_TRUE(WriteTinyModel(Edited("llama",
                                    [](gguf_context* g) {
                                      gguf_set_val_u32(g, "llama.expert_count", 0);
                                      gguf_set_val_f32(g, "llama.logit_scale", 1.0F);
                                      gguf_set_val_u32(g, "llama.attention.sliding_window", 512);
                                      gguf_set_val_bool(g, "llama.attention.causal", true);
                                      gguf_set_val_f32(g, "llama.rope.scaling.yarn_beta_fast",
                                                       32.0F);
                                      gguf_set_val_u32(g, "llama.vocab_size", 260);
                                      const std::vector<std::uint32_t> kv = {2, 2};
                                      gguf_set_arr_data(g, "llama.attention.head_count_kv",
                                                        GGUF_TYPE_UINT32, kv.data(), kv.size());
                                    }),
                             path));
  EXPECT_NO_THROW(Model::Open(path));
}

void ExpectTensorError(const std::string& name, ErrorCode code,
                       const std::vector<std::string>& words,
                       const std::function<void(Tensors&)>& edit) {
  SCOPED_TRACE(name);
  TinyModel m;
  m.edit_tensors = edit;
  std::vector<std::string> all = words;
  all.push_back(name);
  ExpectModelError(m, code, all);
}

TEST(GgufFile, EveryMissingTensorIsNamed) {
  TinyModel m;
  for (const auto& [name, shape] : TinyTensors(m, 260)) {
    ExpectTensorError(name, ErrorCode::kCorrupt, {"missing"}, [&n = name](Tensors& tensors) {
      std::erase_if(tensors, [&](const auto& t) { return t.first == n; });
    });
  }
}

TEST(GgufFile, EveryWrongShapeIsNamed) {
  TinyModel m;
  const Tensors all = TinyTensors(m, 260);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const std::string found = std::to_string(all[i].second[0] + 32);
    const std::string expected = std::string("[").append(std::to_string(all[i].second[0]));
    ExpectTensorError(all[i].first, ErrorCode::kCorrupt, {found, expected, "shape"},
                      [i](Tensors& tensors) { tensors[i].second[0] += 32; });
  }
  ExpectTensorError("token_embd.weight", ErrorCode::kCorrupt, {"300", "260"},
                    [](Tensors& tensors) { tensors[0].second[1] = 300; });
}

TEST(GgufFile, UnknownTensorsAreRefused) {
  for (const char* name :
       {"blk.0.attn_qkv.weight", "blk.0.attn_q_norm.weight", "blk.2.attn_norm.weight",
        "blk.0.attn_q.scale", "cls.output.weight", "output.bias", "position_embd.weight"}) {
    ExpectTensorError(name, ErrorCode::kUnsupported, {"ignored"}, [&](Tensors& tensors) {
      tensors.push_back({name, {64}});
    });
  }
}

TEST(GgufFile, TensorTypes) {
  TinyModel m;
  const ScratchDir dir;
  const std::string path = dir.File("model.gguf");
  ASSERT_TRUE(WriteTinyModel(m, path));
  std::string bytes = ReadFile(path);
  // The type of blk.0.attn_q.weight stands behind its name and its two dimensions.
  const std::string name = "blk.0.attn_q.weight";
  const std::size_t at = bytes.find(name) + name.size() + 4 + 2 * 8;
  bytes[at] = GGML_TYPE_I32;  // as large as F32
  WriteFile(path, bytes);
  ExpectError(path, ErrorCode::kUnsupported, {name, "i32"});
  bytes[at] = 4;  // a type that was removed
  WriteFile(path, bytes);
  ExpectError(path, ErrorCode::kCorrupt, {name, "type"});
}

TEST(GgufFile, NormsMustBeF32) {
  const ScratchDir dir;
  const std::string path = dir.File("model.gguf");
  ASSERT_TRUE(WriteTinyModel({}, path));
  std::string bytes = ReadFile(path);
  const std::string name = "blk.0.attn_norm.weight";
  bytes[bytes.find(name) + name.size() + 4 + 8] = GGML_TYPE_I32;
  WriteFile(path, bytes);
  ExpectError(path, ErrorCode::kUnsupported, {name, "must be f32"});
}

TEST(GgufFile, ZeroDimension) {
  const ScratchDir dir;
  const std::string path = dir.File("model.gguf");
  TinyModel m;
  m.edit_tensors = [](Tensors& t) {
    t.push_back({"extra", {64}});
  };  // last, so that no other offset moves
  ASSERT_TRUE(WriteTinyModel(m, path));
  std::string bytes = ReadFile(path);
  bytes[bytes.find("extra") + 5 + 4] = 0;
  WriteFile(path, bytes);
  ExpectError(path, ErrorCode::kCorrupt, {"extra", "zero dimension"});
}

TEST(GgufFile, Alignment) {
  const ScratchDir dir;
  const std::string path = dir.File("model.gguf");
  ASSERT_TRUE(WriteTinyModel(
      Edited("llama", [](auto* g) { gguf_set_val_u32(g, "general.alignment", 64); }), path));
  EXPECT_NO_THROW(Model::Open(path));
  std::string bytes = ReadFile(path);  // the writer would refuse this one
  bytes[bytes.find("general.alignment") + std::strlen("general.alignment") + 4] = 24;
  WriteFile(path, bytes);
  ExpectError(path, ErrorCode::kCorrupt, {"alignment", "24"});
}

// With an alignment below 32 the tensor data may start anywhere; the length of a text moves it.
TEST(GgufFile, DataThatIsNotAligned) {
  int refused = 0;
  for (const std::size_t length : {1, 5, 9, 13}) {
    const ScratchDir dir;
    const std::string path = dir.File("model.gguf");
    const std::string name(length, 'x');
    ASSERT_TRUE(WriteTinyModel(Edited("llama",
                                      [&](gguf_context* g) {
                                        gguf_set_val_str(g, "general.name", name.c_str());
                                        gguf_set_val_u32(g, "general.alignment", 4);
                                      }),
                               path));
    try {
      Model::Open(path);
    } catch (const Error& error) {
      ++refused;
      EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
      EXPECT_NE(std::string(error.what()).find("not a multiple of 32"), std::string::npos)
          << error.what();
    }
  }
  EXPECT_GE(refused, 3);
}

TEST(GgufFile, Tokenizers) {
  TinyModel m;
  m.with_tokenizer = false;
  ExpectModelError(m, ErrorCode::kUnsupported, {"tokenizer.ggml.model"});
  ExpectModelError(
      Edited("llama", [](auto* g) { gguf_set_val_str(g, "tokenizer.ggml.model", "bert"); }),
      ErrorCode::kUnsupported, {"'bert'", "gpt2", "llama"});
  ExpectModelError(
      Edited("llama", [](auto* g) { gguf_set_val_str(g, "tokenizer.ggml.pre", "klingon"); }),
      ErrorCode::kUnsupported, {"klingon"});
  ExpectModelError(Edited("llama", [](auto* g) { gguf_remove_key(g, "tokenizer.ggml.merges"); }),
                   ErrorCode::kUnsupported, {"merges"});
  ExpectModelError(Edited("llama", [](auto* g) { gguf_remove_key(g, "tokenizer.ggml.tokens"); }),
                   ErrorCode::kCorrupt, {"tokenizer.ggml.tokens"});
  const char* twice[] = {"a", "b", "a"};
  ExpectModelError(
      Edited("llama", [&](auto* g) { gguf_set_arr_str(g, "tokenizer.ggml.tokens", twice, 3); }),
      ErrorCode::kCorrupt, {"'a'", "twice"});
  const std::int32_t types[] = {1, 1};
  ExpectModelError(Edited("llama",
                          [&](auto* g) {
                            gguf_set_arr_data(g, "tokenizer.ggml.token_type", GGUF_TYPE_INT32,
                                              types, 2);
                          }),
                   ErrorCode::kCorrupt, {"tokenizer.ggml.token_type", "2 entries"});
}

TEST(GgufFile, PrintsNothing) {
  const ScratchDir dir;
  const std::string path = dir.File("model.gguf");
  ASSERT_TRUE(WriteTinyModel({}, path));
  ::testing::internal::CaptureStderr();
  ::testing::internal::CaptureStdout();
  EXPECT_NO_THROW(Model::Open(path));
  OpenDamaged(dir.File("none"));
  WriteFile(path, std::string("GGUF").append(200, '\x03'));
  OpenDamaged(path);
  EXPECT_EQ(::testing::internal::GetCapturedStdout(), "");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

}  // namespace
}  // namespace fathom::testing
