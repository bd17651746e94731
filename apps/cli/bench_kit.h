// SPDX-License-Identifier: MIT
// What `fathom bench scan|select|attend|prefill` share: options, timing in turns, and a report
// whose ratios and shares come from one run.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "bench_machine.h"
#include "command_line.h"
#include "fathom/types.h"

namespace fathom::cli {

struct BenchRequest {
  std::vector<std::string> tokens = {"32k", "128k"};
  std::vector<std::int32_t> groups = {4};
  std::int32_t n_kv_heads = 8;
  std::int32_t head_dim = 128;
  std::vector<std::string> threads = {"all"};
  std::string backend = "cpu";
  double seconds = 1;       // timed per row
  std::int64_t layers = 0;  // copies to go round; 0 takes what the caches ask for
  bool json = false;
};

// Defaults are the request's own.
void AddBenchOptions(Command command, BenchRequest* request);

// -k: tokens attended per query head, the always kept ones included.
void AddKOption(Command command, std::int64_t* k);

// Counts of "1,2,4", ascending; "all" is the powers of two below n_processors and n_processors.
// Throws Error(kUsage).
std::vector<int> ParseThreads(const std::vector<std::string>& texts, int n_processors);

// One thing to time. Calls are numbered from 0 on, so that each can take other layers and queries
// than the one before.
struct Contender {
  std::string name;
  std::function<void(std::int64_t call)> run;
};

struct Timing {
  double median_s = 0;
  double min_s = 0;
  std::int64_t calls = 0;
};

// Times every contender for `seconds`, in three turns, so that a machine that grows slower does so
// for all; each turn begins with calls that do not count. Throws Error(kCancelled) on Ctrl-C.
std::vector<Timing> TimeInTurns(std::span<const Contender> contenders, double seconds);

// The least median, 0 of none.
double Fastest(std::span<const Timing> timings);

struct BenchCase {
  std::int64_t n_tokens = 0;
  HeadGeometry heads;
};

struct BenchRow {
  std::string name;
  BenchCase shape;
  int threads = 0;
  Timing timing;
  double bytes = 0;         // read from memory per call, by the closed form; 0: not counted
  double operations = 0;    // of floating point per call; 0: not counted
  double baseline_s = 0;    // median of the row that the ratio compares with; 0: none
  std::int64_t layers = 1;  // copies that calls went round
  double working_set = 0;   // bytes read before a call reads the same again
  nlohmann::json more = nlohmann::json::object();  // what only this command has
};

// How a field of BenchRow::more appears in the table.
struct BenchColumn {
  std::string field;
  std::string header;
  int decimals = 0;
};

class BenchReport {
 public:
  BenchReport(std::string bench, const BenchRequest& request, std::vector<BenchColumn> columns);

  const std::vector<int>& threads() const { return threads_; }
  const MachineSpeed& speed(int threads) const;
  bool empty() const { return rows_.empty(); }
  void Add(BenchRow row);
  void Print(const std::string& note) const;

 private:
  nlohmann::json Json() const;
  std::string TableText() const;

  std::string bench_;
  BenchRequest request_;
  std::vector<BenchColumn> columns_;
  std::vector<int> threads_;
  std::string backend_;  // its full name
  std::int64_t cache_bytes_;
  std::vector<MachineSpeed> speeds_;
  std::vector<BenchRow> rows_;
};

// Runs `measure` for every combination of tokens and groups and prints the report, also what there
// is of an interrupted or failed run. Returns the exit code. Throws Error(kUsage) for shapes that
// no kernel takes, before anything is measured. note: a line below the table.
int RunBench(const std::string& bench, const BenchRequest& request,
             std::vector<BenchColumn> columns, const std::string& note,
             const std::function<void(const BenchCase&, BenchReport*)>& measure);

// Half of the available memory in bytes. Throws Error(kNoMemory) when that does not hold
// held_bytes.
double CheckMemory(double held_bytes);

// How many copies calls go round: so many that what they read exceeds the caches four times, but no
// more than half of the available memory holds. read_bytes: of a call;
// held_bytes: of a copy. Says so on standard error when memory is the limit. Throws
// Error(kNoMemory) when not even one fits.
std::int64_t LayersFor(const BenchRequest& request, double read_bytes, double held_bytes);

// Which layer and set of queries a call takes: every call another pair than the n_layers * n_sets
// before it.
struct CallInputs {
  std::int32_t layer;
  std::int64_t set;
};
CallInputs InputsOf(std::int64_t call, std::int64_t n_layers, std::int64_t n_sets);

}  // namespace fathom::cli
