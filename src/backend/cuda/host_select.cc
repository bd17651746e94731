// SPDX-License-Identifier: MIT
// Select and Mass of CudaBackend: scores to the device, results back.
#include <algorithm>
#include <cassert>
#include <limits>
#include <vector>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/host_copy.h"
#include "backend/cuda/host_join.h"
#include "backend/cuda/select.h"

namespace fathom {
namespace {

// Rows of n floats of the host, `stride` apart, to rows on the device, `to_stride` apart.
void CopyRows(float* to, std::int64_t to_stride, const float* from, std::int64_t stride,
              std::int64_t n, std::int64_t n_rows, cudaStream_t stream) {
  const auto bytes = [](std::int64_t floats) {
    return static_cast<std::size_t>(floats) * sizeof(float);
  };
  // The distance between rows counts for nothing when there is one; it must not be below n.
  cuda::Check(cudaMemcpy2DAsync(to, bytes(to_stride), from, bytes(std::max(stride, n)), bytes(n),
                                static_cast<std::size_t>(n_rows), cudaMemcpyHostToDevice, stream),
              "cudaMemcpy2DAsync to the device");
}

// Without winners the lists are what all attend.
void ListAlwaysKept(const SelectArgs& a) {
  const auto everyone = static_cast<std::uint16_t>((1u << a.group) - 1);
  for (const SelectHead& head : a.heads) {
    std::int64_t n = 0;
    for (std::int64_t i = 0; i < a.n_tokens; ++i) {
      if (i == a.first) i = a.last;
      if (i == a.n_tokens) break;
      head.tokens[n] = static_cast<std::int32_t>(i);
      head.mask[n++] = everyone;
    }
    *head.n_attended = n;
  }
}

void HideListed(const MassArgs& a, const MassHead& head) {
  for (std::int64_t i = 0; i < head.n_listed; ++i) {
    if (head.tokens[i] >= a.n_blocks * kBlockTokens) break;  // ascending
    for (int h = 0; h < a.group; ++h) {
      if ((head.mask[i] >> h & 1) != 0) {
        head.scores[h * head.stride + head.tokens[i]] = -std::numeric_limits<float>::infinity();
      }
    }
  }
}

}  // namespace

void CudaBackend::Select(const SelectArgs& args) const {
  assert(args.keep >= 0 && args.keep <= args.last - args.first);
  if (args.heads.empty()) return;
  if (args.keep == 0) {
    ListAlwaysKept(args);
    return;
  }
  const std::lock_guard lock(mutex_);
  const auto n_heads = static_cast<std::int32_t>(args.heads.size());
  const cuda::Lengths lengths = {
      static_cast<std::int32_t>(args.n_tokens), 0, static_cast<std::int32_t>(args.first),
      static_cast<std::int32_t>(args.last), static_cast<std::int32_t>(args.keep)};
  cuda::HostSelection selection(lengths, args.group, n_heads, stream_.get());
  const std::int64_t stride = cuda::ScoreStride(args.last);
  const cuda::DeviceBuffer<float> scores(static_cast<std::size_t>(selection.n_lists() * stride));
  std::vector<cuda::HostAttended> out;
  for (const SelectHead& head : args.heads) {
    CopyRows(
        scores.data() + static_cast<std::int64_t>(out.size()) * args.group * stride + args.first,
        stride, head.scores + args.first, head.stride, args.last - args.first, args.group,
        stream_.get());
    out.push_back({head.tokens, head.mask, head.n_attended});
  }
  selection.Select(scores.data(), stride);
  const std::int64_t per_head = args.group * args.keep;
  for (std::size_t k = 0; k < args.heads.size(); ++k) {
    cuda::CopyToHost(args.heads[k].winners,
                     selection.winners() + static_cast<std::int64_t>(k) * per_head,
                     static_cast<std::size_t>(per_head), stream_.get());
  }
  selection.Join(out);  // waits
  for (const SelectHead& head : args.heads) {
    for (std::int32_t h = 0; h < args.group; ++h) {
      std::sort(head.winners + h * args.keep, head.winners + (h + 1) * args.keep);
    }
  }
}

void CudaBackend::Mass(const MassArgs& args) const {
  const auto n_heads = static_cast<std::int64_t>(args.heads.size());
  if (n_heads == 0 || args.n_blocks == 0 || args.group == 0) return;
  const std::lock_guard lock(mutex_);
  const std::int64_t n_tokens = args.n_blocks * kBlockTokens;
  const auto n_lists = static_cast<std::int32_t>(n_heads * args.group);
  const auto n_blocks = static_cast<std::int32_t>(args.n_blocks);
  const cuda::DeviceBuffer<float> scores(static_cast<std::size_t>(n_lists * n_tokens));
  const cuda::DeviceBuffer<float> shift(static_cast<std::size_t>(n_lists));
  const cuda::DeviceBuffer<float> mass(static_cast<std::size_t>(n_lists * args.n_blocks));
  const cuda::DeviceBuffer<cuda::Lengths> lengths(1);
  const cuda::Lengths host_lengths = {static_cast<std::int32_t>(n_tokens), n_blocks, 0, 0, 0};
  cuda::CopyToDevice(lengths.data(), &host_lengths, 1, stream_.get());
  for (std::int64_t k = 0; k < n_heads; ++k) {
    const MassHead& head = args.heads[static_cast<std::size_t>(k)];
    HideListed(args, head);
    CopyRows(scores.data() + k * args.group * n_tokens, n_tokens, head.scores, head.stride,
             n_tokens, args.group, stream_.get());
    CopyRows(shift.data() + k * args.group, args.group, head.shift, args.group, args.group, 1,
             stream_.get());
  }
  const cuda::BlockMasses masses = {.scores = scores.data(),
                                    .stride = n_tokens,
                                    .shift = shift.data(),
                                    .mass = mass.data(),
                                    .mass_stride = args.n_blocks,
                                    .group = args.group,
                                    .n_kv_heads = static_cast<std::int32_t>(n_heads),
                                    .n_lists = n_lists,
                                    .lengths = lengths.data(),
                                    .max_blocks = n_blocks,
                                    .scale = args.scale,
                                    .listed = {}};
  cuda::Mass(masses, stream_.get());
  const std::int64_t per_head = args.group * args.n_blocks;
  for (std::int64_t k = 0; k < n_heads; ++k) {
    cuda::CopyToHost(args.heads[static_cast<std::size_t>(k)].mass, mass.data() + k * per_head,
                     static_cast<std::size_t>(per_head), stream_.get());
  }
  stream_.Wait();
}

}  // namespace fathom
