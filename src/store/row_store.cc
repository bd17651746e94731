// SPDX-License-Identifier: MIT
#include <cassert>
#include <cstddef>
#include <limits>
#include <string>

#include "base/half.h"
#include "fathom/error.h"
#include "fathom/store.h"
#include "memory/reservation.h"

namespace fathom {
namespace {

void CheckGeometry(std::int32_t n_layers, const HeadGeometry& g, std::int64_t capacity) {
  const auto fail = [](const std::string& what) { throw Error(ErrorCode::kUsage, what); };
  if (n_layers <= 0) fail("n_layers is " + std::to_string(n_layers) + "; it must be at least 1");
  if (g.n_kv_heads <= 0 || g.n_heads <= 0 || g.n_heads % g.n_kv_heads != 0) {
    fail("n_heads is " + std::to_string(g.n_heads) + " and n_kv_heads " +
         std::to_string(g.n_kv_heads) + "; the first must be a positive multiple of the second");
  }
  if (g.group() > kMaxGroup) {
    fail(std::to_string(g.group()) + " query heads per KV head; at most " +
         std::to_string(kMaxGroup) + " are supported");
  }
  if (g.head_dim <= 0 || g.head_dim > kMaxHeadDim || g.head_dim % 16 != 0) {
    fail("head_dim is " + std::to_string(g.head_dim) + "; it must be a multiple of 16 up to " +
         std::to_string(kMaxHeadDim));
  }
  if (capacity <= 0) {
    fail("the capacity is " + std::to_string(capacity) + " tokens; it must be at least 1");
  }
}

// Halves of one token of one KV head: its key and its value.
std::int64_t RowHalves(const HeadGeometry& g) { return 2 * std::int64_t{g.head_dim}; }

// Throws when the sum does not even fit a 64-bit number.
std::int64_t CheckedBytes(std::int32_t n_layers, const HeadGeometry& g, std::int64_t capacity) {
  const std::int64_t per_token = RowStore::Bytes(n_layers, g, 1);
  if (capacity > std::numeric_limits<std::int64_t>::max() / per_token) {
    throw Error(ErrorCode::kNoMemory, "rows of " + std::to_string(capacity) + " tokens at " +
                                          std::to_string(per_token) +
                                          " bytes each exceed any memory; use a shorter context");
  }
  return per_token * capacity;
}

// Huge pages waste up to 2 MiB per KV head while a session is short; worth it where a full head is
// many times that.
bool WantsHugePages(const HeadGeometry& g, std::int64_t capacity) {
  constexpr std::int64_t kFromBytesPerHead = std::int64_t{16} << 20;
  return capacity >= kFromBytesPerHead / (RowHalves(g) * std::int64_t{sizeof(Half)});
}

}  // namespace

RowStore::RowStore(std::int32_t n_layers, HeadGeometry geometry, std::int64_t capacity)
    : n_layers_(n_layers), geometry_(geometry), capacity_(capacity), stride_(capacity) {
  CheckGeometry(n_layers, geometry, capacity);
  CheckedBytes(n_layers, geometry, capacity);
  // 64 rows are a multiple of 4 KiB, so that blocks can be mapped from files.
  stride_ = WholeBlocks(capacity);
  const auto bytes = static_cast<std::size_t>(CheckedBytes(n_layers, geometry, stride_));
  memory_ = std::make_unique<Reservation>(bytes, WantsHugePages(geometry, capacity));
}

RowStore::~RowStore() = default;

void RowStore::Write(std::int32_t layer, std::int64_t first, std::int64_t n, const float* k,
                     const float* v) {
  assert(layer >= 0 && layer < n_layers_);
  assert(first >= 0 && n >= 0 && first + n <= capacity_);
  const std::int64_t dim = geometry_.head_dim;
  const std::int64_t n_kv = geometry_.n_kv_heads;
  for (std::int32_t h = 0; h < n_kv; ++h) {
    Half* row = head(layer, h) + first * RowHalves(geometry_);
    for (std::int64_t i = 0; i < n; ++i, row += 2 * dim) {
      ConvertFloatToHalf(k + (i * n_kv + h) * dim, dim, row);
      ConvertFloatToHalf(v + (i * n_kv + h) * dim, dim, row + dim);
    }
  }
}

void RowStore::Map(std::int64_t first, std::int64_t n, std::int64_t stride, int file,
                   std::int64_t offset) {
  assert(first >= 0 && n >= 0 && n <= stride);
  assert(first % kBlockTokens == 0 && stride % kBlockTokens == 0);
  if (first + n > capacity_) {
    throw Error(ErrorCode::kUsage, std::to_string(first + n) + " tokens do not fit a store of " +
                                       std::to_string(capacity_));
  }
  const std::int64_t row = RowHalves(geometry_) * static_cast<std::int64_t>(sizeof(Half));
  const std::int64_t bytes = WholeBlocks(n) * row;
  for (std::int32_t layer = 0; layer < n_layers_; ++layer) {
    for (std::int32_t h = 0; h < geometry_.n_kv_heads; ++h, offset += stride * row) {
      if (bytes == 0) continue;
      memory_->MapFile(reinterpret_cast<std::byte*>(head(layer, h) + first * RowHalves(geometry_)),
                       static_cast<std::size_t>(bytes), file, offset);
    }
  }
}

Half* RowStore::head(std::int32_t layer, std::int32_t kv_head) const {
  const std::int64_t index = std::int64_t{layer} * geometry_.n_kv_heads + kv_head;
  return reinterpret_cast<Half*>(memory_->data()) + index * stride_ * RowHalves(geometry_);
}

const Half* RowStore::rows(std::int32_t layer, std::int32_t kv_head) const {
  assert(layer >= 0 && layer < n_layers_ && kv_head >= 0 && kv_head < geometry_.n_kv_heads);
  return head(layer, kv_head);
}

Half* RowStore::rows(std::int32_t layer, std::int32_t kv_head) {
  assert(layer >= 0 && layer < n_layers_ && kv_head >= 0 && kv_head < geometry_.n_kv_heads);
  return head(layer, kv_head);
}

std::int64_t RowStore::Bytes(std::int32_t n_layers, HeadGeometry geometry, std::int64_t n_tokens) {
  return std::int64_t{n_layers} * geometry.n_kv_heads * n_tokens * RowHalves(geometry) *
         std::int64_t{sizeof(Half)};
}

}  // namespace fathom
