// SPDX-License-Identifier: MIT
// Statistics of one KV head from which methods choose channels and bases: measured on the session's
// rows and prefill queries, or read from a calibration file.
#pragma once

#include <cstdint>

#include "fathom/calibration.h"
#include "fathom/method.h"

namespace fathom {

// Statistics of one KV head over the first n_tokens tokens. abs: also the two means of absolute
// values, which only few methods need. Throws Error(kUsage) where a basis cannot be made of the
// keys.
HeadStats MeasureHead(const MethodContext& context, std::int32_t layer, std::int32_t kv_head,
                      std::int64_t n_tokens, BasisRule rule, bool abs);

// True when statistics of `seen` tokens are too old for a session of n_tokens that stands at the end
// of a prefill: a quarter longer.
inline bool Outgrown(std::int64_t seen, std::int64_t n_tokens) {
  return seen > 0 && n_tokens > seen + seen / 4;
}

// Moments of one KV head over the first n_tokens tokens, for a calibration.
HeadMoments MeasureMoments(const MethodContext& context, std::int32_t layer, std::int32_t kv_head,
                           std::int64_t n_tokens);

// Steps and decoders of the context's calibration for our own store, or null without one.
const MeanCodec* CalibratedCodec(const MethodContext& context, std::int32_t layer,
                                 std::int32_t kv_head, BasisRule rule, const IndexShape& shape);

}  // namespace fathom
