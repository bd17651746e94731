// SPDX-License-Identifier: MIT
#include "bench_ggml.h"

#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml-cpp.h>
#include <ggml-cpu.h>
#include <ggml.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "fathom/error.h"

namespace fathom::cli {
namespace {

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

std::int64_t RowHalfs(const HeadGeometry& heads) {
  return std::int64_t{heads.n_kv_heads} * heads.head_dim;
}

// A tensor over memory of ours.
ggml_tensor* Over(ggml_context* context, ggml_type type, std::array<std::int64_t, 3> shape,
                  void* data) {
  ggml_tensor* tensor = ggml_new_tensor_3d(context, type, shape[0], shape[1], shape[2]);
  tensor->data = data;
  return tensor;
}

// [n_queries][n_kv]: 0 where a query sees a token, -inf where it does not.
template <typename T>
std::vector<T> CausalMask(std::int64_t n_kv, std::int64_t n_queries, T sees, T hidden) {
  std::vector<T> mask(Size(n_kv * n_queries), sees);
  for (std::int64_t t = 0; t < n_queries; ++t) {
    for (std::int64_t i = n_kv - n_queries + t + 1; i < n_kv; ++i)
      mask[Size(t * n_kv + i)] = hidden;
  }
  return mask;
}

}  // namespace

GgmlCache::GgmlCache(const RowStore& rows, std::int64_t n_layers, std::int64_t n_tokens)
    : rows_(rows), n_tokens_(n_tokens) {
  const std::int32_t n_kv_heads = heads().n_kv_heads;
  const std::int64_t dim = heads().head_dim;
  const std::size_t width = Size(RowHalfs(heads()));
  layers_.reserve(Size(n_layers));
  for (std::int32_t layer = 0; layer < n_layers; ++layer) {
    layers_.emplace_back(3 * width * Size(n_tokens) * sizeof(Half));
    Half* k = keys(layer);
    Half* v = values(layer);
    Half* t = transposed_values(layer);
#pragma omp parallel for collapse(2) schedule(static)
    for (std::int32_t h = 0; h < n_kv_heads; ++h) {
      for (std::int64_t i = 0; i < n_tokens; ++i) {
        const Half* row = rows.rows(layer, h) + i * 2 * dim;
        const std::size_t at = Size(i) * width + Size(h * dim);
        std::memcpy(k + at, row, Size(dim) * sizeof(Half));
        std::memcpy(v + at, row + dim, Size(dim) * sizeof(Half));
        for (std::int64_t d = 0; d < dim; ++d) t[(h * dim + d) * n_tokens + i] = row[dim + d];
      }
    }
  }
}

double GgmlCache::LayerBytes(HeadGeometry heads, std::int64_t n_tokens) {
  return 3.0 * static_cast<double>(RowHalfs(heads) * n_tokens) * sizeof(Half);
}

Half* GgmlCache::At(std::int64_t layer, std::size_t part) const {
  return reinterpret_cast<Half*>(layers_[Size(layer)].data()) +
         part * Size(RowHalfs(heads()) * n_tokens_);
}

struct GgmlAttention::Impl {
  const GgmlCache* cache = nullptr;
  std::int64_t n_queries = 0;
  int n_threads = 1;
  std::vector<float> q;  // [n_queries][n_heads][D]
  std::vector<ggml_fp16_t> half_mask;
  std::vector<float> mask;
  ggml_context_ptr context;
  ggml_gallocr_ptr allocator;
  std::vector<ggml_cgraph*> graphs;  // [n_layers], all in the same memory
  std::vector<ggml_tensor*> results;
  std::vector<std::uint8_t> work;
  std::size_t last = 0;

  float scale() const { return 1.0F / std::sqrt(static_cast<float>(cache->heads().head_dim)); }

  ggml_tensor* Queries() {
    const HeadGeometry& heads = cache->heads();
    ggml_tensor* all =
        Over(context.get(), GGML_TYPE_F32, {heads.head_dim, heads.n_heads, n_queries}, q.data());
    return ggml_permute(context.get(), all, 0, 2, 1, 3);
  }

