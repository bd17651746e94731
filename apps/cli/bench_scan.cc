// SPDX-License-Identifier: MIT
// `fathom bench scan`: scores of all tokens of one layer from planes, beside those from whole keys
// and from the tables of rival methods.
#include <ggml.h>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>

#include "bench.h"
#include "bench_data.h"
#include "bench_index.h"
#include "bench_kit.h"
#include "bench_labels.h"
#include "common.h"

namespace fathom::cli {
namespace {

constexpr std::uint64_t kSeed = 8;
constexpr std::int64_t kSets = 8;         // of queries
constexpr std::int64_t kChunkTokens = 8;  // of a landmark

struct ScanOptions {
  BenchRequest request;
  std::vector<double> bits = {28};
  double budget = 48;
  std::int64_t k = 512;
};

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

// One way to score all tokens. Everything that depends on a query but not on the tokens, plans and
// tables of weights, is made beforehand.
struct Reader {
  std::string name;
  std::function<void(const Backend& backend, std::int64_t layer, std::int64_t set)> run;
  std::int64_t n_layers = 1;
  double read_bits = 0;         // per token and KV head
  std::string instruction_set;  // other than that of the request
  nlohmann::json more = nlohmann::json::object();
};

// What the readers of one shape share. Members keep their addresses: readers refer to them.
class Scans {
 public:
  Scans(const ScanOptions& options, const BenchCase& shape)
      : options_(options),
        shape_(Checked(shape)),
        backend_(MakeBackend(options.request.backend, 0)),
        synthetic_(shape.heads, kSeed),
        scores_(Size(shape.heads.n_heads) * Size(shape.n_tokens)) {
    for (std::int64_t set = 0; set < kSets; ++set) queries_.push_back(synthetic_.Query(set));
    AddExact();
    AddMean();
    AddPaper();
    AddLandmark();
    AddLabels();
  }
  Scans(const Scans&) = delete;
  Scans& operator=(const Scans&) = delete;

  void Measure(int threads, BenchReport* report) const {
    std::vector<Contender> contenders;
    contenders.reserve(readers_.size());
    for (const Reader& reader : readers_) {
      const std::string& name = reader.instruction_set;
      const std::shared_ptr backend =
          MakeBackend(name.empty() ? options_.request.backend : name, threads);
      contenders.push_back({reader.name, [&reader, backend](std::int64_t call) {
                              const CallInputs in = InputsOf(call, reader.n_layers, kSets);
                              reader.run(*backend, in.layer, in.set);
                            }});
    }
    const std::vector<Timing> timings = TimeInTurns(contenders, options_.request.seconds);
    for (std::size_t i = 0; i < readers_.size(); ++i) {
      BenchRow row;
      row.name = readers_[i].name;
      row.shape = shape_;
      row.threads = threads;
      row.timing = timings[i];
      row.bytes = Bytes(readers_[i].read_bits);
      row.baseline_s = timings.front().median_s;
      row.layers = readers_[i].n_layers;
      row.working_set = row.bytes * static_cast<double>(row.layers);
      row.more = readers_[i].more;
      row.more["read_bits"] = readers_[i].read_bits;
      row.more["mkeys_s"] = KeyCount() / timings[i].median_s / 1e6;
      report->Add(std::move(row));
    }
  }

 private:
  // Throws where not even one copy of all that is read, and the scores, would fit.
  static const BenchCase& Checked(const BenchCase& shape) {
    const auto keys = static_cast<double>(shape.n_tokens * shape.heads.n_kv_heads);
    const double rows = 4.0 * shape.heads.head_dim;
    const double tables = 1.5 * shape.heads.head_dim;  // two indexes, half a byte per channel each
    CheckMemory(keys * (rows + tables + 4.0 * shape.heads.group()));
    return shape;
  }

  double KeyCount() const { return static_cast<double>(shape_.n_tokens * shape_.heads.n_kv_heads); }
  double Bytes(double bits) const { return KeyCount() * bits / 8; }
  const float* query(std::int64_t set) const { return queries_[Size(set)].data(); }

