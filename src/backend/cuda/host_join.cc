// SPDX-License-Identifier: MIT
#include "backend/cuda/host_join.h"

#include <algorithm>
#include <vector>

#include "backend/cuda/host_copy.h"
#include "backend/cuda/select.h"

namespace fathom::cuda {

HostSelection::HostSelection(const Lengths& lengths, std::int32_t group, std::int32_t n_heads,
                             cudaStream_t stream)
    : lengths_(lengths),
      group_(group),
      n_lists_(n_heads * group),
      stream_(stream),
      device_lengths_(1),
      winners_(static_cast<std::size_t>(n_lists_) * static_cast<std::size_t>(lengths.keep)),
      kth_key_(static_cast<std::size_t>(n_lists_)),
      cut_(static_cast<std::size_t>(n_lists_)) {
  CopyToDevice(device_lengths_.data(), &lengths_, 1, stream_);
}

void HostSelection::Select(const float* scores, std::int64_t stride) {
  const SelectScores select = {.scores = scores,
                               .stride = stride,
                               .group = group_,
                               .n_kv_heads = n_lists_ / group_,
                               .n_lists = n_lists_,
                               .lengths = device_lengths_.data(),
                               .max_keep = lengths_.keep,
                               .winners = winners_.data(),
                               .kth_key = kth_key_.data(),
                               .cut = cut_.data(),
                               .redo = nullptr};
  cuda::Select(select, stream_);
}

void HostSelection::Join(std::span<const HostAttended> out) {
  const std::size_t n_heads = out.size();
  const std::int64_t max_tokens = (std::int64_t{lengths_.n_tokens} + 127) / 128 * 128;
  const std::int64_t won =
      std::min(std::int64_t{group_} * lengths_.keep, std::int64_t{lengths_.last} - lengths_.first);
  const std::int64_t capacity =
      std::int64_t{lengths_.first} + lengths_.n_tokens - lengths_.last + won;
  const auto size = static_cast<std::size_t>(capacity);
  const auto bitmap =
      Zeros<std::uint32_t>(n_heads * static_cast<std::size_t>(max_tokens / 32), stream_);
  const auto masks = Zeros<std::uint16_t>(n_heads * static_cast<std::size_t>(max_tokens), stream_);
  const DeviceBuffer<std::int32_t> tokens(n_heads * size);
  const DeviceBuffer<std::uint16_t> mask(n_heads * size);
  const DeviceBuffer<std::int32_t> count(n_heads);
  const JoinWinners join = {
      .winners = winners_.data(),
      .max_keep = lengths_.keep,
      .expand = 1,
      .group = group_,
      .n_kv_heads = n_lists_ / group_,
      .n_lists = n_lists_,
      .lengths = device_lengths_.data(),
      .bitmap = bitmap.data(),
      .masks = masks.data(),
      .words_per_head = max_tokens / 32,
      .max_tokens = max_tokens,
      .out = {tokens.data(), mask.data(), count.data(), static_cast<std::int32_t>(capacity)}};
  cuda::Join(join, stream_);
  const auto counts = ToHost(count.data(), n_heads, stream_);
  const auto all_tokens = ToHost(tokens.data(), n_heads * size, stream_);
  const auto all_masks = ToHost(mask.data(), n_heads * size, stream_);
  for (std::size_t h = 0; h < n_heads; ++h) {
    *out[h].n_attended = counts[h];
    std::copy_n(all_tokens.data() + h * size, counts[h], out[h].tokens);
    std::copy_n(all_masks.data() + h * size, counts[h], out[h].mask);
  }
}

}  // namespace fathom::cuda
