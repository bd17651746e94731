// SPDX-License-Identifier: MIT
// fathom: every query decides how many bit planes of each key channel to read.
//
// Our own read (design 3.1): block means, residual planes with frozen steps, least-squares
// decoders, plan by measured distortion, residual mass. preset=paper is the published one (design
// section 3): fp16 block scales and reverse water-filling. Each part is an option, so that it can
// be switched off and measured alone.
#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <utility>

#include "fathom/calibration.h"
#include "fathom/error.h"
#include "fathom/plan.h"
#include "fathom/scan_table.h"
#include "memory/state_stream.h"
#include "method/plane_method.h"

namespace fathom {
namespace {

enum class PlanRule { kMeasured, kPublished, kCommon };

struct Config {
  SparseConfig sparse;
  bool paper = false;  // the published plan, in code bits
  double bits = 28;    // read bits per token, our read
  double budget = 48;  // code bits per token, published read
  bool auto_basis = false;
  BasisRule basis = BasisRule::kCentred;
  IndexShape shape;
  IndexRules rules;
  PlanRule plan = PlanRule::kMeasured;
  bool budgets_from_file = false;
};

constexpr double kMaxBits =
    kMaxHeadDim * (kPlanes + 8.0 / kBlockTokens);  // everything, at the largest head

bool BudgetsFromFile(OptionReader& options) {
  return options.Choice("budgets", "flat", {"flat", "file"}) == "file";
}

void ReadPaper(OptionReader& options, Config* config) {
  config->shape.codec = Codec::kPaper;
  config->budget = options.Real("budget", config->budget, 1, kMaxHeadDim * kPlanes);
  config->budgets_from_file = BudgetsFromFile(options);
  const std::string basis = options.Choice("basis", "auto", {"auto", "raw", "klt", "balanced"});
  config->auto_basis = basis == "auto";
  config->basis = basis == "klt"        ? BasisRule::kKlt
                  : basis == "balanced" ? BasisRule::kBalanced
                                        : BasisRule::kRaw;  // published raw planes: not centred
}

void ReadOwn(OptionReader& options, Config* config) {
  config->bits = options.Real("bits", config->bits, 1, kMaxBits);
  config->budgets_from_file = BudgetsFromFile(options);
  const bool mean = options.Choice("store", "mean", {"mean", "paper"}) == "mean";
  config->shape.codec = mean ? Codec::kMean : Codec::kPaper;
  if (mean) {
    config->shape.mean_bits = options.Choice("meanbits", "4", {"4", "8"}) == "8" ? 8 : 4;
    config->rules.decoders = options.Choice("weights", "lsq", {"lsq", "center"}) == "lsq"
                                 ? Decoders::kLeastSquares
                                 : Decoders::kCentre;
    config->rules.ranges = options.Choice("range", "measured", {"measured", "rms"}) == "measured"
                               ? Ranges::kMeasured
                               : Ranges::kRms;
  } else if (options.Has("meanbits") || options.Has("weights") || options.Has("range")) {
    throw Error(ErrorCode::kUsage,
                "fathom: meanbits, weights and range belong to store=mean; store=paper has neither "
                "block means nor fitted decoders and ranges");
  }
  config->rules.distortions = true;
  const std::string plan = options.Choice("plan", config->budgets_from_file ? "measured" : "common",
                                          {"common", "measured", "published"});
  config->plan = plan == "measured"    ? PlanRule::kMeasured
                 : plan == "published" ? PlanRule::kPublished
                                       : PlanRule::kCommon;
  config->basis = ReadBasis(options, "raw", /*centre_raw=*/true);
}

Config ReadConfig(OptionReader& options) {
  Config config;
  config.paper = options.Choice("preset", "own", {"own", "paper"}) == "paper";
  config.paper ? ReadPaper(options, &config) : ReadOwn(options, &config);
  const std::string_view other = config.paper ? "bits" : "budget";
  if (options.Has(other)) {
    throw Error(ErrorCode::kUsage, config.paper
                                       ? "fathom: bits is an option of our own read; with "
                                         "preset=paper give budget (code bits per token)"
                                       : "fathom: budget is an option of the published read; add "
                                         "preset=paper, or give bits (read bits per token)");
  }
  if (config.budgets_from_file && config.plan == PlanRule::kCommon) {
    throw Error(ErrorCode::kUsage,
                "fathom: budgets=file and plan=common both share bits among layers; give one");
  }
  config.sparse = ReadSparseConfig(options, config.paper ? "off" : "block");
  options.Finish();
  return config;
}

LayerIndexOptions IndexOptions(const Config& config, const MethodContext& context) {
  LayerIndexOptions options;
  options.shape = config.shape;
  options.shape.head_dim = context.rows->geometry().head_dim;
  options.rules = config.rules;
  // The published rule: raw planes for models with QK-norm, rotated ones otherwise.
  options.basis = config.auto_basis && !context.has_qk_norm ? BasisRule::kKlt : config.basis;
  return options;
}

// Bits or budget of every layer.
std::vector<double> LayerBits(const Config& config, const MethodContext& context,
                              const std::string& spec) {
  const auto n_layers = static_cast<std::size_t>(context.rows->n_layers());
  std::vector<double> bits(n_layers, config.paper ? config.budget : config.bits);
  if (!config.budgets_from_file) return bits;
  std::string known = "no statistics file was given (--stats-file)";
  if (context.calibration != nullptr) {
    if (const auto* found = context.calibration->FindBudgets(spec)) return *found;
    known = "the statistics have budgets of:";
    for (const auto& [name, unused] : context.calibration->budgets) known += " " + name;
    if (context.calibration->budgets.empty()) known = "the statistics have no budgets";
  }
  throw Error(ErrorCode::kUsage,
              spec + " needs a budget per layer, and " + known +
                  "; make them with fathom calibrate --budgets, or use budgets=flat");
}

class FathomMethod final : public PlaneMethod {
 public:
  FathomMethod(const MethodContext& context, const Config& config, const std::string& spec)
      : PlaneMethod(context, config.sparse, IndexOptions(config, context), spec),
        config_own_(config),
        bits_(LayerBits(config, context, spec)),
        plans_(static_cast<std::size_t>(n_layers()) *
               static_cast<std::size_t>(geometry().n_kv_heads)) {
    if (!config.paper) {
      index().set_on_changed([this](std::int32_t layer, std::int32_t h) { UpdatePlan(layer, h); });
    }
  }