  // Rows of all heads, seen head by head: [n_kv_heads] of [n_tokens] of [D].
  ggml_tensor* ByHead(Half* rows) {
    const HeadGeometry& heads = cache->heads();
    ggml_tensor* all = Over(context.get(), GGML_TYPE_F16,
                            {heads.head_dim, heads.n_kv_heads, cache->n_tokens()}, rows);
    return ggml_permute(context.get(), all, 0, 2, 1, 3);
  }

  // Keys (part 0) or values (part 1) of the row store: [n_kv_heads] of [n_tokens] of [D].
  ggml_tensor* OfRows(std::int64_t layer, std::size_t part) {
    const HeadGeometry& heads = cache->heads();
    const auto l = static_cast<std::int32_t>(layer);
    // ggml does not write them.
    auto* first = const_cast<Half*>(cache->rows().rows(l, 0));
    const std::int64_t halfs = cache->rows().rows(l, heads.n_kv_heads - 1) - first +
                               2 * cache->n_tokens() * heads.head_dim;
    const std::int64_t head_halfs =
        heads.n_kv_heads > 1 ? cache->rows().rows(l, 1) - cache->rows().rows(l, 0) : halfs;
    ggml_tensor* all = Over(context.get(), GGML_TYPE_F16, {halfs, 1, 1}, first);
    const std::size_t row_bytes = Size(heads.head_dim) * sizeof(Half);
    return ggml_view_3d(context.get(), all, heads.head_dim, cache->n_tokens(), heads.n_kv_heads,
                        2 * row_bytes, Size(head_halfs) * sizeof(Half), part * row_bytes);
  }

  ggml_tensor* Flash(std::int64_t layer, bool rows) {
    ggml_context* c = context.get();
    ggml_tensor* visible =
        half_mask.empty()
            ? nullptr
            : Over(c, GGML_TYPE_F16, {cache->n_tokens(), n_queries, 1}, half_mask.data());
    ggml_tensor* k = rows ? OfRows(layer, 0) : ByHead(cache->keys(layer));
    ggml_tensor* v = rows ? OfRows(layer, 1) : ByHead(cache->values(layer));
    ggml_tensor* result = ggml_flash_attn_ext(c, Queries(), k, v, visible, scale(), 0, 0);
    ggml_prec_set_acc(result, GGML_PREC_F32);
    return result;
  }

  ggml_tensor* SoftMax(std::int64_t layer) {
    ggml_context* c = context.get();
    const HeadGeometry& heads = cache->heads();
    ggml_tensor* visible =
        mask.empty() ? nullptr
                     : Over(c, GGML_TYPE_F32, {cache->n_tokens(), n_queries, 1}, mask.data());
    ggml_tensor* values =
        Over(c, GGML_TYPE_F16, {cache->n_tokens(), heads.head_dim, heads.n_kv_heads},
             cache->transposed_values(layer));
    ggml_tensor* scores = ggml_mul_mat(c, ByHead(cache->keys(layer)), Queries());
    scores = ggml_soft_max_ext(c, scores, visible, scale(), 0);
    ggml_tensor* mixed = ggml_permute(c, ggml_mul_mat(c, values, scores), 0, 2, 1, 3);
    return ggml_cont_2d(c, mixed, std::int64_t{heads.head_dim} * heads.n_heads, n_queries);
  }

