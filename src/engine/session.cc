// SPDX-License-Identifier: MIT
#include "fathom/session.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "base/timer.h"
#include "engine/query_sampling.h"
#include "engine/session_impl.h"
#include "fathom/error.h"

namespace fathom {
namespace {

constexpr std::int32_t kMaxChunk = 1 << 16;

// "5.9 GiB", rounded up.
std::string SizeText(std::int64_t bytes) {
  constexpr std::array units = {"MiB", "GiB", "TiB"};
  double size = static_cast<double>(bytes) / (1 << 20);
  std::size_t unit = 0;
  for (; size >= 1024 && unit + 1 < units.size(); ++unit) size /= 1024;
  const auto tenths = static_cast<std::int64_t>(std::ceil(size * 10));
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " " + units.at(unit);
}

void CheckDecodeAttention(const std::string& where) {
  if (where == "device" || where == "cpu") return;
  throw Error(ErrorCode::kUsage, "decode attention '" + where + "'; valid places: device, cpu");
}

}  // namespace

Device ParseDevice(const std::string& name) {
  if (name == "cpu") return Device::kCpu;
  if (name == "cuda") return Device::kCuda;
  throw Error(ErrorCode::kUsage, "unknown device '" + name + "'; valid names: cpu, cuda");
}

void CheckSessionMemory(const ModelInfo& model, const MethodSpec& method,
                        const SessionOptions& options, std::int64_t mapped_tokens) {
  SessionMemory need = EstimateMemory(model, method, options.ctx_size, options.chunk);
  const SessionMemory mapped = EstimateMemory(model, method, mapped_tokens, options.chunk);
  if (mapped_tokens > 0) {
    need.rows_bytes -= mapped.rows_bytes;
    need.index_bytes -= mapped.index_bytes;
  }
  // The mapped weights are counted as needed: they must stay in the page cache for decode to be
  // fast.
  if (need.total() <= need.available_bytes) return;
  throw Error(ErrorCode::kNoMemory,
              "a session of " + std::to_string(options.ctx_size) + " tokens needs " +
                  SizeText(need.total()) + " (rows " + SizeText(need.rows_bytes) + ", index " +
                  SizeText(need.index_bytes) + ", weights " + SizeText(need.weights_bytes) +
                  ", workspace " + SizeText(need.workspace_bytes) + ") and this machine has " +
                  SizeText(need.available_bytes) +
                  " available; choose a shorter context (-c) or a smaller model");
}

void Session::Impl::CheckRoom(std::int64_t n) const {
  const std::int64_t need = static_cast<std::int64_t>(tokens.size()) + n;
  if (need <= options.ctx_size) return;
  throw Error(ErrorCode::kUsage, std::to_string(need) + " tokens do not fit the context of " +
                                     std::to_string(options.ctx_size) + " by " +
                                     std::to_string(need - options.ctx_size) + "; use -c " +
                                     std::to_string(need) + " or more, or shorten the input");
}

void Session::Impl::SampleQueries(std::int32_t layer, std::int64_t first, std::int64_t n,
                                  const float* q) {
  const HeadGeometry& heads = model->info().heads;
  const std::int64_t token_floats = std::int64_t{heads.n_heads} * heads.head_dim;
  ++queries_version;
  LayerQueries& kept = queries[static_cast<std::size_t>(layer)];
  std::int64_t& stride = query_strides[static_cast<std::size_t>(layer)];
  for (std::int64_t t = 0; t < n; ++t) {
    const std::int64_t position = first + t;
    if (position < kStatsSkip) continue;
    if ((position - kStatsSkip) % stride == 0) {
      kept.samples.Add(position, q + t * token_floats);
      if (kept.samples.size() > kMaxSamples) {
        kept.samples.KeepEverySecond();
        stride *= 2;
      }
    }
    if (position % kRecentStride == 0) {
      kept.recent.Add(position, q + t * token_floats);
      if (kept.recent.size() > 2 * kRecentSamples) kept.recent.KeepLast(kRecentSamples);
    }
  }
}

void Session::Impl::PrefillAttention(std::int32_t layer, std::int64_t n, bool want_logits,
                                     const float* q, const float* k, const float* v, float* out) {
  const double start = NowSeconds();
  const HeadGeometry& heads = model->info().heads;
  const auto first = static_cast<std::int64_t>(tokens.size());
  if (options.prefill_observer) options.prefill_observer(layer, first, n, q, k, v);
  rows.Write(layer, first, n, k, v);
  SampleQueries(layer, first, n, q);
  // The last layer's output matters for the last token alone, and for that only when its logits are
  // wanted.
  std::int64_t skip = 0;
  if (layer == model->info().n_layers - 1) skip = want_logits ? n - 1 : n;
  if (skip < n) {
    std::vector<const Half*> head_rows(static_cast<std::size_t>(heads.n_kv_heads));
    for (std::int32_t h = 0; h < heads.n_kv_heads; ++h)
      head_rows[static_cast<std::size_t>(h)] = rows.rows(layer, h);
    const std::int64_t offset = skip * heads.n_heads * heads.head_dim;
    backend->Prefill({heads, 1.0F / std::sqrt(static_cast<float>(heads.head_dim)), first + skip,
                      n - skip, q + offset, out + offset, head_rows});
  }
  times.prefill_attention_s += NowSeconds() - start;
}

void Session::Impl::PrefillChunk(std::span<const Token> chunk, bool want_logits) {
  const auto attention = [&](std::int32_t layer, std::int64_t n, const float* q, const float* k,
                             const float* v,
                             float* out) { PrefillAttention(layer, n, want_logits, q, k, v, out); };
  logits = {};
  logits = runner.Forward(chunk, static_cast<std::int64_t>(tokens.size()), attention, want_logits);
  tokens.insert(tokens.end(), chunk.begin(), chunk.end());
  rows.Commit(static_cast<std::int64_t>(tokens.size()));
  ForgetDevice();
  if (device_decode) device_decode->Expect(*method);
  times.prefill_tokens += static_cast<std::int64_t>(chunk.size());
}

Session::Session(std::shared_ptr<const Model> model, const SessionOptions& options) {
  SessionOptions checked = options;
  if (checked.ctx_size == 0) checked.ctx_size = model->info().n_ctx_train;
  if (checked.ctx_size < 1) {
    throw Error(ErrorCode::kUsage, "context of " + std::to_string(checked.ctx_size) +
                                       " tokens; it must be at least 1");
  }
  if (checked.chunk < 1 || checked.chunk > kMaxChunk) {
    throw Error(ErrorCode::kUsage, "prefill chunk of " + std::to_string(checked.chunk) +
                                       " tokens; it must be 1.." + std::to_string(kMaxChunk));
  }
  ParseDevice(checked.device);
  CheckDecodeAttention(checked.decode_attention);
  if (checked.calibration) checked.calibration->Check(model->info().n_layers, model->info().heads);
  const MethodSpec method = MethodSpec::Parse(checked.method);
  ValidateMethodSpec(method);
  if (checked.check_memory) CheckSessionMemory(model->info(), method, checked, 0);
  impl_ = std::make_unique<Impl>(std::move(model), checked);
}

Session::~Session() = default;

const Model& Session::model() const { return *impl_->model; }
const SessionOptions& Session::options() const { return impl_->options; }
std::span<const Token> Session::tokens() const { return impl_->tokens; }
std::int64_t Session::n_tokens() const { return static_cast<std::int64_t>(impl_->tokens.size()); }
Method& Session::method() { return *impl_->method; }
const Backend& Session::backend() const { return *impl_->backend; }
const RowStore& Session::rows() const { return impl_->rows; }
std::span<const float> Session::logits() const { return impl_->logits; }
const std::string& Session::decode_attention() const { return impl_->decode_attention; }
const SessionTimes& Session::times() const { return impl_->times; }
void Session::ResetTimes() { impl_->times = {}; }

void Session::Prefill(std::span<const Token> tokens, const ProgressFn& progress) {
  impl_->CheckRoom(static_cast<std::int64_t>(tokens.size()));
  impl_->tokens.reserve(impl_->tokens.size() + tokens.size());
  const auto chunk = static_cast<std::size_t>(impl_->options.chunk);
  for (std::size_t done = 0; done < tokens.size();) {
    const double start = NowSeconds();
    const std::size_t n = std::min(chunk, tokens.size() - done);
    impl_->PrefillChunk(tokens.subspan(done, n), done + n == tokens.size());
    done += n;
    impl_->times.prefill_s += NowSeconds() - start;
    if (progress &&
        !progress(static_cast<std::int64_t>(done), static_cast<std::int64_t>(tokens.size())) &&
        done < tokens.size()) {
      throw Error(ErrorCode::kCancelled, "prefill stopped after " + std::to_string(done) + " of " +
                                             std::to_string(tokens.size()) + " tokens");
    }
  }
}

void Session::BuildIndex() {
  const double start = NowSeconds();
  impl_->method->BuildIndex(n_tokens());
  impl_->ForgetDevice();
  impl_->times.index_s += NowSeconds() - start;
}

void Session::Decode(Token token) {
  impl_->CheckRoom(1);
  const double start = NowSeconds();
  const std::int64_t position = n_tokens();
  impl_->tokens.reserve(impl_->tokens.size() + 1);
  const bool on_device = impl_->PrepareDevice();
  if (on_device) {
    impl_->logits = impl_->device_decode->Step(*impl_->method, token);
  } else {
    impl_->DecodeByBackend(token);
  }
  impl_->tokens.push_back(token);
  impl_->rows.Commit(position + 1);
  impl_->times.decode_s += NowSeconds() - start;
  ++impl_->times.decode_tokens;
  impl_->times.device_decode_tokens += on_device ? 1 : 0;
}

void Session::Truncate(std::int64_t n_tokens) {
  if (n_tokens < 0 || n_tokens > this->n_tokens()) {
    throw Error(ErrorCode::kUsage, "cannot truncate a session of " +
                                       std::to_string(this->n_tokens()) + " tokens to " +
                                       std::to_string(n_tokens));
  }
  impl_->method->Truncate(n_tokens);
  impl_->ForgetDevice();
  impl_->rows.Truncate(n_tokens);
  impl_->tokens.resize(static_cast<std::size_t>(n_tokens));
  impl_->logits = {};
  impl_->stored_tokens = std::min(impl_->stored_tokens, n_tokens);
  ++impl_->queries_version;
  if (n_tokens == 0) return impl_->ClearQueries();
  for (LayerQueries& layer : impl_->queries) {
    layer.samples.DropFrom(n_tokens);
    layer.recent.DropFrom(n_tokens);
  }
}

void Session::SetMethod(const std::string& spec) {
  auto method = impl_->NewMethod(spec);
  impl_->method = std::move(method);
  impl_->ForgetDevice();
  impl_->options.method = spec;
}

}  // namespace fathom