 protected:
  void PlanRead(std::int32_t layer, std::int32_t kv_head, HeadRead* read) override {
    const std::int32_t group = geometry().group();
    const double bits = bits_[static_cast<std::size_t>(layer)];
    if (config_own_.paper) {
      const HeadStats& stats = index().head(layer, kv_head).stats;
      read->depth = PlanPaper(read->q.data(), group, stats.variance, bits).depth;
      read->read_bits = PaperReadBits(read->depth);
      return;
    }
    const HeadPlan& plan = Plan(layer, kv_head);
    const MeasuredPlan levels =
        common() ? PlanAtMultiplier(read->q.data(), group, *plan.hull, multiplier_)
                 : PlanMeasured(read->q.data(), group, *plan.hull, bits, weights());
    read->read_bits = levels.read_bits;
    AddNoise(plan, levels, read);
    config_own_.shape.codec == Codec::kMean ? FillTables(layer, kv_head, levels, read)
                                            : FillDepths(levels, read);
  }

  void BuildAll(std::int64_t n_tokens) override {
    PlaneMethod::BuildAll(n_tokens);
    if (CanFitCommon() && (!common() || Outgrown(fit_tokens_, n_tokens))) {
      FitCommon(n_tokens);
      fit_tokens_ = n_tokens;
    }
  }