  // Layers for a table of held_bits per token and KV head.
  std::int64_t Layers(double read_bits, double held_bits) const {
    return LayersFor(options_.request, Bytes(read_bits), Bytes(held_bits));
  }

  // Vectors of fp16, key_stride halfs from one to the next.
  void Score(const Backend& backend, std::span<const Half* const> keys, std::int64_t n,
             std::int64_t key_stride, std::int64_t set) {
    const HeadGeometry& heads = shape_.heads;
    const std::size_t group = Size(heads.group());
    std::vector<ScoreHead> score(keys.size());
    for (std::size_t h = 0; h < keys.size(); ++h) {
      score[h] = {keys[h], query(set) + h * group * Size(heads.head_dim),
                  scores_.data() + h * group * Size(shape_.n_tokens), shape_.n_tokens};
    }
    backend.Score({heads.head_dim, heads.group(), n, score, key_stride});
  }

  // Correlation of the scores of the first query head with its exact ones, which AddExact kept.
  double Correlation() const {
    const auto n = static_cast<double>(shape_.n_tokens);
    const auto x = std::span(scores_).first(exact_.size());
    const double mean_x = std::accumulate(x.begin(), x.end(), 0.0) / n;
    const double mean_y = std::accumulate(exact_.begin(), exact_.end(), 0.0) / n;
    double xx = 0;
    double yy = 0;
    double xy = 0;
    for (std::size_t i = 0; i < exact_.size(); ++i) {
      xx += std::pow(x[i] - mean_x, 2);
      yy += std::pow(exact_[i] - mean_y, 2);
      xy += (x[i] - mean_x) * (exact_[i] - mean_y);
    }
    return xy / std::sqrt(xx * yy);
  }

  void AddExact() {
    const double row_bits = 4.0 * shape_.heads.head_dim * 8;
    rows_ = synthetic_.MakeRows(Layers(row_bits / 2, row_bits), shape_.n_tokens);
    Reader reader;
    reader.name = "exact scores";
    reader.n_layers = rows_->n_layers();
    reader.read_bits = row_bits / 2;
    reader.run = [this](const Backend& backend, std::int64_t layer, std::int64_t set) {
      std::vector<const Half*> keys;
      keys.reserve(Size(shape_.heads.n_kv_heads));
      for (std::int32_t h = 0; h < shape_.heads.n_kv_heads; ++h) {
        keys.push_back(rows_->rows(static_cast<std::int32_t>(layer), h));
      }
      Score(backend, keys, shape_.n_tokens, 0, set);
    };
    reader.run(*backend_, 0, 0);
    exact_.assign(scores_.begin(), scores_.begin() + shape_.n_tokens);
    readers_.push_back(std::move(reader));
  }

  using Plan = std::function<LayerRead(const float* q)>;
  using Run = std::function<void(const Backend&, std::int64_t layer, const LayerRead&)>;

  // A reader of planes; plan: what a query reads.
  static Reader PlanesReader(const std::string& name, const IndexCopies& index,
                             const std::vector<std::vector<float>>& queries, const Plan& plan,
                             const Run& run) {
    auto reads = std::make_shared<std::vector<LayerRead>>();
    Reader reader;
    reader.name = name;
    reader.n_layers = index.n_layers();
    double planes = 0;
    for (const std::vector<float>& q : queries) {
      reads->push_back(plan(q.data()));
      reader.read_bits += reads->back().read_bits / kSets;
      planes += reads->back().planes / kSets;
    }
    reader.run = [reads, run](const Backend& backend, std::int64_t layer, std::int64_t set) {
      run(backend, layer, (*reads)[Size(set)]);
    };
    reader.more["planes"] = planes;
    return reader;
  }

