// SPDX-License-Identifier: MIT
// The forward pass on a CUDA device against that of the CPU. The device rounds weights and
// activations to bf16, as ggml does with weights in bf16. Bounds of other types are twice what that
// rounding was measured to do on the CPU, which itself rounds activations to 8 bits with quantized
// weights. Greedy choices must agree wherever the CPU's two best logits are further apart than
// that.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

// First: it says testing for googletest's namespace.
#ifdef FATHOM_PROGRAM
#include "support/program.h"
#endif

#include "fathom/error.h"
#include "fathom/session.h"
#include "support/compare.h"
#include "support/dense_attention.h"
#include "support/gguf_fixture.h"
#include "support/model_files.h"

namespace fathom::testing {
namespace {

const std::string kBundled = FATHOM_SOURCE_DIR "/models/fathom-recall-15m-q8_0.gguf";
const std::string kNote = "The access code of the north tower is 8306194.\n\nThe weather was fine.";
const std::string kQuestion = "The access code of the north tower is";
const std::string kAnswer = "8306194";

// Why no CUDA device can be used here, or nothing.
std::string CudaReason() {
  for (const BackendInfo& info : ListBackends()) {
    if (info.name == "cuda") return info.reason;
  }
  return "this build has no CUDA backend";
}

class CudaModel : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string reason = CudaReason();
    if (!reason.empty()) GTEST_SKIP() << reason;
  }
};

const std::shared_ptr<const Model>& Bundled() {
  static const std::shared_ptr<const Model> model = Model::Open(kBundled);
  return model;
}

std::shared_ptr<const Model> OpenTiny(const TinyModel& spec) {
  const ScratchDir dir;  // the mapping outlives the name
  const std::string path = dir.File("model.gguf");
  EXPECT_TRUE(WriteTinyModel(spec, path));
  return Model::Open(path);
}

std::vector<Token> SpreadTokens(const Model& model, std::size_t count) {
  std::vector<Token> tokens;
  for (std::size_t i = 0; i < count; ++i) {
    tokens.push_back(
        static_cast<Token>(i * 2654435761U % static_cast<std::uint32_t>(model.info().n_vocab)));
  }
  return tokens;
}