  void ExtendIndex(std::int32_t layer, std::int64_t n_tokens) override {
    // One multiplier for all layers needs all their indexes; the current token may not be written
    // in layers that come later.
    if (!common() && CanFitCommon() && n_tokens > kBlockTokens) BuildAll(n_tokens - 1);
    PlaneMethod::ExtendIndex(layer, n_tokens);
  }

  void TruncateIndex(std::int64_t n_tokens) override {
    PlaneMethod::TruncateIndex(n_tokens);
    if (!index().built(0)) multiplier_ = kNotFitted;
  }

  bool SaveIndex(StateWriter* out) override {
    out->Put(multiplier_);
    out->Put(fit_tokens_);
    return PlaneMethod::SaveIndex(out);
  }

  // A device makes the plan of one multiplier, out of distortions, for codes of keys as they are.
  std::string Refusal() const override {
    if (config_own_.paper) return "preset=paper is scanned by the CPU";
    if (config_own_.shape.codec != Codec::kMean) return "store=paper is scanned by the CPU";
    if (config_own_.plan != PlanRule::kCommon) return "only plan=common is made by the device";
    if (config_own_.basis != BasisRule::kCentred) return "the device maps no queries (basis)";
    if (config_.least_weight > 0) return "the device reads all values (values=lazy)";
    const bool built = index().built(n_layers() - 1);
    if (!common() && (built || !CanFitCommon())) return "there is no prefill to fit plan=common on";
    return {};
  }

  PlaneHead plane_head(std::int32_t layer, std::int32_t kv_head) const override {
    const HeadPlan& plan = Plan(layer, kv_head);
    return {&index().head(layer, kv_head).index, plan.distortion, plan.hull.get()};
  }
  double multiplier() const override { return multiplier_; }
  std::uint64_t version() const override { return index().version(); }

  void LoadIndex(StateReader* in) override {
    multiplier_ = in->Get<double>();
    fit_tokens_ = in->GetIn<std::int64_t>(0, std::int64_t{1} << 40);
    PlaneMethod::LoadIndex(in);
  }

 private:
  static constexpr double kNotFitted = -1;

  // What plans of one KV head need, current with its index.
  struct HeadPlan {
    std::vector<double> distortion;  // [kLevels][D]
    std::unique_ptr<DistortionHull> hull;
  };

  HeadPlan& Plan(std::int32_t layer, std::int32_t kv_head) {
    return plans_[static_cast<std::size_t>(layer * geometry().n_kv_heads + kv_head)];
  }
  const HeadPlan& Plan(std::int32_t layer, std::int32_t kv_head) const {
    return plans_[static_cast<std::size_t>(layer * geometry().n_kv_heads + kv_head)];
  }
  // False while there is no multiplier: a session without queries plans every head by itself.
  bool common() const { return multiplier_ != kNotFitted; }
  bool CanFitCommon() const {
    return config_own_.plan == PlanRule::kCommon && context_.queries != nullptr &&
           config_.dense_layers < n_layers() && context_.queries->back().recent.size() > 0;
  }
  PlanWeights weights() const {
    return config_own_.plan == PlanRule::kPublished ? PlanWeights::kSum : PlanWeights::kPerHead;
  }

  void UpdatePlan(std::int32_t layer, std::int32_t kv_head) {
    const IndexedHead& head = index().head(layer, kv_head);
    HeadPlan& plan = Plan(layer, kv_head);
    plan.distortion = head.index.Distortions();
    const auto cost = config_own_.shape.codec == Codec::kMean
                          ? MeanLevelCosts(config_own_.shape.mean_bits)
                          : PaperLevelCosts();
    const auto& planned = config_own_.plan == PlanRule::kPublished
                              ? PublishedDistortions(head.stats.variance)
                              : plan.distortion;
    plan.hull = std::make_unique<DistortionHull>(planned, cost);
  }

