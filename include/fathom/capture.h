// SPDX-License-Identifier: MIT
// Captures: queries, keys and values of a real model at one context, saved for study.
//
// A capture is a safetensors file (docs/format.md) of post-RoPE keys and values of all tokens, the
// queries of the last positions (to measure a method with) and queries sampled from earlier
// positions (for the statistics that a method may use). Other stacks can write the same layout.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fathom/model.h"
#include "fathom/session.h"
#include "fathom/types.h"

namespace fathom {

// What a capture holds and where it came from. Texts are empty and flags unset where the file does
// not say.
struct CaptureGeometry {
  std::int64_t n_tokens = 0;
  HeadGeometry heads;
  std::vector<std::int32_t> layers;  // of the model, ascending
  // Positions of the queries, ascending and smaller than n_tokens: P that measure, and S for
  // statistics, each smaller than any of the P.
  std::vector<std::int64_t> q_positions;
  std::vector<std::int64_t> stats_positions;

  std::string model;         // name of the model
  std::string architecture;  // "qwen3"
  std::string rope;          // ModelInfo::rope
  std::string text;          // name of the text
  std::optional<bool> has_qk_norm;
  std::optional<bool> has_qkv_bias;
};

// Stored element type. bf16 halves the file at 8 bits of precision.
enum class CaptureType : std::uint8_t { kF32, kBf16 };

// A capture opened for reading. The file is mapped and must not change meanwhile. Const methods are
// safe to call from several threads.
class CaptureFile {
 public:
  // Checks every shape, type and position, not the values. Positions and metadata may be missing:
  // then q is of the last P positions and q_stats is spread evenly over [16, n_tokens - P), or from
  // 0 where that is too short. Throws Error: kIo (missing, unreadable), kCorrupt (not a
  // safetensors file, or not a capture; names layer and tensor), kUnsupported (a later version).
  explicit CaptureFile(const std::string& path);
  ~CaptureFile();
  CaptureFile(CaptureFile&&) noexcept;
  CaptureFile& operator=(CaptureFile&&) noexcept;

  const CaptureGeometry& geometry() const;
  const std::string& path() const;
  std::int64_t file_bytes() const;
  // Whether the file itself says which positions its queries have; else they are assumed as above.
  bool positions_known() const;

  // All of these throw Error(kUsage) for a layer that the capture does not hold, or tokens out of
  // range, and Error(kCorrupt) naming layer, tensor, head and position of a value that is NaN or
  // inf or, in k and v, larger than the 65,504 that fp16 rows can hold.

  // Keys and values of tokens first .. first + n - 1, each [n][n_kv_heads][D].
  void LoadRows(std::int32_t layer, std::int64_t first, std::int64_t n, float* k, float* v) const;
  // Queries at q_positions, [P][n_heads][D].
  std::vector<float> LoadQueries(std::int32_t layer) const;
  // Queries at stats_positions, [S][n_heads][D].
  std::vector<float> LoadStatsQueries(std::int32_t layer) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Writes a capture piece by piece, in memory that does not grow with n_tokens. The file has its
// name only after Commit; without it the destructor removes what was written (PATH.partial). Not
// thread-safe.
class CaptureWriter {
 public:
  // Takes the disk space at once. Throws Error(kUsage) for a geometry that no capture can have,
  // Error(kIo) (no permission; no room: how much is needed and free).
  CaptureWriter(const std::string& path, const CaptureGeometry& geometry, CaptureType type);
  ~CaptureWriter();
  CaptureWriter(CaptureWriter&&) noexcept;
  CaptureWriter& operator=(CaptureWriter&&) noexcept;

  // Tokens first .. first + n - 1 of a layer: q [n][n_heads][D], k and v [n][n_kv_heads][D]. Keeps
  // k and v, and q where a position is asked for; ignores layers that are not captured. Every token
  // of every captured layer must be written once, in any order. Throws Error(kIo), and
  // Error(kCorrupt) for a value that the file cannot hold: NaN, inf, or too large.
  void Write(std::int32_t layer, std::int64_t first, std::int64_t n, const float* q, const float* k,
             const float* v);
  // Makes the file durable and gives it its name, replacing what has it.
  void Commit();

  std::int64_t file_bytes() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct CaptureOptions {
  std::string path;              // file to write
  bool overwrite = false;        // replace an existing file
  std::int64_t positions = 128;  // P: queries of the last P positions
  // Queries for statistics: every such position from 16 on, none of the last P. 0 takes n / 512
  // rounded, at least 1.
  std::int64_t stats_every = 0;
  std::vector<std::int32_t> layers;  // any order; empty: all
  std::optional<CaptureType> type;   // unset: f32 for models with q/k/v biases, else bf16
  std::string text;                  // name of the text, for the record
  std::string backend = "cpu";       // MakeBackend name
  int n_threads = 0;                 // 0: all processors this process may use
  std::int32_t chunk = 512;          // tokens per prefill chunk
};

struct CaptureReport {
  CaptureGeometry geometry;
  CaptureType type = CaptureType::kF32;
  std::string type_reason;  // "no q/k/v biases", for people
  std::int64_t stats_every = 0;
  std::int64_t file_bytes = 0;
  double seconds = 0;   // wall time of prefill and writing
  std::string backend;  // that ran
  int n_threads = 0;
};

// Prefills the tokens densely and writes the capture. Throws Error: kUsage (options out of range,
// the file exists), kIo, kNoMemory (the session's rows do not fit), kCancelled (progress returned
// false), kCorrupt (the model computed values that no capture can hold). After an error there is no
// new file.
CaptureReport RunCapture(const std::shared_ptr<const Model>& model, std::span<const Token> tokens,
                         const CaptureOptions& options, const ProgressFn& progress = {});

}  // namespace fathom
