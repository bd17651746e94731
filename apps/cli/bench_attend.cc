// SPDX-License-Identifier: MIT
// `fathom bench attend`: one decode step of one layer. Dense attention by ggml is the rival; beside
// it our own dense attention, attention over given rows, and whole steps of methods (plan, scan,
// selection, residual, attention), all over the same rows, queries and threads.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>

#include "bench.h"
#include "bench_data.h"
#include "bench_ggml.h"
#include "bench_kit.h"
#include "common.h"
#include "specs.h"

namespace fathom::cli {
namespace {

constexpr std::uint64_t kSeed = 5;
constexpr double kIndexBytes = 70;  // of a method, per token and KV head at 128 channels
constexpr double kScanBytes = 3;    // read per token and KV head, for the number of layers alone
constexpr double kUnion = 2;        // rows of a KV head in units of k, for the same

struct AttendOptions {
  BenchRequest request;
  std::int64_t k = 512;
  std::vector<std::string> methods = {"fathom:bits=28,k=512,residual=off", "fathom:bits=28,k=512"};
  bool no_ggml = false;
};

struct Data {
  BenchCase shape;
  std::unique_ptr<RowStore> rows;
  std::vector<LayerQueries> samples;          // [n_layers]
  std::vector<std::vector<float>> queries;    // [n_sets]
  std::vector<std::vector<TokenList>> lists;  // [n_sets][n_kv_heads]
  std::unique_ptr<GgmlCache> ggml;            // null without

  std::int64_t n_layers() const { return rows->n_layers(); }
  std::int64_t n_sets() const { return static_cast<std::int64_t>(queries.size()); }
  const float* query(std::int64_t set) const {
    return queries[static_cast<std::size_t>(set)].data();
  }
};

double RowBytes(const HeadGeometry& heads) { return 4.0 * heads.head_dim; }

double ListedRows(const std::vector<TokenList>& lists) {
  double rows = 0;
  for (const TokenList& list : lists) rows += static_cast<double>(list.tokens.size());
  return rows;
}

Data MakeData(const AttendOptions& options, const BenchCase& shape) {
  const HeadGeometry& heads = shape.heads;
  const auto tokens = static_cast<double>(shape.n_tokens * heads.n_kv_heads);
  const double all_rows = tokens * RowBytes(heads);
  const double listed =
      std::min(kUnion * static_cast<double>(options.k * heads.n_kv_heads), tokens) *
      RowBytes(heads);
  const double held = all_rows + tokens * kIndexBytes * heads.head_dim / 128 *
                                     static_cast<double>(options.methods.size());
  const std::int64_t n_layers = LayersFor(options.request, listed + tokens * kScanBytes, held);
  std::fprintf(stderr, "  making %s layers of %s\n", Grouped(n_layers).c_str(),
               ByteText(all_rows).c_str());
  const SyntheticHeads synthetic(heads, kSeed);
  Data data;
  data.shape = shape;
  data.rows = synthetic.MakeRows(n_layers, shape.n_tokens);
  data.samples = synthetic.Samples(n_layers, shape.n_tokens);
  if (!options.no_ggml) {
    const double ggml = GgmlCache::LayerBytes(heads, shape.n_tokens);
    data.ggml = std::make_unique<GgmlCache>(
        *data.rows, std::min(n_layers, LayersFor(options.request, all_rows, ggml)), shape.n_tokens);
  }
  // Rows of a layer may be read again, but only after others that fill the caches.
  const double sets =
      4 * static_cast<double>(CacheBytes()) / (listed * static_cast<double>(n_layers));
  const auto backend = MakeBackend(options.request.backend, 0);
  const auto n_sets = static_cast<std::int64_t>(std::clamp(std::ceil(sets), 8.0, 64.0));
  for (std::int64_t set = 0; set < n_sets; ++set) {
    data.queries.push_back(synthetic.Query(set));
    data.lists.push_back(
        ExactLists(*data.rows, shape.n_tokens, options.k, data.query(set), *backend));
  }
  return data;
}

// Attention over all rows, or over listed ones.
class RowsAttention {
 public:
  RowsAttention(const Data& data, const Backend& backend, bool listed)
      : data_(data),
        backend_(backend),
        listed_(listed),
        out_(data.queries.front().size()),
        lse_(static_cast<std::size_t>(data.shape.heads.n_heads)),
        heads_(static_cast<std::size_t>(data.shape.heads.n_kv_heads)) {}

