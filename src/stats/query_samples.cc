// SPDX-License-Identifier: MIT
#include <algorithm>
#include <cassert>
#include <cstddef>

#include "fathom/stats.h"
#include "memory/state_stream.h"

namespace fathom {

QuerySamples::QuerySamples(std::int32_t n_heads, std::int32_t head_dim)
    : n_heads_(n_heads), head_dim_(head_dim) {
  assert(n_heads > 0 && head_dim > 0);
}

void QuerySamples::Add(std::int64_t position, const float* q) {
  assert(sample_floats() > 0);
  assert(positions_.empty() || position > positions_.back());
  positions_.push_back(position);
  queries_.insert(queries_.end(), q, q + sample_floats());
}

void QuerySamples::KeepEverySecond() {
  const std::size_t kept = (positions_.size() + 1) / 2;
  const std::size_t width = sample_floats();
  for (std::size_t i = 1; i < kept; ++i) {
    positions_[i] = positions_[2 * i];
    std::copy_n(queries_.data() + 2 * i * width, width, queries_.data() + i * width);
  }
  positions_.resize(kept);
  queries_.resize(kept * width);
}

void QuerySamples::KeepLast(std::int64_t n) {
  assert(n >= 0);
  const std::int64_t dropped = std::max<std::int64_t>(size() - n, 0);
  positions_.erase(positions_.begin(), positions_.begin() + dropped);
  queries_.erase(queries_.begin(),
                 queries_.begin() + dropped * static_cast<std::int64_t>(sample_floats()));
}

void QuerySamples::DropFrom(std::int64_t position) {
  const auto end = std::ranges::lower_bound(positions_, position);
  positions_.erase(end, positions_.end());
  queries_.resize(positions_.size() * sample_floats());
}

void QuerySamples::Clear() {
  positions_.clear();
  queries_.clear();
}

std::vector<float> QuerySamples::OfGroup(std::int32_t kv_head, std::int32_t group,
                                         std::int64_t first) const {
  assert(kv_head >= 0 && group > 0 && (kv_head + 1) * group <= n_heads_);
  assert(first >= 0 && first <= size());
  const std::size_t row = static_cast<std::size_t>(head_dim_);
  const std::size_t width = static_cast<std::size_t>(group) * row;
  const std::size_t offset = static_cast<std::size_t>(kv_head) * width;
  std::vector<float> q(static_cast<std::size_t>(size() - first) * width);
  float* out = q.data();
  for (std::int64_t i = first; i < size(); ++i, out += width) {
    std::copy_n(query(i) + offset, width, out);
  }
  return q;
}

void QuerySamples::Save(StateWriter* out) const {
  out->Put(n_heads_);
  out->Put(head_dim_);
  out->PutAll(positions_);
  out->PutAll(queries_);
}

void QuerySamples::Load(StateReader* in) {
  in->GetIn(n_heads_, n_heads_);
  in->GetIn(head_dim_, head_dim_);
  positions_ = in->GetAll<std::int64_t>();
  if (!std::ranges::is_sorted(positions_)) in->Fail("positions of queries are not ascending");
  queries_ = in->GetAll<float>(positions_.size() * sample_floats());
}

}  // namespace fathom
