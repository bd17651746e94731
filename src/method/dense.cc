// SPDX-License-Identifier: MIT
// dense: attends every row. The upper bracket of accuracy and the baseline of speed.
#include "method/sparse_method.h"

namespace fathom {
namespace {

class DenseMethod final : public Method, private StepSource {
 public:
  DenseMethod(const MethodContext& context, std::string spec)
      : context_(context), spec_(std::move(spec)) {}

  std::string spec() const override { return spec_; }

  void Attend(std::int32_t layer, std::int64_t n_tokens, const float* q, float* out) override {
    const HeadGeometry& heads = context_.rows->geometry();
    if (layer == 0) ++counters_.steps;
    counters_.calls += heads.n_kv_heads;
    AttendDense(context_, layer, n_tokens, q, out, &counters_);
  }

  void BuildIndex(std::int64_t /*n_tokens*/) override {}
  void Truncate(std::int64_t /*n_tokens*/) override {}
  std::int64_t MemoryBytes() const override { return 0; }
  StepSource* step_source() override { return this; }

 private:
  // A step on a device, which never scans.
  Rules rules() const override { return {}; }
  bool Scans(std::int64_t /*n_tokens*/) const override { return false; }
  std::string Refusal() const override { return {}; }
  void CatchUp(std::int64_t /*n_tokens*/) override {}
  PlaneHead plane_head(std::int32_t /*layer*/, std::int32_t /*kv_head*/) const override {
    return {};
  }
  double multiplier() const override { return 0; }
  std::uint64_t version() const override { return 0; }
  const ValueMeans& values(std::int32_t /*layer*/, std::int32_t /*kv_head*/) const override {
    return none_;
  }
  std::span<const float> factors() const override { return {}; }
  void Count(const MethodCounters& step) override { counters_ += step; }

  const MethodContext context_;
  const std::string spec_;
  const ValueMeans none_{0, ResidualRule::kOff};
};

void Check(OptionReader& options) { options.Finish(); }

std::unique_ptr<Method> Make(OptionReader& options, const MethodContext& context) {
  Check(options);
  return std::make_unique<DenseMethod>(context, options.Canonical());
}

std::int64_t IndexBytesOf(OptionReader& options, HeadGeometry /*geometry*/,
                          std::int64_t /*n_tokens*/) {
  Check(options);
  return 0;
}

}  // namespace

const MethodEntry kDenseEntry = {"dense", "attend every token", Check, Make, IndexBytesOf};

}  // namespace fathom