  void AddPlanes(const std::string& name, const IndexCopies& index, const Plan& plan) {
    Reader reader = PlanesReader(
        name, index, queries_, plan,
        [this, &index](const Backend& backend, std::int64_t layer, const LayerRead& read) {
          ScanLayer(backend, index, layer, shape_.heads.group(), read, {.scores = scores_.data()});
        });
    reader.run(*backend_, 0, 0);
    reader.more["correlation"] = Correlation();
    readers_.push_back(std::move(reader));
  }

  std::unique_ptr<IndexCopies> MakeIndex(Codec codec, bool centred, double read_bits) const {
    IndexShape shape;
    shape.codec = codec;
    shape.head_dim = shape_.heads.head_dim;
    std::vector<Basis> bases;
    bases.reserve(Size(shape_.heads.n_kv_heads));
    for (std::int32_t h = 0; h < shape_.heads.n_kv_heads; ++h) {
      bases.push_back(
          RawBasis(shape.head_dim, centred ? synthetic_.KeyMean(h) : std::vector<double>{}));
    }
    const double held = 8 * static_cast<double>(shape.IndexBytes(shape_.n_tokens / kBlockTokens)) /
                        static_cast<double>(shape_.n_tokens);
    const std::int64_t n_layers = Layers(read_bits, held);
    std::fprintf(stderr, "  making %s layers of index, %.0f bits per token\n",
                 Grouped(n_layers).c_str(), held);
    return std::make_unique<IndexCopies>(shape, *rows_, shape_.n_tokens, bases, n_layers,
                                         *backend_);
  }

  void AddMean() {
    mean_ = MakeIndex(Codec::kMean, true, *std::ranges::min_element(options_.bits));
    for (const double bits : options_.bits) {
      const auto plan = [&](const float* q) {
        return PlanMeanRead(*mean_, shape_.heads.group(), q, bits);
      };
      AddPlanes("fathom, bits=" + Plain(bits), *mean_, plan);
      AddFused("fathom, bits=" + Plain(bits), plan, "");
      if (const std::string set = MaskedSet(); !set.empty()) {
        AddFused("masked adds, bits=" + Plain(bits), plan, set);
      }
    }
  }

  // The kernels of the first version in the instruction set of the request's, empty if none.
  std::string MaskedSet() const {
    const std::string_view name = backend_->name();
    const std::string width = name == "cpu/avx2" ? "cpu/avx2" : "cpu/avx512";
    for (const BackendInfo& info : ListBackends()) {
      const bool wanted = info.name == width + "-masked" && info.name != name;
      if (wanted && info.available && name.starts_with("cpu/a")) return info.name;
    }
    return {};
  }

  // What a decode step does: the scan leaves integers for the selection that is fused with it. And
  // the kernels by themselves, whose results stay in a cache and are dropped.
  void AddFused(const std::string& name, const Plan& plan, const std::string& instruction_set) {
    sums_.resize(scores_.size());
    base_.resize(scores_.size() / kBlockTokens);
    const auto add = [&](const std::string& what, const Run& run) {
      readers_.push_back(PlanesReader(name + what, *mean_, queries_, plan, run));
      readers_.back().instruction_set = instruction_set;
    };
    add(", integers", [this](const Backend& backend, std::int64_t layer, const LayerRead& read) {
      ScanLayer(backend, *mean_, layer, shape_.heads.group(), read,
                {.sums = sums_.data(), .base = base_.data()});
    });
    add(", kernels", [this](const Backend& backend, std::int64_t layer, const LayerRead& read) {
      ScanLayer(backend, *mean_, layer, shape_.heads.group(), read, {});
    });
    if (keep() <= 0) return;
    add(Best(), [this](const Backend& backend, std::int64_t layer, const LayerRead& read) {
      RankLayer(backend, *mean_, layer, shape_.heads.group(), keep(), read, &selected_);
    });
  }

  std::string Best() const { return ", best " + Grouped(options_.k); }
  // Winners per query head.
  std::int64_t keep() const {
    return std::min(options_.k - kAlwaysKept, shape_.n_tokens - kAlwaysKept);
  }

