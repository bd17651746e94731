// SPDX-License-Identifier: MIT
// The protocol that all scanning methods share (design section 5), so that a method is only its
// scores: which tokens are candidates, what is always kept, when decode is dense, how winners are
// chosen and attended, and how bytes are counted.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fathom/method.h"
#include "method/options.h"

namespace fathom {

// Options every scanning method takes.
struct SparseConfig {
  std::int64_t k = 512;     // tokens attended per query head, sinks and window included
  std::int64_t min = 1024;  // shorter sessions decode densely
};
SparseConfig ReadSparseConfig(OptionReader& options);

// Dense attention over all rows of one layer; counts the rows.
void AttendDense(const MethodContext& context, std::int32_t layer, std::int64_t n_tokens,
                 const float* q, float* out, MethodCounters* counters);

class SparseMethod : public Method {
 public:
  SparseMethod(const MethodContext& context, SparseConfig config, std::string spec);

  std::string spec() const final { return spec_; }
  void Attend(std::int32_t layer, std::int64_t n_tokens, const float* q, float* out) final;
  // For methods without an index of their own; the others override all three.
  void BuildIndex(std::int64_t /*n_tokens*/) override {}
  void Truncate(std::int64_t /*n_tokens*/) override {}
  std::int64_t MemoryBytes() const override { return 0; }

 protected:
  // Scores of tokens 0 .. n_index - 1 of the layer for all query heads, written to scores
  // [n_heads][stride]; n_index is a whole number of blocks. Returns the read bits per token, summed
  // over the KV heads.
  virtual double ScoreLayer(std::int32_t layer, std::int64_t n_tokens, std::int64_t n_index,
                            const float* q, float* scores, std::int64_t stride) = 0;

  const HeadGeometry& geometry() const { return context_.rows->geometry(); }
  std::int32_t n_layers() const { return context_.rows->n_layers(); }

  const MethodContext context_;
  const SparseConfig config_;

 private:
  void AttendWinners(std::int32_t layer, std::int64_t n_tokens, std::int64_t last, const float* q,
                     float* out);

  const std::string spec_;
  // Scratch, grown with the session and kept: nothing is allocated in a warm step.
  std::vector<float> scores_;           // [n_heads][stride]
  std::vector<std::int32_t> winners_;   // [n_heads][keep]
  std::vector<std::int32_t> tokens_;    // [n_kv_heads][capacity]
  std::vector<std::uint16_t> mask_;     // [n_kv_heads][capacity]
  std::vector<std::int64_t> attended_;  // [n_kv_heads]
  std::vector<float> lse_;              // [n_heads]
};

}  // namespace fathom
