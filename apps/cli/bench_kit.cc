// SPDX-License-Identifier: MIT
#include "bench_kit.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <memory>
#include <utility>

#include "common.h"
#include "table.h"

namespace fathom::cli {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kTurns = 3;
constexpr int kWarmUp = 2;                    // calls per turn
constexpr std::size_t kMostCalls = 1U << 16;  // timed per turn
constexpr double kCacheFactor = 4;
constexpr double kMostLayers = 4096;
constexpr std::int64_t kMaxTokens = std::int64_t{1} << 24;

// Times one turn of a contender; *next_call goes on. Calls that take longer than the turn are not
// warmed up again.
void RunTurn(const Contender& contender, double seconds, std::int64_t* next_call,
             std::vector<double>* times) {
  const auto timed = [&] {
    if (Interrupted()) {
      throw Error(ErrorCode::kCancelled, "interrupted; what was measured is reported");
    }
    const double start = Now();
    contender.run((*next_call)++);
    return Now() - start;
  };
  double last = times->empty() ? 0 : times->back();
  for (int i = 0; i < kWarmUp && last <= seconds; ++i) last = timed();
  double total = 0;
  for (std::size_t n = 0; n < kMostCalls && (n == 0 || total < seconds); ++n) {
    times->push_back(timed());
    total += times->back();
  }
}

Timing Summarize(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  const std::size_t n = times.size();
  return {(times[(n - 1) / 2] + times[n / 2]) / 2, times.front(), static_cast<std::int64_t>(n)};
}

std::string SpeedText(const MachineSpeed& speed) {
  return std::to_string(speed.threads) + (speed.threads == 1 ? " thread" : " threads") +
         " in this run: memory reads " + Fixed(speed.read_gb_s, 1) + " GB/s, fp32 multiply-adds " +
         Fixed(speed.fma_gflop_s, 0) + " GFLOP/s\n";
}

void CheckShape(const BenchRequest& request) {
  for (const std::string& text : request.tokens) {
    const std::int64_t n = ParseTokens(text);
    if (n % kBlockTokens != 0 || n > kMaxTokens) {
      throw Error(ErrorCode::kUsage, "--tokens " + text + " must be a multiple of " +
                                         std::to_string(kBlockTokens) + " and at most " +
                                         std::to_string(kMaxTokens));
    }
  }
  if (request.head_dim % 16 != 0) {
    throw Error(ErrorCode::kUsage, "--head-dim " + std::to_string(request.head_dim) +
                                       " is not a multiple of 16, as all kernels need");
  }
}

}  // namespace

void AddBenchOptions(Command command, BenchRequest* request) {
  command.AddOption("--tokens", request->tokens, "contexts, e.g. 32k,128k; multiples of 64")
      .SeparatedBy(',')
      .ShowDefault();
  command.AddOption("--group", request->groups, "query heads per KV head, e.g. 4,6,8")
      .SeparatedBy(',')
      .ShowDefault()
      .InRange(1, kMaxGroup);
  command.AddOption("--kv-heads", request->n_kv_heads, "KV heads of the layer")
      .ShowDefault()
      .InRange(1, 256);
  command.AddOption("--head-dim", request->head_dim, "channels per head, a multiple of 16")
      .ShowDefault()
      .InRange(16, kMaxHeadDim);
  command
      .AddOption("-t,--threads", request->threads,
                 "thread counts, e.g. 1,2,4; all: the powers of two up to all processors")
      .SeparatedBy(',')
      .ShowDefault();
  command
      .AddOption("--backend", request->backend,
                 "kernels: cpu, cpu/avx2, ref, ... (see fathom info)")
      .TypeName("NAME")
      .ShowDefault();
  command.AddOption("--seconds", request->seconds, "timed per row")
      .ShowDefault()
      .InRange(0.0, 3600.0);
  command
      .AddOption("--layers", request->layers,
                 "copies of all data that calls go round; 0: four times the caches")
      .ShowDefault()
      .InRange(0.0, kMostLayers);
  command.AddFlag("--json", request->json, "print one JSON document");
}

void AddKOption(Command command, std::int64_t* k) {
  command.AddOption("-k", *k, "rows attended per query head, always kept ones included")
      .ShowDefault()
      .InRange(kAlwaysKept + 1, 1 << 20);
}

