// SPDX-License-Identifier: MIT
// fathom: every query decides how many bit planes of each key channel to read.
//
// Our own read (design 3.1): block means, residual planes with frozen steps, least-squares
// decoders, plan by measured distortion. preset=paper is the published one (design section 3): fp16
// block scales and reverse water-filling.
#include <memory>
#include <utility>

#include "backend/scan_table.h"
#include "base/parallel.h"
#include "fathom/error.h"
#include "fathom/plan.h"
#include "method/layer_index.h"
#include "method/sparse_method.h"

namespace fathom {
namespace {

struct Config {
  SparseConfig sparse;
  bool paper = false;
  double bits = 28;    // read bits per token, our read
  double budget = 48;  // code bits per token, published read
  std::string basis;   // raw, klt, or auto (published read)
  std::int32_t mean_bits = 4;
};

constexpr double kMaxBits =
    kMaxHeadDim * (kPlanes + 8.0 / kBlockTokens);  // everything, at the largest head

Config ReadConfig(OptionReader& options) {
  Config config;
  config.paper = options.Choice("preset", "own", {"own", "paper"}) == "paper";
  if (config.paper) {
    config.budget = options.Real("budget", config.budget, 1, kMaxHeadDim * kPlanes);
    config.basis = options.Choice("basis", "auto", {"auto", "raw", "klt"});
  } else {
    config.bits = options.Real("bits", config.bits, 1, kMaxBits);
    config.mean_bits = options.Choice("meanbits", "4", {"4", "8"}) == "8" ? 8 : 4;
    config.basis = options.Choice("basis", "raw", {"raw", "klt"});
  }
  const std::string_view other = config.paper ? "bits" : "budget";
  if (options.Has(other)) {
    throw Error(ErrorCode::kUsage, config.paper
                                       ? "fathom: bits is an option of our own read; with "
                                         "preset=paper give budget (code bits per token)"
                                       : "fathom: budget is an option of the published read; add "
                                         "preset=paper, or give bits (read bits per token)");
  }
  config.sparse = ReadSparseConfig(options);
  options.Finish();
  return config;
}

IndexShape ShapeOf(const Config& config, std::int32_t head_dim) {
  IndexShape shape;
  shape.codec = config.paper ? Codec::kPaper : Codec::kMean;
  shape.head_dim = head_dim;
  shape.mean_bits = config.mean_bits;
  return shape;
}

// The published rule: raw planes for models with QK-norm, rotated ones otherwise. Raw published
// planes are not centred.
LayerIndex::BasisRule BasisOf(const Config& config, bool has_qk_norm) {
  if (config.basis == "klt" || (config.basis == "auto" && !has_qk_norm))
    return LayerIndex::BasisRule::kKlt;
  return config.paper ? LayerIndex::BasisRule::kRaw : LayerIndex::BasisRule::kCentred;
}

class FathomMethod final : public SparseMethod {
 public:
  FathomMethod(const MethodContext& context, const Config& config, std::string spec)
      : SparseMethod(context, config.sparse, std::move(spec)),
        config_own_(config),
        index_(context, ShapeOf(config, geometry().head_dim), BasisOf(config, context.has_qk_norm)),
        plans_(static_cast<std::size_t>(n_layers()) *
               static_cast<std::size_t>(geometry().n_kv_heads)),
        heads_(static_cast<std::size_t>(geometry().n_kv_heads)) {
    if (!config.paper) {
      index_.set_on_changed([this](std::int32_t layer, std::int32_t h) {
        plans_[static_cast<std::size_t>(layer * geometry().n_kv_heads + h)] =
            std::make_unique<DistortionHull>(index_.head(layer, h).index.Distortions(),
                                             config_own_.mean_bits);
      });
    }
  }

  void BuildIndex(std::int64_t n_tokens) override {
    if (n_tokens >= config_.min && n_tokens >= kBlockTokens) index_.BuildAll(n_tokens);
  }
  void Truncate(std::int64_t n_tokens) override { index_.Truncate(n_tokens); }
  std::int64_t MemoryBytes() const override { return index_.MemoryBytes(); }

