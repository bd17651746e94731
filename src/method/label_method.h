// SPDX-License-Identifier: MIT
// Labels: a few coordinates of every key, the same for all queries, in a table of their own. The
// authors' systems of Double Sparsity (raw channels, fp16 or 4 bits per token) and Loki (principal
// components, fp16).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "fathom/calibration.h"
#include "method/table_method.h"

namespace fathom {

enum class LabelCode {
  kHalf,
  // Asymmetric in 15 steps between the least and the largest label of a vector, one scale and one
  // minimum in fp16 per vector; key and query labels both.
  kFourBit,
};

// Label channels of one KV head, ascending: one list, or one per query head of the group.
// n_tokens: tokens that the statistics may look at.
struct LabelRequest {
  const MethodContext& context;
  std::int32_t layer;
  std::int32_t kv_head;
  std::int64_t n_tokens;
  const HeadStats& stats;
};
using LabelChannelsFn =
    std::function<std::vector<std::vector<std::int32_t>>(const LabelRequest& request)>;

struct LabelConfig {
  SparseConfig sparse;
  BasisRule basis = BasisRule::kRaw;
  bool abs_stats = false;
  std::int32_t n_channels = 32;  // at most D; what `channels` lists
  LabelCode code = LabelCode::kHalf;
  bool per_query_head = false;  // labels of their own for every query head
  // False where the labels take the place of the key itself (Loki keeps the rotated key alone):
  // then they cost the author's system nothing.
  bool stored_beside_key = true;
  LabelChannelsFn channels;
};

// Replaces x [n] by what the 4-bit code keeps of it. A range of zero counts as scale 1. NaN becomes
// the minimum.
void QuantizeLabels(float* x, std::size_t n);

std::unique_ptr<Method> MakeLabelMethod(const MethodContext& context, LabelConfig config,
                                        const std::string& spec);

// Closed form of one KV head. n_channels is cut to D.
std::int64_t LabelBytes(const LabelConfig& config, HeadGeometry geometry, std::int64_t n_tokens);

}  // namespace fathom
