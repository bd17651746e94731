// SPDX-License-Identifier: MIT
#include "fathom/calibration.h"

#include <string>

#include "fathom/error.h"

namespace fathom {
namespace {

std::string ShapeText(std::int32_t n_layers, const HeadGeometry& heads) {
  return std::to_string(n_layers) + " layers, " + std::to_string(heads.n_heads) + " heads, " +
         std::to_string(heads.n_kv_heads) + " KV heads of dimension " +
         std::to_string(heads.head_dim);
}

}  // namespace

void Calibration::Check(std::int32_t layers, HeadGeometry geometry) const {
  if (layers == n_layers && geometry == heads) return;
  throw Error(ErrorCode::kUsage, "the statistics are of a model with " +
                                     ShapeText(n_layers, heads) + ", and this one has " +
                                     ShapeText(layers, geometry) +
                                     "; calibrate on this model (fathom calibrate)");
}

}  // namespace fathom