std::vector<int> ParseThreads(const std::vector<std::string>& texts, int n_processors) {
  std::vector<int> counts;
  for (const std::string& text : texts) {
    if (text == "all") {
      for (int n = 1; n < n_processors; n *= 2) counts.push_back(n);
      counts.push_back(n_processors);
      continue;
    }
    int n = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), n);
    if (error != std::errc() || end != text.data() + text.size() || n < 1 || n > kMaxThreads) {
      throw Error(ErrorCode::kUsage,
                  "--threads '" + text + "' is not a number of threads; write 1,2,4 or all");
    }
    counts.push_back(n);
  }
  std::sort(counts.begin(), counts.end());
  counts.erase(std::unique(counts.begin(), counts.end()), counts.end());
  return counts;
}

std::vector<Timing> TimeInTurns(std::span<const Contender> contenders, double seconds) {
  std::vector<std::vector<double>> times(contenders.size());
  std::vector<std::int64_t> next_call(contenders.size(), 0);
  for (int turn = 0; turn < kTurns; ++turn) {
    for (std::size_t i = 0; i < contenders.size(); ++i) {
      RunTurn(contenders[i], seconds / kTurns, &next_call[i], &times[i]);
    }
  }
  std::vector<Timing> timings;
  timings.reserve(contenders.size());
  for (std::size_t i = 0; i < contenders.size(); ++i) {
    timings.push_back(Summarize(std::move(times[i])));
    std::fprintf(stderr, "  %s: %.3f ms\n", contenders[i].name.c_str(),
                 timings.back().median_s * 1e3);
  }
  return timings;
}

double Fastest(std::span<const Timing> timings) {
  double best = 0;
  for (const Timing& timing : timings) {
    best = best > 0 ? std::min(best, timing.median_s) : timing.median_s;
  }
  return best;
}

BenchReport::BenchReport(std::string bench, const BenchRequest& request,
                         std::vector<BenchColumn> columns)
    : bench_(std::move(bench)),
      request_(request),
      columns_(std::move(columns)),
      threads_(ParseThreads(request.threads, DescribeMachine().n_processors)),
      backend_(MakeBackend(request.backend, 1)->name()),
      cache_bytes_(CacheBytes()),
      speeds_(MeasureMachine(threads_)) {
  for (const MachineSpeed& speed : speeds_) {
    std::fprintf(stderr, "%s", SpeedText(speed).c_str());
  }
}

const MachineSpeed& BenchReport::speed(int threads) const {
  return *std::find_if(speeds_.begin(), speeds_.end(),
                       [&](const MachineSpeed& speed) { return speed.threads == threads; });
}

void BenchReport::Add(BenchRow row) { rows_.push_back(std::move(row)); }

nlohmann::json BenchReport::Json() const {
  const MachineInfo machine = DescribeMachine();
  nlohmann::json json = {{"bench", bench_},
                         {"processor", machine.processor},
                         {"features", machine.features},
                         {"n_processors", machine.n_processors},
                         {"cache_bytes", cache_bytes_},
                         {"backend", backend_},
                         {"head_dim", request_.head_dim},
                         {"n_kv_heads", request_.n_kv_heads},
                         {"seconds_per_row", request_.seconds},
                         {"interrupted", Interrupted()},
                         {"machine", nlohmann::json::array()},
                         {"rows", nlohmann::json::array()}};
  for (const MachineSpeed& speed : speeds_) {
    json["machine"].push_back({{"threads", speed.threads},
                               {"read_gb_s", speed.read_gb_s},
                               {"fma_gflop_s", speed.fma_gflop_s}});
  }
  for (const BenchRow& row : rows_) {
    const double s = row.timing.median_s;
    nlohmann::json one = {{"name", row.name},
                          {"threads", row.threads},
                          {"n_tokens", row.shape.n_tokens},
                          {"group", row.shape.heads.group()},
                          {"median_ms", s * 1e3},
                          {"min_ms", row.timing.min_s * 1e3},
                          {"calls", row.timing.calls},
                          {"layers", row.layers},
                          {"working_set_bytes", row.working_set}};
    if (row.bytes > 0) {
      one["bytes"] = row.bytes;
      one["gb_s"] = row.bytes / s / 1e9;
      one["read_share"] = row.bytes / s / 1e9 / speed(row.threads).read_gb_s;
    }
    if (row.operations > 0) {
      one["gflop_s"] = row.operations / s / 1e9;
      one["fma_share"] = row.operations / s / 1e9 / speed(row.threads).fma_gflop_s;
    }
    if (row.baseline_s > 0) one["ratio"] = row.baseline_s / s;
    one.update(row.more);
    json["rows"].push_back(std::move(one));
  }
  return json;
}

