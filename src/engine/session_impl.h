// SPDX-License-Identifier: MIT
// The inside of a Session, for the other files of this module.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "device/session_decode.h"
#include "engine/query_sampling.h"
#include "engine/split_backend.h"
#include "fathom/session.h"

namespace fathom {

// "cpu" or "cuda"; Error(kUsage) naming both for anything else.
Device ParseDevice(const std::string& name);

struct Session::Impl {
  Impl(std::shared_ptr<const Model> session_model, const SessionOptions& session_options)
      : model(std::move(session_model)),
        options(session_options),
        backend(MakeBackend(options.backend, options.n_threads)),
        runner(model, backend->n_threads(), ParseDevice(options.device),
               std::min<std::int64_t>(options.chunk, options.ctx_size)),
        rows(model->info().n_layers, model->info().heads, options.ctx_size) {
    // Rows and index are in host memory, so what reads few of them stays there. Prefill reads all.
    if (options.device == "cuda") {
      backend = std::make_unique<SplitBackend>(MakeBackend("cuda", options.n_threads),
                                               std::move(backend));
    }
    ClearQueries();
    method = NewMethod(options.method);
    OpenDeviceDecode();
  }

  void ClearQueries() {
    const QuerySamples none(model->info().heads.n_heads, model->info().heads.head_dim);
    queries.assign(static_cast<std::size_t>(model->info().n_layers), {none, none});
    query_strides.assign(queries.size(), kFirstStride);
  }

  std::unique_ptr<Method> NewMethod(const std::string& spec) const {
    return MakeMethod(
        MethodSpec::Parse(spec),
        {&rows, backend.get(), &queries, model->info().has_qk_norm, options.calibration.get()});
  }

  // device_decode, or why there is none.
  void OpenDeviceDecode();
  // Prepares the step of the next token; false where the backend has to attend.
  bool PrepareDevice();
  // Rows, method or its index are no longer what device steps left.
  void ForgetDevice() {
    if (device_decode) device_decode->Forget();
  }
  // Decode's step by the backend.
  void DecodeByBackend(Token token);

  void CheckRoom(std::int64_t n) const;
  void PrefillChunk(std::span<const Token> chunk, bool want_logits);
  void PrefillAttention(std::int32_t layer, std::int64_t n, bool want_logits, const float* q,
                        const float* k, const float* v, float* out);
  void SampleQueries(std::int32_t layer, std::int64_t first, std::int64_t n, const float* q);

  // What rows and method may lie in: mapped files of a stored session.
  std::shared_ptr<void> mapped;
  std::shared_ptr<const Model> model;
  SessionOptions options;
  std::unique_ptr<Backend> backend;
  Runner runner;
  RowStore rows;
  // Sampled from all prefills. An index keeps the statistics it was made with.
  std::vector<LayerQueries> queries;
  std::vector<std::int64_t> query_strides;  // of LayerQueries::samples
  std::unique_ptr<Method> method;
  // Whole decode steps on the device; null without. Gone before the rows that it has registered.
  std::unique_ptr<SessionDecode> device_decode;
  std::string no_device_decode;  // why there is none though the options ask for it
  std::string decode_attention;  // Session::decode_attention
  std::vector<Token> tokens;
  std::span<const float> logits;
  std::vector<float> restored_logits;  // what `logits` shows after resuming
  SessionTimes times;
  // For StoredSession: how many of the first tokens are as they were saved or resumed last, and
  // what changes whenever the sampled queries do.
  std::int64_t stored_tokens = 0;
  std::uint64_t queries_version = 1;
};

// Throws Error(kNoMemory), saying how much a session needs and what there is, unless
// options.ctx_size tokens fit the memory; mapped_tokens of them lie in files.
void CheckSessionMemory(const ModelInfo& model, const MethodSpec& method,
                        const SessionOptions& options, std::int64_t mapped_tokens);

}  // namespace fathom
