// SPDX-License-Identifier: MIT
#include "fathom/step_bench.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "backend/cuda/append_rows.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/cuda_devices.h"
#include "backend/cuda/host_copy.h"
#include "base/timer.h"
#include "device/bench_index.h"
#include "device/bench_kept.h"
#include "device/bench_rows.h"
#include "fathom/error.h"
#include "memory/system_memory.h"
#include "model/cuda/dense.h"

namespace fathom {
namespace {

using cuda::AttentionStep;
using cuda::Check;
using cuda::DeviceBuffer;
using cuda::kRing;

constexpr int kWarmSteps = 3;
constexpr int kFitSteps = 2;  // whose queries the multiplier is fitted on
constexpr std::int64_t kCopyBytes = std::int64_t{512} << 20;
constexpr double kRowsShare = 0.5;  // of the memory that the index leaves, for rows
constexpr std::int64_t kMostRowBytes = std::int64_t{16} << 30;

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

double Median(std::vector<double> v) {
  if (v.empty()) return 0;
  const auto middle = v.begin() + static_cast<std::ptrdiff_t>(v.size() / 2);
  std::nth_element(v.begin(), middle, v.end());
  return *middle;
}

void CheckOptions(const StepBenchOptions& o) {
  const auto fail = [](const std::string& text) { throw Error(ErrorCode::kUsage, text); };
  if (o.placement != "host" && o.placement != "hbm") {
    fail("placement '" + o.placement + "'; valid: host, hbm");
  }
  if (o.n_tokens < 4 * kRing) {
    fail("context of " + std::to_string(o.n_tokens) + " tokens; it must be at least " +
         std::to_string(4 * kRing));
  }
  if (o.batch < 1 || o.batch > 64) fail("batch of " + std::to_string(o.batch) + "; 1..64");
  if (o.k <= kAlwaysKept || o.k > o.n_tokens / 2) {
    fail("k=" + std::to_string(o.k) + "; 37 to half of the context, " +
         std::to_string(o.n_tokens / 2));
  }
  if (o.steps < 1) fail(std::to_string(o.steps) + " steps; at least 1");
  if (o.fold_tokens < 0 || (o.fold_tokens > 0 && o.fold_tokens < kRing)) {
    fail("rows folded at " + std::to_string(o.fold_tokens) + "; 0 or at least " +
         std::to_string(kRing));
  }
}

class Bench {
 public:
  Bench(const StepBenchOptions& options, const StepBenchProgress& progress)
      : options_(options),
        progress_(progress),
        method_(cuda::ParseBenchMethod(options.method, options.shape.heads.head_dim)),
        sizes_{options.shape.heads, options.shape.n_layers, options.batch, options.n_tokens,
               options.k,           method_.residual} {
    result_.method = method_.spec;
    result_.placement = options.placement;
    result_.n_tokens = options.n_tokens;
    result_.batch = options.batch;
    result_.device = DescribeCudaDevices();
  }

  StepBenchResult Run() {
    capture_ = cuda::TheBenchKept().Capture(options_.keys, options_.shape,
                                            Progress("reading the capture"));
    if (capture_ != nullptr) result_.keys = capture_->keys();
    ReserveHost();
    Say("making weights", "", 0, 1);
    weights_ = cuda::TheBenchKept().Weights(options_.shape, options_.seed);
    dense_ = std::make_unique<cuda::DenseOps>(weights_, options_.batch);
    attention_ = std::make_unique<AttentionStep>(sizes_, method_.chunk);
    keys_ = capture_ != nullptr ? cuda::MakeCapturedKeys(sizes_, capture_, Stream())
                                : cuda::MakeSyntheticKeys(sizes_, options_.seed, Stream());
    MakeInputs();
    rows_ =
        std::make_unique<cuda::BenchRows>(sizes_, options_.n_tokens, modulus_, method_.residual,
                                          keys_.get(), arena_, Stream(), Progress("writing rows"));
    const std::vector<std::int64_t> lengths(Size(options_.batch), options_.n_tokens);
    attention_->SetLengths(lengths, method_.kind == cuda::BenchMethod::Kind::kDense, Stream());
    index_ = cuda::MakeBenchIndex(method_, {sizes_, options_.n_tokens, OnHost(), options_.seed},
                                  keys_.get(), attention_->scan_lengths(), arena_, Stream(),
                                  Progress("making the index"));
    result_.random_index = index_ != nullptr && index_->is_random();
    dense_->Prepare(options_.batch, options_.batch);
    FitMultiplier();
    Count();
    MeasureCopies();
    Time();
    return result_;
  }