std::string BenchReport::TableText() const {
  std::vector<std::string> header = {"read", "tokens", "group", "threads", "ms", "min ms"};
  const auto any = [&](double BenchRow::*field) {
    return std::any_of(rows_.begin(), rows_.end(),
                       [&](const BenchRow& row) { return row.*field > 0; });
  };
  const bool bytes = any(&BenchRow::bytes);
  const bool operations = any(&BenchRow::operations);
  if (bytes) header.insert(header.end(), {"GB/s", "of read bw"});
  if (operations) header.insert(header.end(), {"GFLOP/s", "of FMA peak"});
  for (const BenchColumn& column : columns_) header.push_back(column.header);
  header.emplace_back("ratio");
  Table table(std::move(header));
  const nlohmann::json json = Json();
  for (const nlohmann::json& row : json["rows"]) {
    const auto number = [&](const char* field, int decimals) {
      return row.contains(field) ? Fixed(row[field].get<double>(), decimals) : std::string("-");
    };
    const auto share = [&](const char* field) {
      return row.contains(field) ? Fixed(row[field].get<double>() * 100, 0) + " %" : "-";
    };
    std::vector<std::string> cells = {row["name"].get<std::string>(),
                                      Grouped(row["n_tokens"].get<std::int64_t>()),
                                      number("group", 0),
                                      number("threads", 0),
                                      number("median_ms", 3),
                                      number("min_ms", 3)};
    if (bytes) cells.insert(cells.end(), {number("gb_s", 2), share("read_share")});
    if (operations) cells.insert(cells.end(), {number("gflop_s", 1), share("fma_share")});
    for (const BenchColumn& column : columns_) {
      cells.push_back(number(column.field.c_str(), column.decimals));
    }
    cells.push_back(row.contains("ratio") ? number("ratio", 2) + "x" : "-");
    table.Add(std::move(cells));
  }
  return table.ToString();
}

void BenchReport::Print(const std::string& note) const {
  if (request_.json) {
    WriteOut(JsonText(Json()));
    return;
  }
  std::string text = TableText();
  text += std::to_string(request_.n_kv_heads) + " KV heads of " +
          std::to_string(request_.head_dim) + " channels, " + backend_ +
          ", median of calls; caches " + ByteText(static_cast<double>(cache_bytes_)) + "\n";
  for (const MachineSpeed& speed : speeds_) {
    text += SpeedText(speed);
  }
  WriteOut(text + note + "\n");
}

int RunBench(const std::string& bench, const BenchRequest& request,
             std::vector<BenchColumn> columns, const std::string& note,
             const std::function<void(const BenchCase&, BenchReport*)>& measure) {
  CheckShape(request);
  BenchReport report(bench, request, std::move(columns));
  try {
    for (const std::string& text : request.tokens) {
      for (const std::int32_t group : request.groups) {
        const BenchCase shape = {
            ParseTokens(text), {request.n_kv_heads * group, request.n_kv_heads, request.head_dim}};
        std::fprintf(stderr, "%s at %s tokens, group %d\n", bench.c_str(),
                     Grouped(shape.n_tokens).c_str(), group);
        measure(shape, &report);
      }
    }
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kCancelled) {
      if (!report.empty()) report.Print(note);
      throw;
    }
    std::fprintf(stderr, "fathom: %s\n", error.what());
  }
  report.Print(note);
  return Interrupted() ? kExitInterrupted : kExitOk;
}

double CheckMemory(double held_bytes) {
  const double room = static_cast<double>(DescribeMachine().available_bytes) / 2;
  if (held_bytes <= room) return room;
  throw Error(ErrorCode::kNoMemory, "a layer of this shape needs " + ByteText(held_bytes) +
                                        ", half of the available memory is " + ByteText(room) +
                                        "; choose fewer --tokens or --kv-heads");
}

std::int64_t LayersFor(const BenchRequest& request, double read_bytes, double held_bytes) {
  const auto fit = static_cast<std::int64_t>(CheckMemory(held_bytes) / held_bytes);
  const double wanted =
      request.layers > 0 ? static_cast<double>(request.layers)
                         : std::ceil(kCacheFactor * static_cast<double>(CacheBytes()) / read_bytes);
  const auto n_layers = static_cast<std::int64_t>(std::clamp(wanted, 1.0, kMostLayers));
  if (n_layers > fit) {
    std::fprintf(stderr, "  memory holds %s of the %s layers wanted\n", Grouped(fit).c_str(),
                 Grouped(n_layers).c_str());
  }
  return std::min(n_layers, fit);
}

CallInputs InputsOf(std::int64_t call, std::int64_t n_layers, std::int64_t n_sets) {
  const std::int64_t layer = call % n_layers;
  return {static_cast<std::int32_t>(layer), (call / n_layers + layer) % n_sets};
}

}  // namespace fathom::cli
