// SPDX-License-Identifier: MIT
#include "bench_llama.h"

#include <llama.h>

#include <algorithm>
#include <vector>

#include "fathom/error.h"

namespace fathom::cli {
namespace {

constexpr std::int32_t kChunk = 512;

struct FreeModel {
  void operator()(llama_model* model) const { llama_model_free(model); }
};
struct FreeContext {
  void operator()(llama_context* context) const { llama_free(context); }
};

}  // namespace

struct LlamaRival::Impl {
  std::unique_ptr<llama_model, FreeModel> model;
  std::unique_ptr<llama_context, FreeContext> context;
};

LlamaRival::LlamaRival(const std::string& model_path, std::int64_t n_ctx, bool flash_attention,
                       int n_threads)
    : impl_(std::make_unique<Impl>()), flash_attention_(flash_attention) {
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  llama_model_params model_params = llama_model_default_params();
  model_params.n_gpu_layers = 0;
  impl_->model.reset(llama_model_load_from_file(model_path.c_str(), model_params));
  if (!impl_->model) throw Error(ErrorCode::kIo, "libllama cannot load '" + model_path + "'");
  llama_context_params params = llama_context_default_params();
  params.n_ctx = static_cast<std::uint32_t>(n_ctx);
  params.n_batch = kChunk;
  params.n_ubatch = kChunk;
  params.n_threads = n_threads;
  params.n_threads_batch = n_threads;
  params.flash_attn_type =
      flash_attention ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
  params.type_k = GGML_TYPE_F16;
  params.type_v = GGML_TYPE_F16;
  impl_->context.reset(llama_init_from_model(impl_->model.get(), params));
  if (!impl_->context) {
    throw Error(ErrorCode::kNoMemory,
                "libllama cannot make a context of " + std::to_string(n_ctx) + " tokens");
  }
}

LlamaRival::~LlamaRival() = default;

std::string LlamaRival::name() const {
  return std::string("libllama, flash attention ") + (flash_attention_ ? "on" : "off");
}

void LlamaRival::Append(std::span<const Token> tokens) {
  std::vector<Token> copy(tokens.begin(), tokens.end());  // libllama takes a mutable pointer
  for (std::size_t done = 0; done < copy.size();) {
    const auto n = std::min<std::size_t>(kChunk, copy.size() - done);
    if (llama_decode(impl_->context.get(),
                     llama_batch_get_one(copy.data() + done, static_cast<std::int32_t>(n))) != 0) {
      throw Error(ErrorCode::kInternal,
                  "libllama failed to decode at token " + std::to_string(n_tokens_));
    }
    done += n;
    n_tokens_ += static_cast<std::int64_t>(n);
  }
}

void LlamaRival::Truncate(std::int64_t n_tokens) {
  llama_memory_seq_rm(llama_get_memory(impl_->context.get()), 0, static_cast<llama_pos>(n_tokens),
                      -1);
  n_tokens_ = n_tokens;
}

}  // namespace fathom::cli
