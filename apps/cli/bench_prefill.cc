// SPDX-License-Identifier: MIT
// `fathom bench prefill`: the attention of a chunk of prompt tokens over a context, one layer, ours
// beside ggml's. No bound but arithmetic counts here, so the rows of one layer are read again and
// again.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>

#include "bench.h"
#include "bench_data.h"
#include "bench_ggml.h"
#include "bench_kit.h"
#include "common.h"

namespace fathom::cli {
namespace {

constexpr std::uint64_t kSeed = 6;
constexpr std::int64_t kSets = 4;  // of queries

struct PrefillOptions {
  BenchRequest request;
  std::int64_t chunk = 512;
  bool no_ggml = false;
};

struct Data {
  BenchCase shape;  // n_tokens: before the chunk
  std::int64_t chunk = 0;
  std::unique_ptr<RowStore> rows;
  std::vector<std::vector<float>> queries;  // [kSets] of [chunk][n_heads][D]
  std::unique_ptr<GgmlCache> ggml;          // null without

  const float* query(std::int64_t call) const {
    return queries[static_cast<std::size_t>(call % kSets)].data();
  }
};

Data MakeData(const PrefillOptions& options, const BenchCase& shape) {
  const std::int64_t n_tokens = shape.n_tokens + options.chunk;
  // Rows, ggml's copy of them, and the scores before and after soft_max.
  const double scores = 8.0 * shape.heads.n_heads * static_cast<double>(n_tokens * options.chunk);
  CheckMemory(static_cast<double>(RowStore::Bytes(1, shape.heads, n_tokens)) +
              (options.no_ggml ? 0 : GgmlCache::LayerBytes(shape.heads, n_tokens) + scores));
  const SyntheticHeads synthetic(shape.heads, kSeed);
  Data data;
  data.shape = shape;
  data.chunk = options.chunk;
  data.rows = synthetic.MakeRows(1, n_tokens);
  if (!options.no_ggml) data.ggml = std::make_unique<GgmlCache>(*data.rows, 1, n_tokens);
  for (std::int64_t set = 0; set < kSets; ++set) {
    data.queries.push_back(synthetic.Queries(set * options.chunk, options.chunk));
  }
  return data;
}

// Multiplications and additions of both products, of the pairs that the causal mask leaves.
double Operations(const Data& data) {
  const auto chunk = static_cast<double>(data.chunk);
  const double pairs = chunk * static_cast<double>(data.shape.n_tokens) + chunk * (chunk + 1) / 2;
  return 4 * pairs * data.shape.heads.n_heads * data.shape.heads.head_dim;
}

void RunOurs(const Data& data, const Backend& backend, std::int64_t call, std::vector<float>* out) {
  const HeadGeometry& heads = data.shape.heads;
  std::vector<const Half*> rows;
  rows.reserve(static_cast<std::size_t>(heads.n_kv_heads));
  for (std::int32_t h = 0; h < heads.n_kv_heads; ++h) rows.push_back(data.rows->rows(0, h));
  backend.Prefill({heads, 1.0F / std::sqrt(static_cast<float>(heads.head_dim)), data.shape.n_tokens,
                   data.chunk, data.query(call), out->data(), rows});
}

void Measure(const PrefillOptions& options, const Data& data, int threads, BenchReport* report) {
  const auto backend = MakeBackend(options.request.backend, threads);
  std::vector<float> out(data.queries.front().size());
  std::vector<Contender> contenders;
  contenders.push_back({"ours", [&](std::int64_t call) { RunOurs(data, *backend, call, &out); }});
  std::vector<std::unique_ptr<GgmlAttention>> rivals;
  std::vector<double> differences = {0};
  if (data.ggml) {
    RunOurs(data, *backend, 0, &out);
    for (const GgmlAttention::Kind kind : GgmlAttention::kKinds) {
      const char* name = GgmlAttention::Name(kind);
      rivals.push_back(std::make_unique<GgmlAttention>(*data.ggml, kind, data.chunk, threads));
      GgmlAttention* rival = rivals.back().get();
      rival->Run(0, data.query(0));
      differences.push_back(CheckedDifference(name, rival->out(), out));
      contenders.push_back(
          {name, [&, rival](std::int64_t call) { rival->Run(0, data.query(call)); }});
    }
  }
  const std::vector<Timing> timings = TimeInTurns(contenders, options.request.seconds);
  const double baseline = Fastest(std::span(timings).subspan(1));
  for (std::size_t i = 0; i < contenders.size(); ++i) {
    BenchRow row;
    row.name = contenders[i].name;
    row.shape = data.shape;
    row.threads = threads;
    row.timing = timings[i];
    row.operations = Operations(data);
    row.baseline_s = baseline;
    row.working_set =
        static_cast<double>(RowStore::Bytes(1, data.shape.heads, data.shape.n_tokens + data.chunk));
    row.more["chunk"] = data.chunk;
    row.more["tokens_s"] = static_cast<double>(data.chunk) / timings[i].median_s;
    if (i > 0) row.more["difference"] = differences[i];
    report->Add(std::move(row));
  }
}

constexpr const char* kNote =
    "one layer, queries after that many tokens; operations of the pairs that the causal mask "
    "leaves;\nshares of the fp32 peak, which kernels that multiply in bf16 can exceed; ratio to "
    "the "
    "fastest of ggml's three";

int BenchPrefill(const PrefillOptions& options) {
  return RunBench("prefill", options.request, {{"tokens_s", "tokens/s", 0}}, kNote,
                  [&](const BenchCase& shape, BenchReport* report) {
                    const Data data = MakeData(options, shape);
                    for (const int threads : report->threads())
                      Measure(options, data, threads, report);
                  });
}

}  // namespace

void AddBenchPrefill(Command bench, int* exit_code) {
  auto options = std::make_shared<PrefillOptions>();
  options->request.tokens = {"8k", "32k"};
  options->request.n_kv_heads = 2;
  Command prefill = bench.AddCommand("prefill", "Attention of a chunk of a prompt, beside ggml's");
  AddBenchOptions(prefill, &options->request);
  prefill.AddOption("--chunk", options->chunk, "queries, at the positions after the tokens")
      .ShowDefault()
      .InRange(1, 1 << 16);
  prefill.AddFlag("--no-ggml", options->no_ggml, "leave ggml out");
  prefill.OnRun([options, exit_code] { *exit_code = BenchPrefill(*options); });
}

}  // namespace fathom::cli