  // The best k of the scores.
  void Select(const Backend& backend) {
    const HeadGeometry& heads = shape_.heads;
    const auto group = Size(heads.group());
    winners_.resize(Size(heads.n_heads * keep()));
    selected_.Resize(heads, shape_.n_tokens, keep());
    const std::size_t capacity = selected_.capacity();
    std::vector<SelectHead> select;
    select.reserve(Size(heads.n_kv_heads));
    for (std::size_t h = 0; h < Size(heads.n_kv_heads); ++h) {
      select.push_back({scores_.data() + h * group * Size(shape_.n_tokens), shape_.n_tokens,
                        winners_.data() + h * group * Size(keep()),
                        selected_.tokens.data() + h * capacity,
                        selected_.mask.data() + h * capacity, &selected_.n_attended[h]});
    }
    backend.Select(
        {heads.group(), kSinks, shape_.n_tokens - kWindow, shape_.n_tokens, keep(), select});
  }

  void AddLabels() {
    const std::vector<double> variance = synthetic_.KeyVariance();
    for (const LabelScan& scan : LabelScans(shape_.heads.head_dim)) {
      const std::int64_t n_layers = Layers(scan.ReadBits(), scan.HeldBits());
      std::fprintf(stderr, "  making %s layers of %s\n", Grouped(n_layers).c_str(),
                   scan.name.c_str());
      labels_.push_back(std::make_unique<LabelCopies>(scan, *rows_, shape_.n_tokens, variance,
                                                      n_layers, *backend_));
      const LabelCopies& tables = *labels_.back();
      Reader reader;
      reader.name = scan.name;
      reader.n_layers = n_layers;
      reader.read_bits = scan.ReadBits();
      reader.run = [this, &tables](const Backend& backend, std::int64_t layer, std::int64_t set) {
        tables.Scan(backend, layer, shape_.heads.group(), query(set), scores_.data());
      };
      reader.run(*backend_, 0, 0);
      reader.more["correlation"] = Correlation();
      readers_.push_back(reader);
      if (keep() <= 0) continue;
      reader.name += Best();
      reader.more.clear();
      reader.run = [this, scan = reader.run](const Backend& backend, std::int64_t layer,
                                             std::int64_t set) {
        scan(backend, layer, set);
        Select(backend);
      };
      readers_.push_back(std::move(reader));
    }
  }

  void AddPaper() {
    paper_ = MakeIndex(Codec::kPaper, false, options_.budget);
    const std::vector<double> variance = synthetic_.KeyVariance();
    AddPlanes("preset=paper, budget=" + Plain(options_.budget), *paper_, [&](const float* q) {
      return PlanPaperRead(*paper_, shape_.heads.group(), q, variance, options_.budget);
    });
  }

  // Mean keys of the chunks of a KV head: [n_tokens / 8][D].
  void FillLandmarks(std::int32_t kv_head, Half* out) const {
    const auto dim = Size(shape_.heads.head_dim);
    std::vector<float> key(dim);
    std::vector<float> mean(dim);
    const Half* row = rows_->rows(0, kv_head);
    for (std::int64_t chunk = 0; chunk < shape_.n_tokens / kChunkTokens; ++chunk, out += dim) {
      std::ranges::fill(mean, 0.0F);
      for (std::int64_t i = 0; i < kChunkTokens; ++i, row += 2 * dim) {
        ggml_fp16_to_fp32_row(row, key.data(), shape_.heads.head_dim);
        for (std::size_t d = 0; d < dim; ++d) mean[d] += key[d] / kChunkTokens;
      }
      ggml_fp32_to_fp16_row(mean.data(), out, shape_.heads.head_dim);
    }
  }