  void Run(std::int32_t layer, std::int64_t set) {
    const HeadGeometry& g = data_.shape.heads;
    const auto group = static_cast<std::size_t>(g.group());
    const std::size_t head_floats = group * static_cast<std::size_t>(g.head_dim);
    for (std::size_t h = 0; h < heads_.size(); ++h) {
      heads_[h] = {data_.rows->rows(layer, static_cast<std::int32_t>(h)),
                   data_.query(set) + h * head_floats,
                   nullptr,
                   nullptr,
                   data_.shape.n_tokens,
                   out_.data() + h * head_floats,
                   lse_.data() + h * group};
      if (!listed_) continue;
      const TokenList& list = data_.lists[static_cast<std::size_t>(set)][h];
      heads_[h].tokens = list.tokens.data();
      heads_[h].mask = list.mask.data();
      heads_[h].n_attended = static_cast<std::int64_t>(list.tokens.size());
    }
    backend_.Attend(
        {g.head_dim, g.group(), 1.0F / std::sqrt(static_cast<float>(g.head_dim)), heads_});
  }
  const std::vector<float>& out() const { return out_; }

 private:
  const Data& data_;
  const Backend& backend_;
  bool listed_;
  std::vector<float> out_, lse_;
  std::vector<AttendHead> heads_;
};

// What one thread count compares. Members outlive the contenders.
class Contest {
 public:
  Contest(const AttendOptions& options, const Data& data, int threads)
      : options_(options),
        data_(data),
        threads_(threads),
        backend_(MakeBackend(options.request.backend, threads)),
        dense_(data, *backend_, false),
        listed_(data, *backend_, true),
        out_(data.queries.front().size()) {
    if (data.ggml) {
      for (const GgmlAttention::Kind kind : GgmlAttention::kKinds) {
        ggml_.push_back(std::make_unique<GgmlAttention>(*data.ggml, kind, 1, threads));
      }
    }
    for (const std::string& spec : options.methods) {
      std::fprintf(stderr, "  indexing for %s, %d threads\n", spec.c_str(), threads);
      methods_.push_back(
          MakeMethod(MethodSpec::Parse(spec), {data.rows.get(), backend_.get(), &data.samples}));
      methods_.back()->BuildIndex(data.shape.n_tokens);
      for (std::int32_t layer = 0; layer < data.n_layers(); ++layer)
        Step(*methods_.back(), layer, 0);
      methods_.back()->ResetCounters();
    }
  }

  void Run(BenchReport* report) {
    std::vector<BenchRow> rows;
    std::vector<Contender> contenders;
    for (std::size_t i = 0; i < ggml_.size(); ++i) {
      AddGgml(GgmlAttention::Name(GgmlAttention::kKinds.at(i)), ggml_[i].get(), &rows, &contenders);
    }
    AddRows("dense, all rows", false, &rows, &contenders);
    AddRows("listed rows, k=" + std::to_string(options_.k), true, &rows, &contenders);
    const std::size_t first_method = rows.size();
    for (std::size_t m = 0; m < methods_.size(); ++m) {
      rows.push_back(Row(options_.methods[m], data_.n_layers()));
      contenders.push_back({options_.methods[m], [this, m](std::int64_t call) {
                              const CallInputs in =
                                  InputsOf(call, data_.n_layers(), data_.n_sets());
                              Step(*methods_[m], in.layer, in.set);
                            }});
    }
    const std::vector<Timing> timings = TimeInTurns(contenders, options_.request.seconds);
    // Without ggml, our own dense attention.
    const double baseline =
        Fastest(std::span(timings).first(std::max<std::size_t>(ggml_.size(), 1)));
    const double flash = Fastest(std::span(timings).first(std::min<std::size_t>(ggml_.size(), 2)));
    for (std::size_t i = 0; i < rows.size(); ++i) {
      rows[i].timing = timings[i];
      rows[i].baseline_s = baseline;
      if (flash > 0) rows[i].more["flash_ratio"] = flash / timings[i].median_s;
      if (i >= first_method) CountMethod(*methods_[i - first_method], &rows[i]);
      report->Add(std::move(rows[i]));
    }
  }

 private:
  BenchRow Row(std::string name, std::int64_t n_layers) const {
    BenchRow row;
    row.name = std::move(name);
    row.shape = data_.shape;
    row.threads = threads_;
    row.layers = n_layers;
    return row;
  }

  void Step(Method& method, std::int32_t layer, std::int64_t set) {
    method.Attend(layer, data_.shape.n_tokens, data_.query(set), out_.data());
  }

