// SPDX-License-Identifier: MIT
// What methods share that read whole channels: the choice of the largest channels, and methods over
// the common 4-bit store whose depths are fixed when the index is made (Double Sparsity, Loki,
// thumbnail, all planes).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "method/plane_method.h"

namespace fathom {

// The n channels of largest weight, ascending by channel. Of equal weights the smaller channel
// wins; NaN counts less than every number. Takes all channels where there are no more than n.
void TopChannels(std::span<const double> weight, std::int32_t n,
                 std::vector<std::int32_t>* channels);

// The part of the common store that a method's own system keeps: so many channels, so many planes
// of each, and the scales of these channels. The process holds the whole store, which serves every
// query; MemoryBytes counts the part, so that methods are compared by what they need.
struct StoredPart {
  std::int32_t channels = 0;
  std::int32_t planes = kPlanes;
};
// Bytes for one KV head, whole segments. (4 * 8 bytes of planes and 2 of scale) / 64 per token and
// channel: 17 bytes per token for 32 channels, 68 for all 128.
std::int64_t StoredPartBytes(StoredPart part, std::int64_t n_blocks);

// Closed form of one KV head, block means of the values included.
std::int64_t PlaneIndexBytes(const SparseConfig& config, StoredPart part, HeadGeometry geometry,
                             std::int64_t n_tokens);

// read->noise from read->q and read->depth: the published assumption that t planes leave an error
// of variance Var_j * 4^-t in channel j.
void SetNoise(const HeadStats& stats, HeadRead* read);

// Planes to read of every channel [D], from the statistics of one KV head.
using DepthFn = std::function<std::vector<std::uint8_t>(const HeadStats& stats)>;

struct FixedPlanesConfig {
  SparseConfig sparse;
  BasisRule basis = BasisRule::kRaw;
  bool abs_stats = false;  // `depth` looks at abs_key and abs_query
  StoredPart stored;
  DepthFn depth;
};

// A method that reads the same planes of a KV head for every query.
std::unique_ptr<Method> MakeFixedPlanes(const MethodContext& context, FixedPlanesConfig config,
                                        const std::string& spec);

// Depth 4 for the listed channels, 0 for the others.
std::vector<std::uint8_t> WholeChannels(std::span<const std::int32_t> channels, std::size_t dim);

}  // namespace fathom
