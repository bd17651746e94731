// SPDX-License-Identifier: MIT
// libllama's own forward pass, to compare with.
#pragma once

#include <llama-cpp.h>

#include <cmath>
#include <span>
#include <string>
#include <vector>

namespace fathom::testing {

class LlamaReference {
 public:
  // repack: libllama's default; without it weights are used as the file has them.
  LlamaReference(const std::string& path, int n_ctx, ggml_type cache_type, bool repack = true,
                 bool flash_attention = false) {
    llama_model_params model_params = llama_model_default_params();
    model_params.use_extra_bufts = repack;
    model_.reset(llama_model_load_from_file(path.c_str(), model_params));
    if (!model_) return;
    llama_context_params params = llama_context_default_params();
    params.n_ctx = static_cast<std::uint32_t>(n_ctx);
    params.n_batch = params.n_ubatch = 512;
    params.n_threads = params.n_threads_batch = 2;
    params.type_k = params.type_v = cache_type;
    params.flash_attn_type =
        flash_attention ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    context_.reset(llama_init_from_model(model_.get(), params));
    n_vocab_ = static_cast<std::size_t>(llama_vocab_n_tokens(llama_model_get_vocab(model_.get())));
  }

  bool ok() const { return context_ != nullptr; }

  // Appends at most 512 tokens; false on failure. With all, logits exist for each of them.
  bool Decode(std::span<const std::int32_t> tokens, bool all = false) {
    llama_batch batch = llama_batch_init(static_cast<int>(tokens.size()), 0, 1);
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      batch.token[i] = tokens[i];
      batch.pos[i] = position_++;
      batch.n_seq_id[i] = 1;
      batch.seq_id[i][0] = 0;
      batch.logits[i] = all || i + 1 == tokens.size() ? 1 : 0;
    }
    batch.n_tokens = static_cast<int>(tokens.size());
    const int status = llama_decode(context_.get(), batch);
    llama_batch_free(batch);
    return status == 0;
  }

  // Logits of token i of the last Decode (-1: its last).
  std::span<const float> Logits(int i = -1) const {
    return {llama_get_logits_ith(context_.get(), i), n_vocab_};
  }

 private:
  llama_model_ptr model_;
  llama_context_ptr context_;
  std::size_t n_vocab_ = 0;
  std::int32_t position_ = 0;
};

// |a - b| / |b|; NaN never passes a comparison with a bound.
inline double RelativeL2(std::span<const float> a, std::span<const float> b) {
  if (a.size() != b.size() || a.empty()) return INFINITY;
  double difference = 0;
  double norm = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    norm += double{b[i]} * b[i];
  }
  return std::sqrt(difference / norm);
}

}  // namespace fathom::testing