Token Best(std::span<const float> logits) {
  return static_cast<Token>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

// A runner with dense attention of its own, which keeps what layer 0 got.
class ModelRun {
 public:
  ModelRun(const std::shared_ptr<const Model>& model, Device device)
      : heads_(model->info().heads),
        attention_(model->info(), DenseAttention::CacheType::kF32),
        runner_(model, 2, device) {}

  std::vector<float> Feed(std::span<const Token> tokens, std::size_t chunk = 1000000) {
    std::vector<float> logits;
    for (std::size_t at = 0; at < tokens.size(); at += chunk) {
      const auto part = tokens.subspan(at, std::min(chunk, tokens.size() - at));
      const bool is_last = at + part.size() == tokens.size();
      const std::span<const float> out = runner_.Forward(part, position, Observed(), is_last);
      position += static_cast<std::int64_t>(part.size());
      logits.assign(out.begin(), out.end());
    }
    return logits;
  }

  std::int64_t position = 0;   // of the next token
  std::vector<float> q, k, v;  // of layer 0 in the last call

 private:
  AttentionFn Observed() {
    return [this](std::int32_t layer, std::int64_t n, const float* q_in, const float* k_in,
                  const float* v_in, float* out) {
      const std::int64_t d = heads_.head_dim;
      if (layer == 0) {
        q.assign(q_in, q_in + n * heads_.n_heads * d);
        k.assign(k_in, k_in + n * heads_.n_kv_heads * d);
        v.assign(v_in, v_in + n * heads_.n_kv_heads * d);
      }
      attention_.Fn()(layer, n, q_in, k_in, v_in, out);
    };
  }

  HeadGeometry heads_;
  DenseAttention attention_;
  Runner runner_;
};

// Logits of both after the same tokens. Where the CPU's best two are further apart than 6 standard
// deviations of the difference of two logits, the choice must be the same.
void ExpectAgree(std::span<const float> cuda, std::span<const float> cpu, double bound) {
  EXPECT_TRUE(test::Near(cuda, cpu, bound));
  if (cuda.size() != cpu.size() || cpu.size() < 2) return;
  double squares = 0;
  for (std::size_t i = 0; i < cpu.size(); ++i) squares += std::pow(double{cuda[i]} - cpu[i], 2);
  const double deviation = std::sqrt(squares / static_cast<double>(cpu.size()));
  std::vector<float> sorted(cpu.begin(), cpu.end());
  std::nth_element(sorted.begin(), sorted.begin() + 1, sorted.end(), std::greater<>());
  if (sorted[0] - sorted[1] > 6 * std::sqrt(2.0) * deviation) {
    EXPECT_EQ(Best(cuda), Best(cpu));
  }
}

// The bundled model with its matrices in bf16, so that the CPU computes as the device does.
std::shared_ptr<const Model> BundledInBf16() {
  const ScratchDir dir;
  const std::string path = dir.File("bf16.gguf");
  ggml_context* tensors = nullptr;
  const gguf_init_params read{/*no_alloc=*/false, &tensors};
  const gguf_context_ptr source(gguf_init_from_file(kBundled.c_str(), read));
  const ggml_context_ptr owner(tensors);
  const gguf_context_ptr target(gguf_init_empty());
  gguf_set_kv(target.get(), source.get());
  ggml_init_params room{};
  room.mem_size = std::size_t{64} << 20;
  const ggml_context_ptr made(ggml_init(room));
  for (std::int64_t i = 0; i < gguf_get_n_tensors(source.get()); ++i) {
    ggml_tensor* from = ggml_get_tensor(tensors, gguf_get_tensor_name(source.get(), i));
    ggml_tensor* to = from;
    if (ggml_n_dims(from) > 1) {
      const std::int64_t n = ggml_nelements(from);
      std::vector<float> values(static_cast<std::size_t>(n));
      ggml_get_type_traits(from->type)->to_float(from->data, values.data(), n);
      to = ggml_new_tensor(made.get(), GGML_TYPE_BF16, ggml_n_dims(from), from->ne);
      ggml_set_name(to, from->name);
      ggml_fp32_to_bf16_row(values.data(), static_cast<ggml_bf16_t*>(to->data), n);
    }
    gguf_add_tensor(target.get(), to);
  }
  EXPECT_TRUE(gguf_write_to_file(target.get(), path.c_str(), /*only_meta=*/false));
  return Model::Open(path);
}

TEST_F(CudaModel, BundledModelAgreesWithTheCpu) {
  ModelRun quantized(Bundled(), Device::kCpu);
  ModelRun cpu(BundledInBf16(), Device::kCpu);
  ModelRun cuda(Bundled(), Device::kCuda);
  const std::vector<Token> prompt = NovelTokens(*Bundled(), 400);
  const std::vector<float> rough = quantized.Feed(prompt, 128);
  std::vector<float> expected = cpu.Feed(prompt, 128);
  std::vector<float> actual = cuda.Feed(prompt, 128);
  ExpectAgree(actual, rough, 0.05);
  ExpectAgree(actual, expected, 0.02);  // both round their inputs to bf16, each in its own way
  for (int i = 0; i < 32; ++i) {
    const Token token = Best(expected);
    expected = cpu.Feed({&token, 1});
    actual = cuda.Feed({&token, 1});
    ExpectAgree(actual, quantized.Feed({&token, 1}), 0.05);
    ExpectAgree(actual, expected, 0.02);  // both round their inputs to bf16, each in its own way
  }
}

struct Variant {
  std::string name;
  TinyModel model;
  double bound = 0.02;        // relative L2 of logits
  double head_bound = 0.006;  // of q, k and v in layer 0
};

void PrintTo(const Variant& variant, std::ostream* out) { *out << variant.name; }

TinyModel Wide(const std::string& architecture, ggml_type type = GGML_TYPE_F32) {
  TinyModel m;
  m.architecture = architecture;
  m.n_embd = 256;
  m.head_dim = 64;
  m.n_ff = 512;
  m.type = type;
  return m;
}

TinyModel Scaled(const std::string& architecture, const char* type, float factor) {
  TinyModel m = Wide(architecture);
  m.edit = [=](gguf_context* g) {
    gguf_set_val_str(g, (architecture + ".rope.scaling.type").c_str(), type);
    gguf_set_val_f32(g, (architecture + ".rope.scaling.factor").c_str(), factor);
    gguf_set_val_u32(g, (architecture + ".rope.scaling.original_context_length").c_str(), 128);
  };
  return m;
}

TinyModel Partial(const std::string& architecture) {
  TinyModel m = Wide(architecture);
  m.edit = [=](gguf_context* g) {
    gguf_set_val_u32(g, (architecture + ".rope.dimension_count").c_str(), 24);
  };
  return m;
}

std::vector<Variant> Variants() {
  std::vector<Variant> all;
  TinyModel llama3 = Wide("llama");
  llama3.rope_freqs = true;
  llama3.edit = [](gguf_context* g) { gguf_set_val_f32(g, "llama.rope.freq_base", 500000.0F); };
  all.push_back({"LlamaRopeFreqs", llama3});
  TinyModel linear = Scaled("llama", "linear", 4);
  linear.tied = false;
  linear.qkv_bias = linear.other_biases = true;
  all.push_back({"LlamaLinearBiasesUntied", linear});
  TinyModel qwen2 = Wide("qwen2");
  qwen2.tied = false;
  qwen2.qkv_bias = qwen2.other_biases = true;
  all.push_back({"Qwen2BiasesUntied", qwen2});
  all.push_back({"Qwen2ScalingNone", Scaled("qwen2", "none", 4)});
  all.push_back({"Qwen3Plain", Wide("qwen3")});
  all.push_back({"Qwen3Yarn", Scaled("qwen3", "yarn", 4)});
  all.push_back({"LlamaYarnBelowOne", Scaled("llama", "yarn", 0.5F)});
  all.push_back({"LlamaPartial", Partial("llama")});
  all.push_back({"Qwen3Partial", Partial("qwen3")});
  TinyModel narrow = Wide("qwen3");
  narrow.head_dim = 16;
  narrow.n_heads = 12;
  narrow.n_kv_heads = 4;
  all.push_back({"Qwen3NarrowHeads", narrow});
  TinyModel broad = Wide("llama");
  broad.head_dim = 256;
  broad.n_heads = 3;
  broad.n_kv_heads = 1;
  all.push_back({"LlamaBroadHeads", broad});
  all.push_back({"Qwen3_f16", Wide("qwen3", GGML_TYPE_F16)});
  for (const char* architecture : {"llama", "qwen2", "qwen3"}) {  // only orders of sums differ
    TinyModel exact = Wide(architecture, GGML_TYPE_BF16);
    exact.qkv_bias = true;
    all.push_back({std::string("Bf16_") + architecture, exact, 0.01, 0.001});
  }
  for (const ggml_type type :
       {GGML_TYPE_Q4_0, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K, GGML_TYPE_Q6_K, GGML_TYPE_IQ4_NL}) {
    TinyModel quantized = Wide("qwen3", type);
    quantized.tied = type != GGML_TYPE_Q4_K;
    all.push_back({std::string("Qwen3_") + ggml_type_name(type), quantized, 0.05, 0.02});
  }
  return all;
}

class CudaVariants : public CudaModel, public ::testing::WithParamInterface<Variant> {};

TEST_P(CudaVariants, AgreeWithTheCpu) {
  const auto model = OpenTiny(GetParam().model);
  const std::vector<Token> tokens = SpreadTokens(*model, 80);
  // Far out the smallest error of an angle shows.
  for (const std::int64_t first : {0, 100000}) {
    ModelRun cpu(model, Device::kCpu);
    ModelRun cuda(model, Device::kCuda);
    cpu.position = cuda.position = first;
    std::size_t at = 0;
    for (const std::size_t n : {40, 1, 1, 33, 5}) {
      const auto part = std::span(tokens).subspan(at, n);
      at += n;
      const std::vector<float> expected = cpu.Feed(part);
      const std::vector<float> actual = cuda.Feed(part);
      EXPECT_TRUE(test::Near(cuda.q, cpu.q, GetParam().head_bound));
      EXPECT_TRUE(test::Near(cuda.k, cpu.k, GetParam().head_bound));
      EXPECT_TRUE(test::Near(cuda.v, cpu.v, GetParam().head_bound));
      ExpectAgree(actual, expected, GetParam().bound);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, CudaVariants, ::testing::ValuesIn(Variants()),
                         [](const auto& test) { return test.param.name; });

TEST_F(CudaModel, ChunksDoNotMatter) {
  TinyModel spec = Wide("llama");
  spec.qkv_bias = spec.other_biases = true;
  const auto model = OpenTiny(spec);
  const std::vector<Token> tokens = SpreadTokens(*model, 70);
  const std::vector<float> expected = ModelRun(model, Device::kCuda).Feed(tokens);
  for (const std::size_t chunk : {1, 13, 64, 69}) {
    EXPECT_TRUE(test::Near(ModelRun(model, Device::kCuda).Feed(tokens, chunk), expected, 0.01))
        << chunk;
  }
}

TEST_F(CudaModel, ContractOfForward) {
  const auto model = OpenTiny(TinyModel{});
  Runner runner(model, 1, Device::kCuda);
  std::vector<std::int32_t> layers;
  const AttentionFn attention = [&](std::int32_t layer, std::int64_t n, const float*, const float*,
                                    const float*, float* out) {
    layers.push_back(layer);
    std::fill_n(out, n * 64, 0.0F);
  };
  const std::vector<Token> tokens = {1, 2, 3};
  EXPECT_TRUE(runner.Forward(tokens, 0, attention, false).empty());
  EXPECT_EQ(layers, (std::vector<std::int32_t>{0, 1}));
  const std::span<const float> logits = runner.Forward(tokens, 0, attention, true);
  ASSERT_EQ(logits.size(), 260U);
  const std::vector<float> expected(logits.begin(), logits.end());
  EXPECT_THROW(runner.Forward(std::vector<Token>{260}, 0, attention, true), Error);
  for (int bad = 0; bad < 2; ++bad) {
    const auto failing = [bad](std::int32_t layer, auto...) {
      if (layer == bad) throw Error(ErrorCode::kCancelled, "stop");
    };
    EXPECT_THROW(runner.Forward(tokens, 0, failing, true), Error);
    const std::span<const float> again = runner.Forward(tokens, 0, attention, true);
    EXPECT_EQ(std::vector<float>(again.begin(), again.end()), expected);
  }
}

// Sessions use the GPU for prefill, too, and go on as those of the CPU do, token by token.
TEST_F(CudaModel, SessionsAgreeWithTheCpu) {
  const std::vector<Token> tokens = NovelTokens(*Bundled(), 700);
  std::vector<std::unique_ptr<Session>> sessions;
  for (const char* device : {"cpu", "cuda"}) {
    SessionOptions options;
    options.ctx_size = 1024;
    options.device = device;
    options.chunk = 256;
    options.method = "fathom:bits=28,k=128,min=256";
    sessions.push_back(std::make_unique<Session>(Bundled(), options));
    sessions.back()->Prefill(std::span(tokens).first(650));
    sessions.back()->BuildIndex();
  }
  const auto expect_agree = [&] {
    ExpectAgree(sessions[1]->logits(), sessions[0]->logits(), 0.05);
  };
  expect_agree();
  for (const Token token : std::span(tokens).subspan(650, 20)) {
    for (const auto& session : sessions) session->Decode(token);
    expect_agree();
  }
  for (const auto& session : sessions) EXPECT_GT(session->method().counters().sparse_calls, 0);
  EXPECT_EQ(sessions[0]->decode_attention(), "cpu");
  EXPECT_EQ(sessions[1]->decode_attention(), "device");
}

// What the model is sure of it says on both.
TEST_F(CudaModel, AnswersAreThoseOfTheCpu) {
  for (const char* device : {"cpu", "cuda"}) {
    SessionOptions options;
    options.ctx_size = 128;
    options.device = device;
    Session session(Bundled(), options);
    session.Prefill(Bundled()->Tokenize(kNote + "\n\n" + kQuestion, false));
    session.BuildIndex();
    const std::string answer = Generate(session, {8, {}}).text;
    EXPECT_NE(answer.find(kAnswer), std::string::npos) << device << ": " << answer;
  }
}

// Without a device everything says so, and nothing else breaks.
class WithoutCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (CudaReason().empty()) GTEST_SKIP() << "this machine has a CUDA device";
  }
};

template <typename Fn>
void ExpectUnsupported(const Fn& fn) {
  try {
    fn();
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported) << error.what();
    EXPECT_NE(std::string(error.what()).find("device 'cuda'"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("use device 'cpu'"), std::string::npos)
        << error.what();
  }
}

TEST_F(WithoutCuda, RunnersAndSessionsAreRefused) {
  ExpectUnsupported([] { Runner(Bundled(), 1, Device::kCuda); });
  SessionOptions options;
  options.ctx_size = 64;
  options.device = "cuda";
  ExpectUnsupported([&] { Session(Bundled(), options); });
}

TEST(Devices, UnknownNamesAreRefusedWithTheValidOnes) {
  SessionOptions options;
  options.device = "tpu";
  try {
    Session(Bundled(), options);
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage) << error.what();
    EXPECT_NE(std::string(error.what()).find("cpu, cuda"), std::string::npos) << error.what();
  }
}

#ifdef FATHOM_PROGRAM
class CudaCli : public test::ProgramTest {};

TEST_F(CudaCli, DevicesThatAreNotThere) {
  const std::string run = "run -m " + test::Quoted(kBundled) + " -p hi --device ";
  ExpectError(run + "tpu", 2, {"'tpu'", "cpu, cuda"});
  if (CudaReason().empty()) GTEST_SKIP() << "this machine has a CUDA device";
  ExpectError(run + "cuda", 1, {"device 'cuda'", "use device 'cpu'"});
}

TEST_F(CudaCli, AnswersOnTheDevice) {
  const std::string reason = CudaReason();
  if (!reason.empty()) GTEST_SKIP() << reason;
  const std::string document = Write("note.txt", kNote);
  const test::ProgramResult result = Run("run -m " + test::Quoted(kBundled) + " -f " + document +
                                         " -p '" + kQuestion + "' --no-chat -n 8 --device cuda");
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_NE(result.out.find(kAnswer), std::string::npos) << result.out;
  EXPECT_NE(result.err.find("decode attended on the GPU for 7 of 7 tokens, last on device"),
            std::string::npos)
      << result.err;
}
#endif

}  // namespace
}  // namespace fathom::testing