  // Graphs use the same memory for what they compute, as libllama's do from layer to layer.
  void Build(Kind kind) {
    constexpr std::size_t kGraphNodes = 32;
    ggml_init_params params{};
    const std::size_t per_layer =
        ggml_graph_overhead_custom(kGraphNodes, false) + kGraphNodes * ggml_tensor_overhead();
    params.mem_size = Size(cache->n_layers()) * per_layer;
    params.no_alloc = true;
    context.reset(ggml_init(params));
    allocator.reset(ggml_gallocr_new(ggml_backend_cpu_buffer_type()));
    for (std::int64_t layer = 0; layer < cache->n_layers(); ++layer) {
      ggml_tensor* result =
          kind == Kind::kSoftMax ? SoftMax(layer) : Flash(layer, kind == Kind::kFlashRows);
      ggml_set_output(result);
      ggml_cgraph* graph = ggml_new_graph_custom(context.get(), kGraphNodes, false);
      ggml_build_forward_expand(graph, result);
      if (!ggml_gallocr_alloc_graph(allocator.get(), graph)) {
        throw Error(ErrorCode::kNoMemory, "ggml has no memory for attention over " +
                                              std::to_string(cache->n_tokens()) +
                                              " tokens; choose fewer --tokens or --kv-heads");
      }
      graphs.push_back(graph);
      results.push_back(result);
    }
    work.resize(ggml_graph_plan(graphs.front(), n_threads, nullptr).work_size);
  }
};

const char* GgmlAttention::Name(Kind kind) {
  switch (kind) {
    case Kind::kFlash:
      return "ggml flash attention";
    case Kind::kFlashRows:
      return "ggml flash attention, our rows";
    case Kind::kSoftMax:
      return "ggml soft_max";
  }
  return "";
}

GgmlAttention::GgmlAttention(const GgmlCache& cache, Kind kind, std::int64_t n_queries,
                             int n_threads)
    : impl_(std::make_unique<Impl>()) {
  const HeadGeometry& heads = cache.heads();
  impl_->cache = &cache;
  impl_->n_queries = n_queries;
  impl_->n_threads = n_threads;
  impl_->q.resize(Size(n_queries * heads.n_heads * heads.head_dim));
  // A single query sees everything; libllama gives a mask even then, which only costs ggml.
  if (n_queries > 1 && kind != Kind::kSoftMax) {
    impl_->half_mask = CausalMask(cache.n_tokens(), n_queries, ggml_fp32_to_fp16(0.0F),
                                  ggml_fp32_to_fp16(-std::numeric_limits<float>::infinity()));
  } else if (n_queries > 1) {
    impl_->mask =
        CausalMask(cache.n_tokens(), n_queries, 0.0F, -std::numeric_limits<float>::infinity());
  }
  impl_->Build(kind);
}

GgmlAttention::~GgmlAttention() = default;

void GgmlAttention::Run(std::int64_t layer, const float* q) {
  std::memcpy(impl_->q.data(), q, impl_->q.size() * sizeof(float));
  ggml_cgraph* graph = impl_->graphs[Size(layer)];
  ggml_cplan plan = ggml_graph_plan(graph, impl_->n_threads, nullptr);
  plan.work_data = impl_->work.data();
  if (ggml_graph_compute(graph, &plan) != GGML_STATUS_SUCCESS) {
    throw Error(ErrorCode::kInternal, "ggml failed to attend");
  }
  impl_->last = Size(layer);
}

const float* GgmlAttention::out() const {
  return static_cast<const float*>(impl_->results[impl_->last]->data);
}

std::int64_t GgmlAttention::work_bytes() const {
  return static_cast<std::int64_t>(ggml_gallocr_get_buffer_size(impl_->allocator.get(), 0) +
                                   impl_->work.size());
}

double CheckedDifference(const std::string& name, const float* theirs,
                         const std::vector<float>& ours) {
  constexpr double kMost = 0.02;  // ggml rounds queries, and in flash attention sums, to fp16
  double difference = 0;
  double norm = 0;
  for (std::size_t i = 0; i < ours.size(); ++i) {
    difference += std::pow(static_cast<double>(theirs[i]) - ours[i], 2);
    norm += std::pow(static_cast<double>(ours[i]), 2);
  }
  const double relative = std::sqrt(difference / norm);
  if (relative < kMost) return relative;
  throw Error(ErrorCode::kInternal, name + " differs from ours by " + std::to_string(relative) +
                                        " (relative L2), more than " + std::to_string(kMost));
}

}  // namespace fathom::cli