 private:
  bool OnHost() const { return options_.placement == "host"; }
  cudaStream_t Stream() const { return stream_.get(); }
  void Say(std::string_view what, std::string_view unit, std::int64_t done, std::int64_t total) {
    if (progress_ && !progress_(what, unit, done, total)) {
      throw Error(ErrorCode::kCancelled, "the benchmark was stopped");
    }
  }

  cuda::BenchProgress Progress(std::string_view what) {
    return
        [this, what](std::int64_t done, std::int64_t total) { Say(what, "layers", done, total); };
  }

  // Of rows of so many tokens at most: whole tiles of keys that repeat, so that no row is another
  // token's.
  std::int64_t LargestModulus(std::int64_t most) const {
    if (options_.n_tokens <= most) return options_.n_tokens;
    if (capture_ != nullptr) {
      const std::int64_t period = capture_->keys().n_tokens;
      return std::max<std::int64_t>(most / period, 1) * period;
    }
    std::int64_t modulus = options_.n_tokens;
    while (modulus > kRing && modulus > most) modulus /= 2;
    return modulus;
  }

  // Index and as many rows as there is memory for.
  void ReserveHost() {
    const cuda::BenchPlace place{sizes_, options_.n_tokens, OnHost(), options_.seed};
    const std::int64_t index = OnHost() ? cuda::BenchIndexBytes(method_, place) : 0;
    const std::int64_t row = cuda::BenchRows::Bytes(sizes_, 1);
    modulus_ = options_.fold_tokens;
    if (modulus_ <= 0) {
      // What an earlier run has taken is there for this one. 0: nobody knows what there is.
      const std::int64_t free = AvailableMemoryBytes() + cuda::TheBenchKept().arena_bytes();
      const double left = static_cast<double>(free - index) * kRowsShare;
      const auto most =
          free == 0 ? kMostRowBytes
                    : std::min(static_cast<std::int64_t>(std::max(left, 0.0)), kMostRowBytes);
      modulus_ = LargestModulus(most / row);
    }
    modulus_ = std::min(modulus_, options_.n_tokens);
    result_.row_modulus = modulus_ < options_.n_tokens ? modulus_ : 0;
    if (capture_ != nullptr && result_.row_modulus % capture_->keys().n_tokens != 0) {
      throw Error(ErrorCode::kUsage, "rows folded at " + std::to_string(modulus_) +
                                         " tokens; the capture's keys begin "
                                         "again after " +
                                         std::to_string(capture_->keys().n_tokens) +
                                         ", so fold at a multiple of that or let it be chosen");
    }
    arena_ = cuda::TheBenchKept().Arena(index + modulus_ * row + (std::int64_t{64} << 20));
    arena_->Wait([this](std::int64_t done, std::int64_t total) {
      return !progress_ || progress_("registering host memory", "MiB", done >> 20, total >> 20);
    });
    result_.pinned = arena_->pinned();
    if (result_.pinned) return;
    // Some systems let kernels read memory that is not registered; the report says so.
    int pageable = 0;
    Check(cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, 0),
          "cudaDeviceGetAttribute");
    if (pageable == 0) {
      throw Error(ErrorCode::kNoMemory,
                  "host memory cannot be registered with CUDA: " + arena_->reason() +
                      "; this device reads no other memory in place");
    }
  }

  void MakeInputs() {
    std::vector<std::int32_t> tokens;
    for (int s = 0; s < options_.batch; ++s)
      tokens.push_back((7 + 13 * s) % options_.shape.n_vocab);
    tokens_ = DeviceBuffer<std::int32_t>(std::span<const std::int32_t>(tokens));
    const std::int64_t q = std::int64_t{sizes_.n_lists()} * sizes_.heads.head_dim;
    const std::int64_t kv = std::int64_t{sizes_.n_heads()} * sizes_.heads.head_dim;
    q_.Reserve(Size(q));
    out_.Reserve(Size(q));
    k_.Reserve(Size(kv));
    v_.Reserve(Size(kv));
    logits_.Reserve(Size(std::int64_t{options_.batch} * options_.shape.n_vocab));
  }

