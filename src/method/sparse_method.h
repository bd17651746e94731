// SPDX-License-Identifier: MIT
// The protocol that all scanning methods share (design section 5), so that a method is only its
// scores: which tokens are candidates, what is always kept, when decode is dense, how winners are
// chosen and attended, what the residual adds, and how bytes are counted.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fathom/method.h"
#include "method/options.h"
#include "method/residual.h"
#include "method/step_source.h"

namespace fathom {

// Options every scanning method takes.
struct SparseConfig {
  std::int64_t k = 512;           // tokens attended per query head, sinks and window included
  std::int64_t min = 1024;        // shorter sessions decode densely
  std::int32_t dense_layers = 0;  // the first layers that decode densely
  ResidualRule residual = ResidualRule::kOff;
  float least_weight = 0;  // of AttendArgs; 0 reads all values
};
// residual: the default of a method whose scores estimate q.k, or null where the residual makes no
// sense, which then is not an option, nor are lazy values.
SparseConfig ReadSparseConfig(OptionReader& options, const char* residual = nullptr);

// Closed form of one KV head: its index, and the residual's mean values beside it; nothing while
// the session is too short to scan.
std::int64_t SparseIndexBytes(const SparseConfig& config, const HeadGeometry& geometry,
                              std::int64_t n_tokens, std::int64_t index_bytes);

// Dense attention over all rows of one layer; counts the rows.
void AttendDense(const MethodContext& context, std::int32_t layer, std::int64_t n_tokens,
                 const float* q, float* out, MethodCounters* counters);

// How the heads of a group choose. Per query head unless an author says otherwise.
enum class GroupRule {
  kPerHead,     // each head its own winners; the rows fetched are the union
  kSumScores,   // one set: the best sums of the heads' scores (SparQ)
  kMaxSoftmax,  // one set: the best of the heads' largest softmax (ShadowKV)
};

// What a method writes for one layer and query position. Scores are in units of q.k, before
// 1/sqrt(D).
struct LayerScores {
  float* scores = nullptr;  // [n_heads][stride]
  std::int64_t stride = 0;  // at least the tokens of the index
  // For the residual, zeros unless set: the true score is estimated as score + offset, with an
  // error of variance `noise`.
  float* offset = nullptr;  // [n_heads]
  float* noise = nullptr;   // [n_heads]
};

class SparseMethod : public Method, protected StepSource {
 public:
  SparseMethod(const MethodContext& context, SparseConfig config, std::string spec);

  std::string spec() const final { return spec_; }
  void Attend(std::int32_t layer, std::int64_t n_tokens, const float* q, float* out) final;
  void BuildIndex(std::int64_t n_tokens) final;
  void Truncate(std::int64_t n_tokens) final;
  bool Save(StateWriter* out) final;
  void Load(StateReader* in) final;
  std::int64_t MemoryBytes() const final;
  StepSource* step_source() final { return this; }
  AttendedTokens attended(std::int32_t kv_head) const final;
  std::span<const float> residual_factors() const final;

 protected:
  // Scores of tokens 0 .. n_index - 1 of the layer for all query heads; n_index is a whole number
  // of blocks. Scores of further indexed tokens may be written as well. Returns the read bits per
  // token, summed over the KV heads.
  virtual double ScoreLayer(std::int32_t layer, std::int64_t n_tokens, std::int64_t n_index,
                            const float* q, const LayerScores& out) = 0;

  // True where the backend ranks the method's index by itself (Backend::RankAttend): then
  // PrepareRank is called in place of ScoreLayer, and no scores are written. Not with a group rule
  // of its own.
  virtual bool ranks() const { return false; }
  // Sets segments and tables of every KV head, segment_blocks and mean_bits, and a planner that
  // fills the tables, and offsets and noise of `out`. ReadBits: when the planner has run, what
  // ScoreLayer returns.
  virtual void PrepareRank(std::int32_t /*layer*/, const float* /*q*/, const LayerScores& /*out*/,
                           RankArgs* /*args*/, std::span<RankHead> /*heads*/) {}
  virtual double ReadBits() const { return 0; }

  // The index, for methods that have one. ExtendIndex makes it where there is none.
  virtual void BuildAll(std::int64_t /*n_tokens*/) {}
  virtual void ExtendIndex(std::int32_t /*layer*/, std::int64_t /*n_tokens*/) {}
  virtual void TruncateIndex(std::int64_t /*n_tokens*/) {}
  virtual std::int64_t IndexMemory() const { return 0; }
  // As Method::Save and Load, of the index alone.
  virtual bool SaveIndex(StateWriter* /*out*/) { return false; }
  virtual void LoadIndex(StateReader* /*in*/) {}

