// SPDX-License-Identifier: MIT
// Plans on the device: what every query of a step reads, without the host.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "backend/cuda/lists.h"
#include "backend/cuda/scan_mean.h"

namespace fathom::cuda {

// One multiplier for all heads (PlanAtMultiplier of fathom/plan.h) and the tables of its scan
// (BuildScanTable), in the same double precision and order of additions: the levels and integers
// are those of the host. Arrays are per head of the batch.
struct MeanPlan {
  std::int32_t n_heads, n_kv_heads, n_codecs, mean_bits;
  const float* q;             // [n_heads][group][D] in the index's basis
  const double* variance;     // [n_heads][D]
  const double* slope;        // [n_heads][kLevels - 1][D] gain per bit of every step, 0: none
  const std::uint8_t* level;  // [n_heads][kLevels - 1][D] level after the step
  const double* distortion;   // [n_heads][kLevels][D], for the scores' noise
  const float* center;        // [n_heads][D] what keys were centred by
  const float* mean_step;     // [n_heads][n_codecs][D]
  const float* weight;        // [n_heads][n_codecs][D][4][4] decoders
  const double* multiplier;   // [1]
  const Lengths* lengths;     // heads of dense sequences are left out
  MeanTables tables;          // out: table head * n_codecs + codec, prepared
  float* offset;              // [n_lists] out: q . center
  float* noise;               // [n_lists] out: variance of the scores' error
};
void PlanMean(const MeanPlan& plan, cudaStream_t stream);

// The published plan (PlanPaper).
struct PaperPlanArgs {
  std::int32_t n_heads, n_kv_heads, group, head_dim;
  const float* q;
  const double* variance;  // [n_heads][D]
  double budget;
  const Lengths* lengths;
  std::uint8_t* depth;  // [n_heads][D] out
  // Out: rows to gather, ascending: planes (channel * 4 + p) and channels.
  std::int16_t* planes;    // [n_heads][4D]
  std::int32_t* n_planes;  // [n_heads]
  std::int16_t* channels;  // [n_heads][D]
  std::int32_t* n_channels;
};
void PlanPaper(const PaperPlanArgs& plan, cudaStream_t stream);

// The r channels with the largest sum of |q| over the group (SparQ), ascending; among equals the
// smaller channel. r <= D.
struct ChannelPlan {
  std::int32_t n_heads, n_kv_heads, group, head_dim, r;
  const float* q;
  const Lengths* lengths;
  std::int16_t* channels;       // [n_heads][r] out: rows to gather ..
  std::int32_t* scan_channels;  // .. and the same as LabelScan takes them
  std::int32_t* n_channels;     // [n_heads] out: r
  float* chosen_q;              // [n_heads][group][r] out
  // Of TakeChannels, one at most: the queries' channels that the table's are, [n_heads][r], or the
  // map of queries to its basis, [n_heads][D][r]; null: the first r channels.
  const std::int32_t* fixed;
  const float* map;
};
void PlanChannels(const ChannelPlan& plan, cudaStream_t stream);
// All r channels of a table of fixed channels.
void TakeChannels(const ChannelPlan& plan, cudaStream_t stream);

}  // namespace fathom::cuda
