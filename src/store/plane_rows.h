// SPDX-License-Identifier: MIT
// Planes of a segment that lies between others, brought together.
#pragma once

#include <algorithm>
#include <cstdint>

#include "fathom/backend.h"
#include "fathom/store.h"

namespace fathom {

// Copies blocks first .. end - 1 of the planes of a segment to the same place in one that lies by
// itself, [D][4][segment_blocks]; other words of `to` stay.
inline void CopyPlanes(const SegmentView& from, const IndexShape& shape, std::int64_t first,
                       std::int64_t end, std::uint64_t* to) {
  const std::int64_t n_rows = std::int64_t{shape.head_dim} * kPlanes;
  const std::int64_t row = shape.segment_blocks, from_row = RowBlocks(from, shape.segment_blocks);
  if (first == 0 && end == row && from_row == row) {
    std::copy_n(from.planes, n_rows * row, to);
    return;
  }
  for (std::int64_t r = 0; r < n_rows; ++r) {
    std::copy_n(from.planes + r * from_row + first, end - first, to + r * row + first);
  }
}

}  // namespace fathom
