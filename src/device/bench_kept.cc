// SPDX-License-Identifier: MIT
#include "device/bench_kept.h"

namespace fathom::cuda {
namespace {

DenseShape DenseShapeOf(const StepShape& s) {
  DenseShape shape = Qwen3_8B();  // rope and eps of it
  shape.n_layers = s.n_layers;
  shape.n_embd = s.n_embd;
  shape.n_ff = s.n_ff;
  shape.n_vocab = s.n_vocab;
  shape.heads = s.heads;
  shape.has_qk_norm = s.has_qk_norm;
  shape.rope.n_dims = s.heads.head_dim;
  return shape;
}

bool SameShape(const StepShape& a, const StepShape& b) {
  return a.n_layers == b.n_layers && a.n_embd == b.n_embd && a.n_ff == b.n_ff &&
         a.n_vocab == b.n_vocab && a.heads == b.heads && a.has_qk_norm == b.has_qk_norm;
}

}  // namespace

BenchKept& TheBenchKept() {
  static BenchKept kept;
  return kept;
}

HostArena* BenchKept::Arena(std::int64_t bytes) {
  // One that the system refused may be let in now that less is asked for.
  const bool refused = arena_ != nullptr && arena_->done() && !arena_->pinned();
  if (arena_ == nullptr || refused || arena_->size() < bytes) {
    arena_.reset();
    arena_ = std::make_unique<HostArena>(bytes);
  }
  arena_->FreeAll();
  return arena_.get();
}

std::shared_ptr<const DeviceWeights> BenchKept::Weights(const StepShape& shape,
                                                        std::uint64_t seed) {
  if (weights_ == nullptr || !SameShape(shape_, shape) || seed_ != seed) {
    weights_.reset();
    weights_ = DeviceWeights::Random(DenseShapeOf(shape), seed);
    shape_ = shape;
    seed_ = seed;
  }
  return weights_;
}

std::shared_ptr<const CaptureData> BenchKept::Capture(const std::string& path,
                                                      const StepShape& shape,
                                                      const CaptureData::ProgressFn& progress) {
  const bool same = capture_ != nullptr && capture_->path() == path &&
                    capture_layers_ == shape.n_layers &&
                    capture_->rows().geometry().head_dim == shape.heads.head_dim;
  if (same) return capture_;
  capture_.reset();
  if (path.empty()) return nullptr;
  capture_ = std::make_shared<const CaptureData>(path, shape, progress);
  capture_layers_ = shape.n_layers;
  return capture_;
}

}  // namespace fathom::cuda
