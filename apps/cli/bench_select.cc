// SPDX-License-Identifier: MIT
// `fathom bench select`: the best k of the scores of every query head and their union over the
// group, beside a selection by std::nth_element.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <numeric>

#include "bench.h"
#include "bench_data.h"
#include "bench_kit.h"
#include "common.h"

namespace fathom::cli {
namespace {

constexpr std::uint64_t kSeed = 7;

struct SelectOptions {
  BenchRequest request;
  std::int64_t k = 512;
};

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

// Scores of a few layers, and room for what is selected of one.
struct Data {
  BenchCase shape;
  std::int64_t last = 0;  // candidates are tokens kSinks .. last - 1
  std::int64_t keep = 0;
  std::vector<PageBuffer> scores;     // [n_layers] of [n_heads][n_tokens]
  std::vector<std::int32_t> winners;  // [n_heads][keep]
  std::vector<std::int32_t> tokens;   // [n_kv_heads][capacity]
  std::vector<std::uint16_t> mask;
  std::vector<std::int64_t> n_attended;               // [n_kv_heads]
  std::vector<std::vector<std::int32_t>> candidates;  // [n_heads], of std::nth_element

  std::int64_t n_layers() const { return static_cast<std::int64_t>(scores.size()); }
  float* layer(std::int64_t i) const { return reinterpret_cast<float*>(scores[Size(i)].data()); }
  double score_bytes() const {
    return 4.0 * static_cast<double>(shape.heads.n_heads * (last - kSinks));
  }
};

Data MakeData(const SelectOptions& options, const BenchCase& shape) {
  const HeadGeometry& heads = shape.heads;
  Data data;
  data.shape = shape;
  data.last = shape.n_tokens - kWindow;
  data.keep = std::min(options.k - kAlwaysKept, data.last - kSinks);
  const double rows = static_cast<double>(RowStore::Bytes(1, heads, shape.n_tokens));
  CheckMemory(rows);
  const std::size_t bytes = Size(heads.n_heads * shape.n_tokens) * sizeof(float);
  const std::int64_t n_layers =
      LayersFor(options.request, static_cast<double>(bytes), static_cast<double>(bytes));
  std::fprintf(stderr, "  making %s layers of scores of %s\n", Grouped(n_layers).c_str(),
               ByteText(static_cast<double>(bytes)).c_str());
  const SyntheticHeads synthetic(heads, kSeed);
  const auto store = synthetic.MakeRows(1, shape.n_tokens);
  const auto backend = MakeBackend(options.request.backend, 0);
  const std::size_t head_floats = Size(heads.group()) * Size(heads.head_dim);
  for (std::int64_t layer = 0; layer < n_layers; ++layer) {
    data.scores.emplace_back(bytes);
    const std::vector<float> q = synthetic.Query(layer);
    std::vector<ScoreHead> score;
    score.reserve(Size(heads.n_kv_heads));
    for (std::int32_t h = 0; h < heads.n_kv_heads; ++h) {
      score.push_back({store->rows(0, h), q.data() + Size(h) * head_floats,
                       data.layer(layer) + Size(h * heads.group()) * Size(shape.n_tokens),
                       shape.n_tokens});
    }
    backend->Score({heads.head_dim, heads.group(), shape.n_tokens, score});
  }
  const std::int64_t capacity =
      kAlwaysKept + std::min(heads.group() * data.keep, data.last - kSinks);
  data.winners.resize(Size(heads.n_heads * data.keep));
  data.tokens.resize(Size(heads.n_kv_heads * capacity));
  data.mask.resize(data.tokens.size());
  data.n_attended.resize(Size(heads.n_kv_heads));
  data.candidates.resize(Size(heads.n_heads), std::vector<std::int32_t>(Size(data.last - kSinks)));
  return data;
}

void RunSelect(const Backend& backend, std::int64_t layer, Data* data) {
  const HeadGeometry& heads = data->shape.heads;
  const std::size_t capacity = data->tokens.size() / Size(heads.n_kv_heads);
  std::vector<SelectHead> select;
  select.reserve(Size(heads.n_kv_heads));
  for (std::size_t h = 0; h < Size(heads.n_kv_heads); ++h) {
    const std::size_t first = h * Size(heads.group());
    select.push_back({data->layer(layer) + first * Size(data->shape.n_tokens), data->shape.n_tokens,
                      data->winners.data() + first * Size(data->keep),
                      data->tokens.data() + h * capacity, data->mask.data() + h * capacity,
                      &data->n_attended[h]});
  }
  backend.Select({heads.group(), kSinks, data->last, data->shape.n_tokens, data->keep, select});
}

// The same winners; no union, which only helps it.
void RunNthElement(std::int64_t layer, int threads, Data* data) {
  const std::int64_t n_heads = data->shape.heads.n_heads;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (std::int64_t h = 0; h < n_heads; ++h) {
    std::vector<std::int32_t>& tokens = data->candidates[Size(h)];
    const float* scores = data->layer(layer) + Size(h) * Size(data->shape.n_tokens);
    std::iota(tokens.begin(), tokens.end(), kSinks);
    const auto end = tokens.begin() + data->keep;
    std::nth_element(tokens.begin(), end, tokens.end(), [scores](std::int32_t a, std::int32_t b) {
      return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
    });
    std::sort(tokens.begin(), end);
    std::copy(tokens.begin(), end, data->winners.begin() + h * data->keep);
  }
}

double RowsPerHead(const Data& data) {
  const auto total =
      std::accumulate(data.n_attended.begin(), data.n_attended.end(), std::int64_t{0});
  return static_cast<double>(total) / data.shape.heads.n_kv_heads;
}

// Throws where the two choose differently: their speeds could not be compared.
double CheckedRows(const Backend& backend, int threads, Data* data) {
  RunNthElement(0, threads, data);
  const std::vector<std::int32_t> expected = data->winners;
  RunSelect(backend, 0, data);
  if (data->winners != expected) {
    throw Error(ErrorCode::kInternal, "select and std::nth_element chose different tokens");
  }
  return RowsPerHead(*data);
}

void Measure(const SelectOptions& options, int threads, Data* data, BenchReport* report) {
  const auto backend = MakeBackend(options.request.backend, threads);
  const double rows_per_head = CheckedRows(*backend, threads, data);
  const std::vector<Contender> contenders = {
      {"std::nth_element",
       [&](std::int64_t call) { RunNthElement(call % data->n_layers(), threads, data); }},
      {"select", [&](std::int64_t call) { RunSelect(*backend, call % data->n_layers(), data); }},
      {"select, the same scores again", [&](std::int64_t) { RunSelect(*backend, 0, data); }}};
  const std::vector<Timing> timings = TimeInTurns(contenders, options.request.seconds);
  for (std::size_t i = 0; i < contenders.size(); ++i) {
    BenchRow row;
    row.name = contenders[i].name;
    row.shape = data->shape;
    row.threads = threads;
    row.timing = timings[i];
    row.baseline_s = timings.front().median_s;
    row.bytes = data->score_bytes();
    row.layers = i < 2 ? data->n_layers() : 1;
    row.working_set = row.bytes * static_cast<double>(row.layers);
    row.more["k"] = options.k;
    row.more["rows_per_head"] = rows_per_head;
    report->Add(std::move(row));
  }
}

constexpr const char* kNote =
    "GB/s of scores; the last row reads scores that the caches may hold, as after a scan; ratio to "
    "std::nth_element, a task per query head";

int BenchSelect(const SelectOptions& options) {
  return RunBench("select", options.request, {{"rows_per_head", "rows/head", 0}}, kNote,
                  [&](const BenchCase& shape, BenchReport* report) {
                    Data data = MakeData(options, shape);
                    for (const int threads : report->threads()) {
                      Measure(options, threads, &data, report);
                    }
                  });
}

}  // namespace

void AddBenchSelect(Command bench, int* exit_code) {
  auto options = std::make_shared<SelectOptions>();
  Command select = bench.AddCommand("select", "The best k of given scores");
  AddBenchOptions(select, &options->request);
  AddKOption(select, &options->k);
  select.OnRun([options, exit_code] { *exit_code = BenchSelect(*options); });
}

}  // namespace fathom::cli