  void AddLandmark() {
    const double bits = 16.0 * shape_.heads.head_dim / kChunkTokens;
    const std::int64_t n = shape_.n_tokens / kChunkTokens;
    const std::size_t head_halfs = Size(n) * Size(shape_.heads.head_dim);
    Reader reader;
    reader.name = "landmark, a mean key of 8 tokens";
    reader.n_layers = Layers(bits, bits);
    reader.read_bits = bits;
    for (std::int64_t layer = 0; layer < reader.n_layers; ++layer) {
      landmarks_.emplace_back(Size(shape_.heads.n_kv_heads) * head_halfs * sizeof(Half));
      auto* table = reinterpret_cast<Half*>(landmarks_.back().data());
      for (std::int32_t h = 0; h < shape_.heads.n_kv_heads && layer == 0; ++h) {
        FillLandmarks(h, table + Size(h) * head_halfs);
      }
      if (layer > 0) std::memcpy(table, landmarks_[0].data(), landmarks_[0].size());
    }
    reader.run = [this, n, head_halfs](const Backend& backend, std::int64_t layer,
                                       std::int64_t set) {
      std::vector<const Half*> keys;
      keys.reserve(Size(shape_.heads.n_kv_heads));
      for (std::size_t h = 0; h < Size(shape_.heads.n_kv_heads); ++h) {
        keys.push_back(reinterpret_cast<const Half*>(landmarks_[Size(layer)].data()) +
                       h * head_halfs);
      }
      Score(backend, keys, n, shape_.heads.head_dim, set);
    };
    readers_.push_back(std::move(reader));
  }

  const ScanOptions& options_;
  const BenchCase shape_;
  const std::unique_ptr<Backend> backend_;  // of all threads, for what is not timed
  const SyntheticHeads synthetic_;
  std::vector<std::vector<float>> queries_;  // [kSets] of [n_heads][D]
  std::vector<float> scores_;                // [n_heads][n_tokens], as layers share them
  std::vector<float> exact_;                 // [n_tokens] of the first query head and query
  std::vector<std::uint8_t> sums_;           // [n_heads][n_tokens]
  std::vector<std::int32_t> base_;           // [n_heads][n_tokens / 64]
  std::vector<std::int32_t> winners_;        // [n_heads][keep]
  Selected selected_;
  std::unique_ptr<RowStore> rows_;
  std::unique_ptr<IndexCopies> mean_, paper_;
  std::vector<std::unique_ptr<LabelCopies>> labels_;
  std::vector<PageBuffer> landmarks_;  // [n_layers] of [n_kv_heads][n_tokens / 8][D]
  std::vector<Reader> readers_;
};

constexpr const char* kNote =
    "scores of one layer's tokens for all query heads; read bits per token and KV head, of which "
    "GB/s is the rate;\nintegers: a byte for every token and query head in place of a score; "
    "kernels: those, made and dropped;\nbest k: the scan leaves the best k tokens of every query "
    "head, as in a decode step, and no scores; Mkeys/s: millions of tokens times KV heads;\nratio "
    "to exact scores";

int BenchScan(const ScanOptions& options) {
  return RunBench("scan", options.request,
                  {{"read_bits", "read bits", 1},
                   {"planes", "planes", 1},
                   {"mkeys_s", "Mkeys/s", 0},
                   {"correlation", "correlation", 3}},
                  kNote, [&](const BenchCase& shape, BenchReport* report) {
                    const Scans scans(options, shape);
                    for (const int threads : report->threads()) scans.Measure(threads, report);
                  });
}

}  // namespace

void AddBenchScan(Command bench, int* exit_code) {
  auto options = std::make_shared<ScanOptions>();
  Command scan =
      bench.AddCommand("scan", "Scores of all tokens from bit planes, and from rivals' tables");
  AddBenchOptions(scan, &options->request);
  scan.AddOption("--bits", options->bits, "read bits per token of our read, e.g. 16,28,64")
      .SeparatedBy(',')
      .ShowDefault()
      .InRange(1, kMaxHeadDim * kPlanes);
  scan.AddOption("--budget", options->budget, "code bits per token of the published read")
      .ShowDefault()
      .InRange(1, kMaxHeadDim * kPlanes);
  AddKOption(scan, &options->k);
  scan.OnRun([options, exit_code] { *exit_code = BenchScan(*options); });
}

}  // namespace fathom::cli
