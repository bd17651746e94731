// SPDX-License-Identifier: MIT
// The FFD system ("faster flash decoding"): `thumbnail:rule=ffd`.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "method/sparse_method.h"

namespace fathom {

inline constexpr std::int32_t kFfdBlock = 128;  // tokens that share a scale and survive together

std::unique_ptr<Method> MakeFfd(const MethodContext& context, const SparseConfig& config,
                                BasisRule basis, const std::string& spec);

// Closed form of one KV head.
std::int64_t FfdBytes(const SparseConfig& config, HeadGeometry geometry, std::int64_t n_tokens);

// 2-bit code of a key channel: clip(round(k / scale + 1.5), 0, 3), halves to even; scale = the
// block's largest |k| / 1.5. NaN is code 0, a scale of 0 gives code 2.
int FfdCode(float k, float scale);

}  // namespace fathom