  void AddNoise(const HeadPlan& plan, const MeasuredPlan& levels, HeadRead* read) const {
    const auto dim = static_cast<std::size_t>(geometry().head_dim);
    // All heads at once: a sum waits for every addition.
    std::array<double, kMaxGroup> noise{};
    for (std::size_t j = 0; j < dim; ++j) {
      const double distortion = plan.distortion[levels.level[j] * dim + j];
      for (std::size_t g = 0; g < read->noise.size(); ++g) {
        const double q = read->q[g * dim + j];
        noise[g] += q * q * distortion;
      }
    }
    std::transform(noise.begin(), noise.begin() + static_cast<std::ptrdiff_t>(read->noise.size()),
                   read->noise.begin(), [](double x) { return static_cast<float>(x); });
  }

  void FillTables(std::int32_t layer, std::int32_t kv_head, const MeasuredPlan& levels,
                  HeadRead* read) {
    const auto codecs = index().head(layer, kv_head).index.codecs();
    read->tables.resize(codecs.size());
    for (std::size_t c = 0; c < codecs.size(); ++c) {
      BuildScanTable(
          {geometry().head_dim, geometry().group(), config_own_.shape.mean_bits, read->q.data(),
           levels.level.data(), codecs[c].mean_step.data(), codecs[c].weight.data()},
          &read->tables[c]);
    }
  }

  static void FillDepths(const MeasuredPlan& levels, HeadRead* read) {
    read->depth.resize(levels.level.size());
    std::ranges::transform(levels.level, read->depth.begin(), [](std::uint8_t level) {
      return static_cast<std::uint8_t>(level > 1 ? level - 1 : 0);
    });
  }

  // The multiplier at which the last queries of the prefill read `bits` on average over all layers
  // and KV heads.
  void FitCommon(std::int64_t n_tokens) {
    const std::int32_t group = geometry().group();
    const std::int32_t dim = geometry().head_dim;
    MultiplierFit fit;
    std::vector<float> mapped(static_cast<std::size_t>(group * dim));
    for (std::int32_t layer = config_.dense_layers; layer < n_layers(); ++layer) {
      const QuerySamples& recent = (*context_.queries)[static_cast<std::size_t>(layer)].recent;
      for (std::int64_t i = 0; i < recent.size(); ++i) {
        const std::int64_t position = recent.positions()[static_cast<std::size_t>(i)];
        if (position >= n_tokens || !IsSparseAt(layer, position + 1)) continue;
        for (std::int32_t h = 0; h < geometry().n_kv_heads; ++h) {
          index().head(layer, h).index.basis().MapQueries(recent.query(i) + h * group * dim, group,
                                                          mapped.data());
          fit.Add(mapped.data(), group, *Plan(layer, h).hull);
        }
      }
    }
    if (fit.count() > 0) multiplier_ = fit.Fit(config_own_.bits);
  }

  const Config config_own_;
  const std::vector<double> bits_;  // [n_layers] read bits, or code bits of the published read
  std::vector<HeadPlan> plans_;     // [n_layers][n_kv_heads], our read
  double multiplier_ = kNotFitted;  // plan=common
  std::int64_t fit_tokens_ = 0;     // tokens of the session then
};

void Check(OptionReader& options) { ReadConfig(options); }

std::unique_ptr<Method> Make(OptionReader& options, const MethodContext& context) {
  const Config config = ReadConfig(options);
  return std::make_unique<FathomMethod>(context, config, options.Canonical());
}

std::int64_t IndexBytesOf(OptionReader& options, HeadGeometry geometry, std::int64_t n_tokens) {
  const Config config = ReadConfig(options);
  IndexShape shape = config.shape;
  shape.head_dim = geometry.head_dim;
  return SparseIndexBytes(config.sparse, geometry, n_tokens,
                          shape.IndexBytes(n_tokens / kBlockTokens));
}

}  // namespace

const MethodEntry kFathomEntry = {
    "fathom", "bit-plane scan: each query decides how many bits of each channel to read", Check,
    Make, IndexBytesOf};

}  // namespace fathom
