// SPDX-License-Identifier: MIT
#include "fathom/model.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <vector>

#include "model/fingerprint.h"
#include "model/ggml_runtime.h"
#include "model/model_impl.h"

namespace fathom {
namespace {

// "Q8_0 (29), F32 (37)": by share of the file.
std::string WeightTypesText(const GgufFile& file) {
  struct Use {
    std::string name;
    std::int64_t count = 0;
    std::size_t bytes = 0;
  };
  std::map<ggml_type, Use> by_type;
  for (const GgufTensor& tensor : file.tensors()) {
    Use& use = by_type[tensor.type];
    ++use.count;
    use.bytes += tensor.bytes;
  }
  std::vector<Use> uses;
  for (auto& [type, use] : by_type) {
    use.name = ggml_type_name(type);
    std::transform(use.name.begin(), use.name.end(), use.name.begin(),
                   [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
    uses.push_back(use);
  }
  std::stable_sort(uses.begin(), uses.end(),
                   [](const Use& a, const Use& b) { return a.bytes > b.bytes; });
  std::string text;
  for (const Use& use : uses) {
    text += (text.empty() ? "" : ", ") + use.name + " (" + std::to_string(use.count) + ")";
  }
  return text;
}

ModelInfo MakeInfo(const GgufFile& file, const HParams& hparams, const Weights& weights) {
  ModelInfo info;
  info.path = file.path();
  info.name = file.Text("general.name").value_or("");
  info.architecture = hparams.architecture_name;
  info.weight_types = WeightTypesText(file);
  info.file_bytes = static_cast<std::int64_t>(file.mapping().bytes().size());
  for (const GgufTensor& tensor : file.tensors()) info.n_parameters += tensor.elements();
  info.n_layers = hparams.n_layers;
  info.n_embd = hparams.n_embd;
  info.n_ff = hparams.n_ff;
  info.n_vocab = static_cast<std::int32_t>(weights.n_vocab());
  info.n_ctx_train = hparams.n_ctx_train;
  info.heads = hparams.heads;
  const std::vector<LayerWeights>& layers = weights.For(1).layers;
  info.has_qk_norm = layers.front().attn_q_norm != nullptr;
  info.has_qkv_bias = std::any_of(layers.begin(), layers.end(), [](const LayerWeights& layer) {
    return layer.attn_q_bias || layer.attn_k_bias || layer.attn_v_bias;
  });
  info.tied_output = weights.tied_output();
  info.repacked_bytes = weights.repack_bytes();
  info.rope = hparams.rope_text;
  if (weights.rope_freqs() != nullptr) info.rope += ", frequency factors";
  return info;
}

}  // namespace

Model::Model() = default;
Model::~Model() = default;

std::shared_ptr<const Model> Model::Open(const std::string& path) {
  InitGgml();
  const std::shared_ptr<Model> model(new Model());
  model->impl_ = std::make_unique<Impl>(path);
  Impl& impl = *model->impl_;
  if (impl.weights.n_vocab() != impl.tokenizer.n_tokens()) {
    throw impl.file.MakeError(ErrorCode::kCorrupt, "tensor 'token_embd.weight' has " +
                                                       std::to_string(impl.weights.n_vocab()) +
                                                       " rows, the tokenizer has " +
                                                       std::to_string(impl.tokenizer.n_tokens()) +
                                                       " tokens; convert the model again");
  }
  impl.info = MakeInfo(impl.file, impl.hparams, impl.weights);
  return model;
}

const ModelInfo& Model::info() const { return impl_->info; }

const std::string& Model::fingerprint() const {
  std::call_once(impl_->fingerprint_once,
                 [this] { impl_->fingerprint = FileFingerprint(impl_->file); });
  return impl_->fingerprint;
}

std::vector<Token> Model::Tokenize(std::string_view text, bool special) const {
  return impl_->tokenizer.Tokenize(text, special);
}

Token Model::bos() const { return impl_->tokenizer.bos(); }

bool Model::IsEndOfGeneration(Token token) const {
  return impl_->tokenizer.IsEndOfGeneration(token);
}

std::string Model::Piece(Token token, bool special) const {
  return impl_->tokenizer.Piece(token, special);
}

bool Model::has_chat_template() const { return impl_->tokenizer.has_chat_template(); }

std::vector<Token> Model::ChatTokens(std::span<const ChatMessage> messages) const {
  return impl_->tokenizer.ChatTokens(messages);
}

}  // namespace fathom
