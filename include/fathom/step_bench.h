// SPDX-License-Identifier: MIT
// One decode step of a model on a CUDA device, timed: random weights of a real shape, synthetic
// keys or those of a capture, index in host memory or in HBM.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "fathom/types.h"

namespace fathom {

class CaptureFile;

// What a decode step of a model costs, without its numbers.
struct StepShape {
  std::string name;
  std::int32_t n_layers = 0;
  std::int32_t n_embd = 0;
  std::int32_t n_ff = 0;
  std::int32_t n_vocab = 0;
  HeadGeometry heads;
  bool has_qk_norm = false;
};

// qwen3-8b, llama-3.1-8b, qwen2.5-7b, and smoke: two small layers, to try whether all works.
std::vector<StepShape> KnownStepShapes();

// Where keys, values and queries of a step come from.
struct StepKeys {
  std::string file;   // name of the capture, without its folder; empty: synthetic keys
  std::string model;  // as the capture says, may be empty
  // m, whole blocks: token i has key and value of the capture's token i mod m. Sequences of a batch
  // begin at different blocks of it.
  std::int64_t n_tokens = 0;
};
// What a step of the shape takes of a capture. Throws Error(kUsage) for one that does not fit.
StepKeys DescribeStepKeys(const CaptureFile& capture, const StepShape& shape);

struct StepBenchOptions {
  StepShape shape;
  std::int64_t n_tokens = 0;  // context of every sequence
  int batch = 1;
  std::string method;              // spec, without k
  std::string placement = "host";  // of the index: "host" or "hbm"
  std::int64_t k = 512;            // rows attended per query head, always kept ones included
  std::int64_t steps = 30;         // timed, after those that warm up
  // No further step is timed after that long; three at least are.
  double seconds = 30;
  // The rows of token i are those of token i mod m (its planes are its own). 0: the context, halved
  // until the rows take no more than half of the host memory that the index leaves, and 16 GiB.
  // With a capture a multiple of its m, which folds nothing; 0 then takes the largest that fits so,
  // one m at least.
  std::int64_t fold_tokens = 0;
  std::string keys;  // path of a capture; empty: synthetic keys
  std::uint64_t seed = 1;
};

struct StepStage {
  std::string name;   // one of kStepStages
  double gpu_ms = 0;  // median per step, by events; over all layers
};

// dense: all that is not attention; gather: index over the link; rows: winners over the link; both
// with what runs beside them; select: with the union of winners; other: what is left of the step.
inline constexpr std::string_view kStepStages[] = {"dense",  "plan", "gather", "scan",
                                                   "select", "rows", "attend", "other"};

// Rates in 1e9 bytes per second. What a method does not have is 0.
struct StepBenchResult {
  std::string method;  // the spec
  std::string placement;
  std::string device;  // the machine's devices, of which the first is used
  std::int64_t n_tokens = 0;
  int batch = 0;
  std::int64_t steps = 0;         // timed
  double gpu_ms = 0;              // median per step, by events
  double wall_ms = 0;             // median per step, step after step, by the host's clock
  std::vector<StepStage> stages;  // in the order of kStepStages
  double link_bytes = 0;          // per step, over the link in both directions
  double hbm_bytes = 0;           // per step, read and written in HBM, by the closed form
  double scan_bytes = 0;          // per step, of the index that the scan reads
  double gather_gb_s = 0;         // of the index, while stage gather runs
  double rows_gb_s = 0;           // of rows, while stage rows runs
  double memcpy_gb_s = 0;         // pinned copy to the device, measured in the same run
  double hbm_copy_gb_s = 0;       // copy in HBM, read and written bytes, in the same run
  double non_transfer_share = 0;  // part of all stages that is neither gather nor rows
  double read_bits = 0;           // per token and KV head
  double winners_per_head = 0;    // rows fetched per KV head: the union over its group
  std::int64_t row_modulus = 0;   // m, or 0 where every token has its own row
  std::int64_t redone_lists = 0;  // lists of candidates made again, in one step
  bool pinned = false;            // host memory is registered with CUDA
  StepKeys keys;
  bool random_index = false;  // the index holds random codes: winners are not those of the keys
};

// Called between pieces of work: "registering host memory", "MiB", 512 of 4096. False asks to stop.
using StepBenchProgress = std::function<bool(std::string_view what, std::string_view unit,
                                             std::int64_t done, std::int64_t total)>;

// Throws Error(kUnsupported) in a build without CUDA, without a device, and for a method or
// placement that the device does not do; kNoMemory where host memory or HBM does not hold the
// combination; kUsage for options out of range, what CaptureFile and DescribeStepKeys throw of the
// keys; kCancelled when progress says so. All
// but an error that CUDA cannot recover from leave the process able to run the next one.
StepBenchResult RunStepBench(const StepBenchOptions& options,
                             const StepBenchProgress& progress = {});

}  // namespace fathom