  // Records one decode step. mark(layer, stage) is called where a stage of a layer ends.
  template <typename Mark>
  void Step(cudaStream_t stream, const Mark& mark) {
    dense_->Embed(tokens_.data(), options_.batch, stream);
    cuda::IndexScan* scan = index_ == nullptr ? nullptr : index_->scan();
    for (std::int32_t layer = 0; layer < sizes_.n_layers; ++layer) {
      dense_->BeforeAttention(layer, options_.batch, rows_->positions(), q_.data(), k_.data(),
                              v_.data(), stream);
      const cuda::StepVectors vectors = rows_->Vectors(layer, q_.data(), k_.data(), v_.data());
      keys_->TakeStep(layer, vectors, stream);
      mark(layer, kDense);
      rows_->Append(layer, vectors, stream);
      attention_->Run(layer, scan, rows_->Of(layer), q_.data(), out_.data(), stream,
                      [&](std::int32_t l, AttentionStep::Stage stage) {
                        mark(l, 1 + static_cast<int>(stage));
                      });
      dense_->AfterAttention(layer, options_.batch, out_.data(), stream);
    }
    dense_->Logits(0, options_.batch, logits_.data(), stream);
    dense_->Greedy(logits_.data(), options_.batch, tokens_.data(), stream);
    keys_->NextStep(stream);
    mark(sizes_.n_layers, kDense);
  }

  void FitMultiplier() {
    if (method_.kind != cuda::BenchMethod::Kind::kMean) return;
    if (const auto queries = keys_->FitQueries(); !queries.empty()) {
      index_->FitMultiplier(queries);
      return;
    }
    // Twice: the first steps attend to what a plan of everything finds.
    for (int round = 0; round < 2; ++round) {
      std::vector<std::vector<float>> queries;
      for (int i = 0; i < kFitSteps; ++i) {
        Step(Stream(), [&](std::int32_t layer, int stage) {
          if (stage != kDense || layer == sizes_.n_layers) return;
          queries.push_back(cuda::ToHost(q_.data(), q_.size(), Stream()));
        });
        Say("fitting the plan", "steps", round * kFitSteps + i + 1, 2 * kFitSteps);
      }
      index_->FitMultiplier(queries);
    }
  }

  // One step with a look at every layer: what is read, fetched and made again.
  void Count() {
    const std::size_t heads = Size(sizes_.n_heads());
    double bits = 0, rows = 0;
    Step(Stream(), [&](std::int32_t layer, int stage) {
      if (stage != 1 + static_cast<int>(AttentionStep::Stage::kSelect)) return;
      (void)layer;
      if (index_ == nullptr) return;
      const cuda::ScanCost cost = index_->scan()->Cost(Stream());
      bits += cost.read_bits;
      result_.link_bytes += cost.link_bytes;
      result_.scan_bytes += cost.scan_bytes;
      for (const std::int32_t n : cuda::ToHost(attention_->attended().count, heads, Stream())) {
        rows += std::max(n - kAlwaysKept, 0);
      }
      for (const std::int32_t r : cuda::ToHost(attention_->redo(), heads, Stream()))
        result_.redone_lists += r * sizes_.heads.group();
    });
    stream_.Wait();
    if (index_ == nullptr) {
      rows = static_cast<double>(options_.n_tokens) * sizes_.n_heads() * sizes_.n_layers;
    }
    const double calls = static_cast<double>(sizes_.n_layers) * sizes_.n_heads();
    row_bytes_ = rows * 4 * sizes_.heads.head_dim;
    result_.winners_per_head = rows / calls;
    result_.read_bits = bits / sizes_.n_layers;
    index_bytes_ = result_.link_bytes;
    result_.link_bytes += row_bytes_;
    result_.hbm_bytes = static_cast<double>(cuda::DeviceWeights::Bytes(weights_->shape())) +
                        2 * result_.link_bytes + result_.scan_bytes;
  }

  void MeasureCopies() {
    const DeviceBuffer<std::byte> a{Size(kCopyBytes)}, b{Size(kCopyBytes)};
    const std::int64_t host = std::min(kCopyBytes, arena_->used_bytes());
    std::vector<double> link, hbm;
    cuda::Event start, middle, end;
    for (int i = 0; i < 5; ++i) {
      start.Record(Stream());
      arena_->CopyToDevice(a.data(), arena_->data(), host, Stream());
      middle.Record(Stream());
      for (int r = 0; r < 4; ++r) {
        Check(cudaMemcpyAsync(b.data(), a.data(), Size(kCopyBytes), cudaMemcpyDeviceToDevice,
                              Stream()),
              "cudaMemcpyAsync");
      }
      end.Record(Stream());
      stream_.Wait();
      link.push_back(static_cast<double>(host) / middle.Since(start) / 1e9);
      hbm.push_back(4 * 2 * static_cast<double>(kCopyBytes) / end.Since(middle) / 1e9);
    }
    result_.memcpy_gb_s = Median(link);
    result_.hbm_copy_gb_s = Median(hbm);
  }

