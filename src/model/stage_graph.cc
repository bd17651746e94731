// SPDX-License-Identifier: MIT
#include "model/stage_graph.h"

#include <ggml-alloc.h>
#include <ggml-backend.h>

#include <initializer_list>
#include <string>

#include "fathom/error.h"

namespace fathom {
namespace {

// Nodes and leaves of one stage are about 45; biases add 7.
constexpr std::size_t kGraphSize = 128;

Error OutOfMemory(std::int64_t n_tokens) {
  return {ErrorCode::kNoMemory, "not enough memory for the activations of " +
                                    std::to_string(n_tokens) +
                                    " tokens at once; pass fewer tokens per call"};
}

}  // namespace

std::uint8_t* WorkBuffer::AtLeast(std::size_t bytes) {
  if (bytes > size_) {
    data_.reset();
    size_ = 0;
    data_.reset(static_cast<std::uint8_t*>(::operator new[](bytes, std::align_val_t{64})));
    size_ = bytes;
  }
  return data_.get();
}

StageGraphs::StageGraphs(const HParams& hparams, const Weights& weights, std::int64_t n_tokens,
                         int n_threads)
    : hparams_(hparams),
      weights_(weights),
      matrices_(weights.For(n_tokens)),
      n_tokens_(n_tokens),
      n_threads_(n_threads) {
  const auto n_stages = static_cast<std::size_t>(hparams.n_layers) + 1;
  ggml_init_params params{};
  params.mem_size = n_stages * (kGraphSize * ggml_tensor_overhead() +
                                ggml_graph_overhead_custom(kGraphSize, /*grads=*/false)) +
                    16 * ggml_tensor_overhead();
  params.no_alloc = true;
  context_.reset(ggml_init(params));
  if (!context_) throw OutOfMemory(n_tokens);
  AllocateInputsAndOutputs();
  stages_.resize(n_stages);
  for (std::int32_t stage = 0; stage <= hparams.n_layers; ++stage) BuildStage(stage);
  AllocateTemporaries();
  for (Stage& stage : stages_) stage.plan = ggml_graph_plan(stage.graph, n_threads, nullptr);
}

void StageGraphs::AllocateInputsAndOutputs() {
  ggml_context* c = context_.get();
  const auto matrix = [&](std::int64_t size) {
    return ggml_new_tensor_2d(c, GGML_TYPE_F32, size, n_tokens_);
  };
  tokens_ = ggml_new_tensor_1d(c, GGML_TYPE_I32, n_tokens_);
  positions_ = ggml_new_tensor_1d(c, GGML_TYPE_I32, n_tokens_);
  residual_ = matrix(hparams_.n_embd);
  q_ = matrix(hparams_.q_size());
  k_ = matrix(hparams_.kv_size());
  v_ = matrix(hparams_.kv_size());
  attention_ = matrix(hparams_.q_size());
  logits_ = ggml_new_tensor_1d(c, GGML_TYPE_F32, weights_.n_vocab());
  io_buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(c, ggml_backend_cpu_buffer_type()));
  if (!io_buffer_) throw OutOfMemory(n_tokens_);
}

// Makes node's result land in the memory of `place`, so that stages share it without copies.
void StageGraphs::PlaceOutput(ggml_tensor* node, const ggml_tensor* place, ggml_cgraph* graph) {
  ggml_set_output(node);
  if (ggml_nbytes(node) != ggml_nbytes(place) ||
      ggml_backend_tensor_alloc(place->buffer, node, place->data) != GGML_STATUS_SUCCESS) {
    throw Error(ErrorCode::kInternal, "a graph output does not fit its place");
  }
  ggml_build_forward_expand(graph, node);
}

ggml_tensor* StageGraphs::Norm(ggml_tensor* x, ggml_tensor* weight) {
  return ggml_mul(context_.get(), ggml_rms_norm(context_.get(), x, hparams_.rms_eps), weight);
}

ggml_tensor* StageGraphs::Linear(ggml_tensor* weight, ggml_tensor* bias, ggml_tensor* x) {
  ggml_tensor* y = ggml_mul_mat(context_.get(), weight, x);
  return bias == nullptr ? y : ggml_add(context_.get(), y, bias);
}

ggml_tensor* StageGraphs::Rope(ggml_tensor* x, ggml_tensor* norm, std::int64_t n_heads) {
  const RopeParams& rope = hparams_.rope;
  ggml_tensor* heads =
      ggml_reshape_3d(context_.get(), x, hparams_.heads.head_dim, n_heads, n_tokens_);
  if (norm != nullptr) heads = Norm(heads, norm);
  return ggml_rope_ext(context_.get(), heads, positions_, weights_.rope_freqs(), rope.n_dims,
                       rope.mode, rope.n_ctx_orig, rope.freq_base, rope.freq_scale, rope.ext_factor,
                       rope.attn_factor, rope.beta_fast, rope.beta_slow);
}