  void AddGgml(const std::string& name, GgmlAttention* attention, std::vector<BenchRow>* rows,
               std::vector<Contender>* contenders) {
    dense_.Run(0, 0);
    attention->Run(0, data_.query(0));
    const double difference = CheckedDifference(name, attention->out(), dense_.out());
    const std::int64_t n_layers = data_.ggml->n_layers();
    BenchRow row = Row(name, n_layers);
    CountRows(static_cast<double>(data_.shape.n_tokens * data_.shape.heads.n_kv_heads), 1, &row);
    row.more["difference"] = difference;
    rows->push_back(std::move(row));
    contenders->push_back({name, [this, attention, n_layers](std::int64_t call) {
                             const CallInputs in = InputsOf(call, n_layers, data_.n_sets());
                             attention->Run(in.layer, data_.query(in.set));
                           }});
  }

  void AddRows(const std::string& name, bool listed, std::vector<BenchRow>* rows,
               std::vector<Contender>* contenders) {
    BenchRow row = Row(name, data_.n_layers());
    double n = static_cast<double>(data_.shape.n_tokens * data_.shape.heads.n_kv_heads);
    if (listed) {
      n = 0;
      for (const auto& lists : data_.lists)
        n += ListedRows(lists) / static_cast<double>(data_.n_sets());
    }
    CountRows(n, listed ? data_.n_sets() : 1, &row);
    rows->push_back(std::move(row));
    RowsAttention* attention = listed ? &listed_ : &dense_;
    contenders->push_back({name, [this, attention](std::int64_t call) {
                             const CallInputs in = InputsOf(call, data_.n_layers(), data_.n_sets());
                             attention->Run(in.layer, in.set);
                           }});
  }

  void CountRows(double n, std::int64_t n_sets, BenchRow* row) const {
    row->bytes = n * RowBytes(data_.shape.heads);
    row->working_set = row->bytes * static_cast<double>(row->layers * n_sets);
    row->more["rows_per_head"] = n / data_.shape.heads.n_kv_heads;
  }

  // Index and rows of a mean step, as the method counts them.
  void CountMethod(const Method& method, BenchRow* row) const {
    const MethodCounters& counters = method.counters();
    const auto calls = static_cast<double>(counters.calls);  // of KV heads
    const double n_kv = data_.shape.heads.n_kv_heads;
    CountRows(static_cast<double>(counters.rows) / calls * n_kv, 1, row);
    const double index = static_cast<double>(counters.index_bytes) / calls * n_kv;
    row->bytes += index;
    row->working_set = row->bytes * static_cast<double>(row->layers);
    row->more["index_bytes"] = index;
    row->more["read_bits"] = counters.mean_read_bits();
  }

  const AttendOptions& options_;
  const Data& data_;
  int threads_;
  std::unique_ptr<Backend> backend_;
  RowsAttention dense_, listed_;
  std::vector<float> out_;
  std::vector<std::unique_ptr<GgmlAttention>> ggml_;
  std::vector<std::unique_ptr<Method>> methods_;
};

constexpr const char* kNote =
    "one layer, one query position; GB/s of rows, and of index where there is one; ratio to the "
    "fastest of ggml's three, vs flash to the faster of its two flash attentions";

int BenchAttend(const AttendOptions& given) {
  AttendOptions options = given;
  options.methods = given.methods == std::vector<std::string>{"none"}
                        ? std::vector<std::string>{}
                        : ParseSpecLists(given.methods);
  return RunBench("attend", options.request,
                  {{"rows_per_head", "rows/head", 0},
                   {"read_bits", "read bits", 1},
                   {"flash_ratio", "vs flash", 2}},
                  kNote, [&](const BenchCase& shape, BenchReport* report) {
                    const Data data = MakeData(options, shape);
                    for (const int threads : report->threads()) {
                      Contest(options, data, threads).Run(report);
                    }
                  });
}

}  // namespace

void AddBenchAttend(Command bench, int* exit_code) {
  auto options = std::make_shared<AttendOptions>();
  Command attend = bench.AddCommand(
      "attend", "One decode step of a layer, dense and sparse, beside ggml's attention");
  AddBenchOptions(attend, &options->request);
  AddKOption(attend, &options->k);
  attend
      .AddOption("--methods", options->methods,
                 "method specs, lists at commas; none leaves them out")
      .ShowDefault();
  attend.AddFlag("--no-ggml", options->no_ggml, "leave ggml out");
  attend.OnRun([options, exit_code] { *exit_code = BenchAttend(*options); });
}

}  // namespace fathom::cli