  void Time() {
    cuda::Graph graph(Stream(), [&](cudaStream_t s) { Step(s, [](std::int32_t, int) {}); });
    std::vector<double> gpu, wall;
    cuda::Event start, end;
    const double begin = NowSeconds();
    for (std::int64_t i = 0; i < kWarmSteps + options_.steps; ++i) {
      const double before = NowSeconds();
      start.Record(Stream());
      graph.Launch(Stream());
      end.Record(Stream());
      stream_.Wait();
      const double after = NowSeconds();
      if (i < kWarmSteps) continue;
      gpu.push_back(end.Since(start) * 1e3);
      wall.push_back((after - before) * 1e3);
      Say("timing", "steps", i - kWarmSteps + 1, options_.steps);
      if (after - begin > options_.seconds && gpu.size() >= 3) break;
    }
    result_.steps = static_cast<std::int64_t>(gpu.size());
    result_.gpu_ms = Median(gpu);
    result_.wall_ms = Median(wall);
    TimeStages(std::clamp<int>(static_cast<int>(gpu.size()), 3, 10));
  }

  // The same step with an event where each stage ends; kept apart because events take time.
  void TimeStages(int steps) {
    struct Mark {
      cuda::Event event;
      int stage;
    };
    std::vector<Mark> marks;
    const auto record = [&](cudaStream_t s, int stage) {
      marks.push_back({cuda::Event(), stage});
      Check(cudaEventRecordWithFlags(marks.back().event.get(), s, cudaEventRecordExternal),
            "cudaEventRecordWithFlags");
    };
    cuda::Graph graph(Stream(), [&](cudaStream_t s) {
      record(s, kDense);
      Step(s, [&](std::int32_t, int stage) { record(s, stage); });
    });
    std::vector<std::vector<double>> ms(kStages);
    for (int i = 0; i < steps; ++i) {
      graph.Launch(Stream());
      stream_.Wait();
      std::vector<double> sum(kStages);
      for (std::size_t m = 1; m < marks.size(); ++m) {
        sum[Size(marks[m].stage)] += marks[m].event.Since(marks[m - 1].event) * 1e3;
      }
      for (std::size_t s = 0; s < sum.size(); ++s) ms[s].push_back(sum[s]);
    }
    double all = 0;
    for (int s = 0; s < kStages; ++s) {
      result_.stages.push_back({std::string(kStepStages[s]), Median(ms[Size(s)])});
      all += result_.stages.back().gpu_ms;
    }
    result_.stages.push_back(
        {std::string(kStepStages[kStages]), std::max(result_.gpu_ms - all, 0.0)});
    const double gather = result_.stages[kGather].gpu_ms, rows = result_.stages[kRows].gpu_ms;
    if (index_bytes_ > 0 && gather > 0) result_.gather_gb_s = index_bytes_ / gather / 1e6;
    // Dense attention reads rows in place: its stage is the transfer.
    const bool dense = index_ == nullptr;
    if (!dense && rows > 0) result_.rows_gb_s = row_bytes_ / rows / 1e6;
    const double moved = dense ? result_.stages[kAttend].gpu_ms : (OnHost() ? gather : 0) + rows;
    // Both by the graph with events, which adds some 2 % to a step.
    if (all > 0) result_.non_transfer_share = std::max(0.0, 1 - moved / all);
  }

  // Stages as kStepStages has them; those of AttentionStep follow dense.
  static constexpr int kDense = 0, kGather = 2, kRows = 5, kAttend = 6, kStages = 7;

  const StepBenchOptions options_;
  const StepBenchProgress& progress_;
  const cuda::BenchMethod method_;
  const cuda::StepSizes sizes_;
  StepBenchResult result_;
  std::int64_t modulus_ = 0;
  double row_bytes_ = 0, index_bytes_ = 0;
  cuda::HostArena* arena_ = nullptr;
  std::shared_ptr<const cuda::CaptureData> capture_;
  cuda::Stream stream_;
  std::shared_ptr<const cuda::DeviceWeights> weights_;
  std::unique_ptr<cuda::DenseOps> dense_;
  std::unique_ptr<AttentionStep> attention_;
  std::unique_ptr<cuda::BenchKeys> keys_;
  std::unique_ptr<cuda::BenchRows> rows_;
  std::unique_ptr<cuda::BenchIndex> index_;
  DeviceBuffer<std::int32_t> tokens_;
  DeviceBuffer<float> q_, k_, v_, out_, logits_;
};

}  // namespace

StepBenchResult RunStepBench(const StepBenchOptions& options, const StepBenchProgress& progress) {
  CheckOptions(options);
  const std::string reason = ProbeCuda();
  if (!reason.empty()) {
    throw Error(ErrorCode::kUnsupported,
                "no CUDA device can be used: " + reason + "; run it on a machine with one");
  }
  const std::lock_guard<std::mutex> one_at_a_time(cuda::TheBenchKept().mutex);
  return Bench(options, progress).Run();
}

}  // namespace fathom
