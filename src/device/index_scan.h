// SPDX-License-Identifier: MIT
// What a method is on the device: a scan of its index. Everything else of a step, from the limit
// of the candidates to the attention over the winners' rows, is the same for all
// (attention_step.h).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "backend/cuda/lists.h"

namespace fathom::cuda {

// Where a scan leaves the mass of what is no candidate; rest null: nowhere.
struct RestSink {
  float* rest = nullptr;  // [n_lists][stride], see MeanScan
  std::int64_t stride = 0;
  float exp_scale = 0;
};

// What one step reads of the index in a layer, over all heads.
struct ScanCost {
  double read_bits = 0;   // per token and KV head, by the one rule of docs/methods.md
  double link_bytes = 0;  // fetched from host memory
  double scan_bytes = 0;  // read by the scan itself
};

// One index of all layers and heads of a batch. Every function but Cost records work on the stream
// and waits for nothing. Scratch is shared by the layers: call Plan, Fetch and Scan of a layer
// before those of the next.
class IndexScan {
 public:
  virtual ~IndexScan() = default;

  // Decides what the queries [n_lists][D] read.
  virtual void Plan(std::int32_t layer, const float* q, cudaStream_t stream) = 0;
  // Brings it to the device, where the index is in host memory.
  virtual void Fetch(std::int32_t layer, cudaStream_t stream) = 0;
  // Scores: a sample, the candidates, or all scores of some heads, as the sink says.
  virtual void Scan(std::int32_t layer, const ScoreSink& sink, const RestSink& rest,
                    cudaStream_t stream) = 0;

  // Estimates q.k, so that what is not attended has a mass; offset and noise as LayerScores has
  // them (null: zeros).
  virtual bool has_rest() const { return false; }
  virtual const float* offset() const { return nullptr; }
  virtual const float* noise() const { return nullptr; }
  // Tokens that a score stands for: more than one for indexes of chunks. Lengths of the scan then
  // count chunks.
  virtual std::int32_t unit_tokens() const { return 1; }

  // ScoreSink::tile_step of a sample of an index with so many tiles, 5 or more.
  virtual std::int32_t sample_step(std::int32_t n_tiles) const;

  // Of the layer whose plan was made last. Waits for the stream.
  virtual ScanCost Cost(cudaStream_t stream) const = 0;
};

}  // namespace fathom::cuda