  virtual GroupRule group_rule() const { return GroupRule::kPerHead; }
  // Tokens attended per query head beside k: a method gives those of its own choice the score
  // infinity (ShadowKV's outliers).
  virtual std::int64_t ExtraKept() const { return 0; }
  // After a sparse step, when attended() tells what was attended (H2O's eviction).
  virtual void Observe(std::int32_t /*layer*/, std::int64_t /*n_tokens*/, const float* /*q*/) {}
  // True where the residual is the author's reallocation: the factor is 1 and never fitted, and
  // sinks count in the mean value (SparQ).
  virtual bool fixed_residual() const { return false; }
  // lse: [n_heads] log of the sum of exp over what each head attended, exactly; the rest's mass is
  // measured by it. An author who takes the estimate for both overwrites it (SparQ).
  virtual void SelectedLse(std::int32_t /*layer*/, std::int64_t /*n_tokens*/, const float* /*q*/,
                           const LayerScores& /*scores*/, std::span<float> /*lse*/) {}

  // StepSource, for steps on a device (sparse_source.cc). A method whose index a device scans
  // overrides the first four.
  std::string Refusal() const override;
  PlaneHead plane_head(std::int32_t layer, std::int32_t kv_head) const override;
  double multiplier() const override { return 0; }
  std::uint64_t version() const override { return 0; }
  Rules rules() const final;
  bool Scans(std::int64_t n_tokens) const final;
  void CatchUp(std::int64_t n_tokens) final;
  const ValueMeans& values(std::int32_t layer, std::int32_t kv_head) const final;
  std::span<const float> factors() const final { return factor_; }
  void Count(const MethodCounters& step) final;

  // Whether the layer scans at this length.
  bool IsSparseAt(std::int32_t layer, std::int64_t n_tokens) const {
    return IsSparse(StepAt(layer, n_tokens));
  }
  const HeadGeometry& geometry() const { return context_.rows->geometry(); }
  std::int32_t n_layers() const { return context_.rows->n_layers(); }
  float scale() const;

  const MethodContext context_;
  const SparseConfig config_;

 private:
  struct Step {
    std::int32_t layer;
    std::int64_t n_tokens;  // visible
    std::int64_t n_index;   // of those, in finished blocks
    std::int64_t last;      // candidates end here
    std::int64_t keep;      // winners per query head
  };
  Step StepAt(std::int32_t layer, std::int64_t n_tokens) const;
  bool IsSparse(const Step& step) const;
  double AttendStep(const Step& step, const float* q, std::span<const float> factor, float* out);
  double SelectStep(const Step& step, const float* q);
  void Share(const Step& step);
  void Select(const Step& step);
  double RankAttend(const Step& step, const float* q, std::span<const float> factor, float* out);
  std::span<const RestHead> RestHeads(const Step& step, std::span<const float> factor);
  void ReserveLists(const Step& step, std::size_t group);
  std::span<AttendHead> AttendHeads(const Step& step, const float* q, float* out);
  LayerScores ScoreBuffers();
  void MeasureRest(const Step& step, const float* q);
  void MassOfScores(const Step& step, const float* q);
  void WeighRest(const Step& step, std::size_t n_blocks);
  void FitResidual(std::int32_t layer, std::int64_t n_tokens);
  bool FitFactors(std::int32_t layer, std::int64_t n_tokens, std::span<float> factor);
  void SampleResidual(const Step& step, const float* q,
                      std::vector<std::vector<ResidualSample>>* samples);

  ValueMeans& Values(std::int32_t layer, std::int32_t kv_head) {
    return values_[static_cast<std::size_t>(layer * geometry().n_kv_heads + kv_head)];
  }
  std::int64_t SkippedValues() const { return fixed_residual() ? 0 : kSinks; }

  const std::string spec_;
  std::int64_t max_tokens_ = 0;  // most tokens an index can hold now
  // Residual: factors [n_layers][n_heads], which layers have been fitted. Mean values for it and
  // for lazy values: [n_layers][n_kv_heads].
  std::vector<float> factor_;
  std::vector<char> fitted_;
  std::int64_t fitted_tokens_ = 0;
  std::vector<ValueMeans> values_;
  // Scratch, grown with the session and kept: nothing is allocated in a warm step.
  std::vector<float> scores_;           // [n_heads][stride]
  std::vector<float> shared_;           // [n_kv_heads][stride]
  std::vector<float> offset_, noise_;   // [n_heads]
  std::vector<std::int32_t> winners_;   // [n_heads][keep]
  std::vector<std::int32_t> tokens_;    // [n_kv_heads][capacity]
  std::vector<std::uint16_t> mask_;     // [n_kv_heads][capacity]
  std::vector<std::int64_t> attended_;  // [n_kv_heads]; -1 after a dense step
  std::size_t capacity_ = 0;
  std::vector<float> left_;               // [n_heads][left_stride_] rest of Backend::RankAttend
  std::int64_t left_stride_ = 0;          // blocks
  std::vector<float> cut_;                // [n_heads]
  std::vector<float> lse_;                // [n_heads]
  std::vector<float> shift_;              // [n_heads]
  std::vector<float> mass_;               // [n_heads][n_index / 64]
  std::vector<float> rest_;               // [n_heads][D]
  std::vector<float> rest_mass_;          // [n_heads]
  std::vector<float> least_mass_;         // [n_heads] of a block whose mean is read
  std::vector<std::int64_t> n_values_;    // [n_kv_heads] rows of which the value was read
  std::vector<std::int64_t> means_read_;  // [n_kv_heads] block means of values
};

}  // namespace fathom
