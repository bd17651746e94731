// SPDX-License-Identifier: MIT
// Pack: the kernels do the work per key; what is left per channel is done here, in baseline code.
#include <cassert>
#include <cmath>

#include "backend/cpu/cpu_backend.h"
#include "base/half.h"
#include "store/layout.h"

namespace fathom {
namespace {

int MeanCode(float sum, float step, int limit) {
  const float code = std::rint(sum / 64.0f / step);
  if (!(code >= static_cast<float>(-limit))) return -limit;  // NaN too
  return code > static_cast<float>(limit) ? limit : static_cast<int>(code);
}

void StoreMean(const PackArgs& a, int channel, int code) {
  const std::size_t row = layout::SideRowBytes(a.codec, a.mean_bits, a.segment_blocks);
  std::uint8_t* means = a.side + row * static_cast<std::size_t>(channel);
  if (a.mean_bits == 8) {
    means[a.block] = static_cast<std::uint8_t>(code);
  } else {
    means[a.block / 2] = layout::PackNibble(means[a.block / 2], a.block, code);
  }
}

// What is subtracted from the keys, and the width of a cell.
void PrepareMean(const PackArgs& a, const cpu::KernelTable& k, float* offset, float* cell) {
  k.pack_sums(a.x, a.head_dim, offset);
  const int limit = layout::MeanLimit(a.mean_bits);
  for (int j = 0; j < a.head_dim; ++j) {
    const int code = MeanCode(offset[j], a.mean_step[j], limit);
    StoreMean(a, j, code);
    offset[j] = static_cast<float>(code) * a.mean_step[j];
    cell[j] = a.range[j] / 8.0f;
  }
}

void PreparePaper(const PackArgs& a, const cpu::KernelTable& k, float* offset, float* cell) {
  k.pack_maxima(a.x, a.head_dim, cell);
  auto* scales = reinterpret_cast<Half*>(a.side);
  for (int j = 0; j < a.head_dim; ++j) {
    const Half scale = FloatToHalf(cell[j]);
    scales[static_cast<std::size_t>(j) * static_cast<std::size_t>(a.segment_blocks) +
           static_cast<std::size_t>(a.block)] = scale;
    cell[j] = HalfToFloat(scale) / 8.0f;
    offset[j] = 0;
  }
}

}  // namespace

void CpuBackend::Pack(const PackArgs& a) const {
  assert(a.head_dim > 0 && a.head_dim <= kMaxHeadDim && a.head_dim % 16 == 0);
  assert(a.block >= 0 && a.block < a.segment_blocks && a.segment_blocks % 2 == 0);
  float offset[kMaxHeadDim];
  float cell[kMaxHeadDim];
  if (a.codec == Codec::kMean) {
    PrepareMean(a, *kernels_, offset, cell);
  } else {
    PreparePaper(a, *kernels_, offset, cell);
  }
  const cpu::PackCodesArgs codes = {
      a.x, offset, cell, a.planes, a.head_dim, RowBlocks(a, a.segment_blocks), a.block};
  kernels_->pack_codes(&codes);
}

}  // namespace fathom