 protected:
  double ScoreLayer(std::int32_t layer, std::int64_t n_tokens, std::int64_t /*n_index*/,
                    const float* q, float* scores, std::int64_t stride) override {
    index_.Extend(layer, n_tokens);
    const HeadGeometry& shape = geometry();
    const std::int32_t group = shape.group();
    ParallelFor(shape.n_kv_heads, context_.backend->n_threads(), [&](std::int64_t h) {
      const auto kv_head = static_cast<std::int32_t>(h);
      ScanHead& scan = scan_[static_cast<std::size_t>(h)];
      scan.scores = scores + h * group * stride;
      scan.stride = stride;
      PlanHead(layer, kv_head, q + h * group * shape.head_dim, &heads_[static_cast<std::size_t>(h)],
               &scan);
    });
    double bits = 0;
    for (const HeadPlan& head : heads_) bits += head.read_bits;
    const IndexShape& index_shape = index_.head(layer, 0).index.shape();
    context_.backend->Scan({index_shape.codec, shape.head_dim, group, index_shape.segment_blocks,
                            index_shape.mean_bits, scan_});
    return bits;
  }

 private:
  // What one KV head reads in the current step; kept between steps for its memory.
  struct HeadPlan {
    std::vector<float> q;             // [group][D] in the index's basis
    std::vector<ScanTable> tables;    // one per codec of the index
    std::vector<std::uint8_t> depth;  // [D] published read
    double read_bits = 0;
  };

  void PlanHead(std::int32_t layer, std::int32_t kv_head, const float* q, HeadPlan* plan,
                ScanHead* scan) {
    const IndexedHead& head = index_.head(layer, kv_head);
    const std::int32_t group = geometry().group();
    const std::int32_t dim = geometry().head_dim;
    if (!head.index.basis().is_identity()) {
      plan->q.resize(static_cast<std::size_t>(group * dim));
      head.index.basis().MapQueries(q, group, plan->q.data());
      q = plan->q.data();
    }
    scan->segments = head.index.segments();
    if (config_own_.paper) {
      plan->depth = PlanPaper(q, group, head.variance, config_own_.budget).depth;
      plan->read_bits = PaperReadBits(plan->depth);
      scan->q = q;
      scan->depth = plan->depth.data();
      return;
    }
    const DistortionHull& hull =
        *plans_[static_cast<std::size_t>(layer * geometry().n_kv_heads + kv_head)];
    const MeasuredPlan levels = PlanMeasured(q, group, hull, config_own_.bits);
    plan->read_bits = levels.read_bits;
    const auto codecs = head.index.codecs();
    plan->tables.resize(codecs.size());
    for (std::size_t c = 0; c < codecs.size(); ++c) {
      BuildScanTable({dim, group, config_own_.mean_bits, q, levels.level.data(),
                      codecs[c].mean_step.data(), codecs[c].weight.data()},
                     &plan->tables[c]);
    }
    scan->tables = plan->tables;
  }

  const Config config_own_;
  LayerIndex index_;
  std::vector<std::unique_ptr<DistortionHull>> plans_;  // [n_layers][n_kv_heads], our read
  std::vector<HeadPlan> heads_;                         // [n_kv_heads]
  std::vector<ScanHead> scan_ = std::vector<ScanHead>(heads_.size());
};

void Check(OptionReader& options) { ReadConfig(options); }

std::unique_ptr<Method> Make(OptionReader& options, const MethodContext& context) {
  const Config config = ReadConfig(options);
  return std::make_unique<FathomMethod>(context, config, options.Canonical());
}

std::int64_t IndexBytesOf(OptionReader& options, HeadGeometry geometry, std::int64_t n_tokens) {
  const Config config = ReadConfig(options);
  return n_tokens < config.sparse.min
             ? 0
             : ShapeOf(config, geometry.head_dim).IndexBytes(n_tokens / kBlockTokens);
}

}  // namespace

const MethodEntry kFathomEntry = {
    "fathom", "bit-plane scan: each query decides how many bits of each channel to read", Check,
    Make, IndexBytesOf};

}  // namespace fathom