ggml_tensor* StageGraphs::FeedForward(const LayerWeights& w, ggml_tensor* attention,
                                      ggml_tensor* residual) {
  ggml_context* c = context_.get();
  ggml_tensor* middle = ggml_add(c, Linear(w.attn_output, w.attn_output_bias, attention), residual);
  ggml_tensor* x = Norm(middle, w.ffn_norm);
  ggml_tensor* up = Linear(w.ffn_up, w.ffn_up_bias, x);
  ggml_tensor* gate = Linear(w.ffn_gate, w.ffn_gate_bias, x);
  ggml_tensor* down = Linear(w.ffn_down, w.ffn_down_bias, ggml_swiglu_split(c, gate, up));
  return ggml_add(c, down, middle);
}

void StageGraphs::BuildQkv(const LayerWeights& w, ggml_tensor* x, ggml_cgraph* graph) {
  ggml_tensor* h = Norm(x, w.attn_norm);
  PlaceOutput(Rope(Linear(w.attn_q, w.attn_q_bias, h), w.attn_q_norm, hparams_.heads.n_heads), q_,
              graph);
  PlaceOutput(Rope(Linear(w.attn_k, w.attn_k_bias, h), w.attn_k_norm, hparams_.heads.n_kv_heads),
              k_, graph);
  PlaceOutput(Linear(w.attn_v, w.attn_v_bias, h), v_, graph);
}

void StageGraphs::BuildStage(std::int32_t stage) {
  ggml_context* c = context_.get();
  ggml_cgraph* graph = ggml_new_graph_custom(c, kGraphSize, /*grads=*/false);
  stages_[static_cast<std::size_t>(stage)].graph = graph;
  const std::vector<LayerWeights>& layers = matrices_.layers;
  if (stage == hparams_.n_layers) {
    // Only the last token has logits: the other rows need no feed-forward any more.
    const auto last_row = [&](ggml_tensor* x) {
      return ggml_view_2d(c, x, x->ne[0], 1, x->nb[1],
                          static_cast<std::size_t>(n_tokens_ - 1) * x->nb[1]);
    };
    ggml_tensor* x = FeedForward(layers.back(), last_row(attention_), last_row(residual_));
    x = Norm(x, weights_.output_norm());
    PlaceOutput(Linear(matrices_.output, weights_.output_bias(), x), logits_, graph);
    return;
  }
  // The new residual overwrites the old one: by then its only reader, the first addition of the
  // feed-forward part, is done.
  ggml_tensor* x =
      stage == 0 ? ggml_get_rows(c, weights_.token_embd(), tokens_)
                 : FeedForward(layers[static_cast<std::size_t>(stage) - 1], attention_, residual_);
  PlaceOutput(x, residual_, graph);
  BuildQkv(layers[static_cast<std::size_t>(stage)], x, graph);
}

// One buffer serves all stages. It must reach its final size before addresses in it are given out:
// first plan every stage, then place every stage.
void StageGraphs::AllocateTemporaries() {
  allocator_.reset(ggml_gallocr_new(ggml_backend_cpu_buffer_type()));
  for (const Stage& stage : stages_) {
    if (!ggml_gallocr_reserve(allocator_.get(), stage.graph)) throw OutOfMemory(n_tokens_);
  }
  const std::size_t size = ggml_gallocr_get_buffer_size(allocator_.get(), 0);
  for (const Stage& stage : stages_) {
    if (!ggml_gallocr_alloc_graph(allocator_.get(), stage.graph)) throw OutOfMemory(n_tokens_);
  }
  if (ggml_gallocr_get_buffer_size(allocator_.get(), 0) != size) {
    throw Error(ErrorCode::kInternal, "ggml moved the buffer of the activations");
  }
}

void StageGraphs::Run(std::int32_t stage, WorkBuffer& work) {
  Stage& s = stages_[static_cast<std::size_t>(stage)];
  s.plan.work_data = work.AtLeast(s.plan.work_size);
  const ggml_status status = ggml_graph_compute(s.graph, &s.plan);
  if (status == GGML_STATUS_SUCCESS) return;
  if (status == GGML_STATUS_ALLOC_FAILED) throw OutOfMemory(n_tokens_);
  throw Error(ErrorCode::kInternal,
              "ggml failed in stage " + std::to_string(stage) + " of the forward pass");
}

}  // namespace fathom
