// SPDX-License-Identifier: MIT
// Session: one sequence of tokens with its rows and index, prefilled densely and decoded by a
// method.
//
// StoredSession (fathom/stored_session.h) keeps one on disk.
//
// Typical use: Prefill(document), BuildIndex(), then per question Prefill(question), Generate(...),
// Truncate(back). Not thread-safe; sessions of one model are independent. Errors leave the session
// as it was before the call, except that a cancelled Prefill keeps the chunks already done.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fathom/calibration.h"
#include "fathom/method.h"
#include "fathom/model.h"

namespace fathom {

// Sees what a prefill computes: called once per layer, in order, for every chunk, with the tokens
// first .. first + n - 1. q [n][n_heads][D] and k [n][n_kv_heads][D] after RoPE, v
// [n][n_kv_heads][D], in fp32 before they are rounded to rows; valid during the call only. What it
// throws ends the Prefill, which drops the chunk.
using PrefillObserver = std::function<void(std::int32_t layer, std::int64_t first, std::int64_t n,
                                           const float* q, const float* k, const float* v)>;

struct SessionOptions {
  std::int64_t ctx_size = 0;    // capacity in tokens; 0: the model's training context
  std::string backend = "cpu";  // MakeBackend name
  // Where matrices are multiplied and prefills attend: "cpu" or "cuda". Rows and index are in host
  // memory either way.
  std::string device = "cpu";
  // Where decode attends when `device` is "cuda": "device", whole steps without the host in between
  // for methods and lengths that the device can do and `backend` for the others, or "cpu", always
  // `backend`. See Session::decode_attention.
  std::string decode_attention = "device";
  std::string method = "fathom";  // MethodSpec text
  int n_threads = 0;              // 0: all processors this process may use
  std::int32_t chunk = 512;  // tokens per prefill chunk: larger is faster and takes more memory
  std::shared_ptr<const Calibration> calibration;  // statistics of a file; null: the prefill's own
  bool check_memory = true;               // refuse a session that cannot fit this machine's memory
  PrefillObserver prefill_observer = {};  // empty: nobody looks
};

// Bytes a full session of ctx tokens takes beside the model's weights, and what the machine has.
struct SessionMemory {
  std::int64_t rows_bytes = 0;
  std::int64_t index_bytes = 0;
  std::int64_t workspace_bytes = 0;  // activations, scores, sampled queries; an estimate
  std::int64_t weights_bytes = 0;    // the file, and what is repacked of it
  std::int64_t available_bytes =
      0;  // MemAvailable of the system, or the control group's limit where smaller
  std::int64_t total() const { return rows_bytes + index_bytes + workspace_bytes + weights_bytes; }
};
SessionMemory EstimateMemory(const ModelInfo& model, const MethodSpec& method,
                             std::int64_t n_tokens, std::int32_t chunk);

// Called after every chunk of a prefill; return false to stop with Error(kCancelled).
using ProgressFn = std::function<bool(std::int64_t done, std::int64_t total)>;

struct SessionTimes {
  double prefill_s = 0;            // wall time in Prefill
  double prefill_attention_s = 0;  // of that, attention
  double index_s = 0;              // building the index
  double decode_s = 0;             // wall time in Decode
  // Of that, the method: scan, select and attend in all layers; not known of steps that attend on
  // the device, which count nothing here.
  double decode_attention_s = 0;
  std::int64_t prefill_tokens = 0;
  std::int64_t decode_tokens = 0;
  std::int64_t device_decode_tokens = 0;  // of those, attended on the device
};

class Session {
 public:
  // Throws Error(kUsage) for options out of range or statistics of another model, Error(kNoMemory)
  // saying how much a session needs and what there is, Error(kUnsupported) for a backend or device
  // that this build or machine does not have, with the reason.
  Session(std::shared_ptr<const Model> model, const SessionOptions& options);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  const Model& model() const;
  const SessionOptions& options() const;
  std::span<const Token> tokens() const;
  std::int64_t n_tokens() const;
  Method& method();
  const Backend& backend() const;
  const RowStore& rows() const;

  // Appends tokens with dense attention. Throws Error(kUsage) when they do not fit ctx_size (by how
  // much, and the remedy).
  void Prefill(std::span<const Token> tokens, const ProgressFn& progress = {});
  // Makes the method's index of all tokens so far; see Method::BuildIndex.
  void BuildIndex();
  // Appends one token, attending by the method.
  void Decode(Token token);
  // Where the last Decode attended: "device" or "cpu", and where that is not what the options ask
  // for, a colon and why, as in "cpu: the device has no scan of it". Empty before the first.
  const std::string& decode_attention() const;
  // Logits [n_vocab] after the last token. Requires a Prefill or Decode since the last Truncate.
  std::span<const float> logits() const;
  // Forgets tokens from n_tokens on.
  void Truncate(std::int64_t n_tokens);
  // Replaces the method; the new one indexes the rows that are there. Strong guarantee.
  void SetMethod(const std::string& spec);

  const SessionTimes& times() const;
  void ResetTimes();

 private:
  friend class StoredSession;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct GenerateOptions {
  std::int64_t max_tokens = 256;
  SamplingOptions sampling;
};

enum class StopReason { kEndOfText, kLength, kContext, kCancelled };

// Called with every token's whole UTF-8 characters as they come (text may be empty); return false
// to stop.
using TokenFn = std::function<bool(Token token, std::string_view text)>;

struct Generation {
  std::vector<Token> tokens;  // without the end-of-generation token
  std::string text;
  StopReason stop = StopReason::kLength;
};

// Decodes from the session's logits until the model ends, max_tokens, a full context or a false
// callback.
Generation Generate(Session& session, const GenerateOptions& options, const TokenFn& on_token = {});

}  // namespace fathom
