// SPDX-License-Identifier: MIT
// Rank of CudaBackend: all scores, the selection from them, and the rest.
#include <cassert>
#include <vector>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/host_copy.h"
#include "backend/cuda/host_join.h"
#include "backend/cuda/host_scan.h"
#include "backend/cuda/rest.h"

namespace fathom {
namespace {

// Rest and cut of all heads, to the host. Returns when they are there.
void RestToHost(const RankArgs& args, const cuda::HostSelection& selection, const float* scores,
                std::int64_t stride, std::int32_t n_blocks, const cuda::Stream& stream) {
  const auto n_lists = static_cast<std::size_t>(selection.n_lists());
  const auto row = static_cast<std::size_t>(n_blocks);
  const cuda::DeviceBuffer<float> rest(n_lists * row);
  const cuda::DeviceBuffer<float> cut(n_lists);
  const cuda::RestOfScores sum = {.scores = scores,
                                  .stride = stride,
                                  .kth_key = selection.kth_key(),
                                  .exp_scale = args.exp_scale,
                                  .group = args.group,
                                  .n_kv_heads = static_cast<std::int32_t>(args.heads.size()),
                                  .n_lists = selection.n_lists(),
                                  .lengths = selection.lengths(),
                                  .max_blocks = n_blocks,
                                  .redo = nullptr,
                                  .rest = rest.data(),
                                  .rest_stride = n_blocks,
                                  .cut = cut.data(),
                                  .beside_gather = false};
  cuda::SumRest(sum, stream.get());
  for (std::size_t k = 0; k < args.heads.size(); ++k) {
    const RankHead& head = args.heads[k];
    const auto group = static_cast<std::size_t>(args.group);
    const float* from = rest.data() + k * group * row;
    for (std::size_t h = 0; h < group; ++h) {
      cuda::CopyToHost(head.rest + static_cast<std::int64_t>(h) * head.rest_stride, from + h * row,
                       row, stream.get());
    }
    cuda::CopyToHost(head.cut, cut.data() + k * group, group, stream.get());
  }
  stream.Wait();
}

}  // namespace

void CudaBackend::Rank(const RankArgs& args) const {
  assert(args.keep >= 1 && args.first >= 0 && args.first + args.keep <= args.last &&
         args.last <= args.n_tokens);
  if (args.heads.empty()) return;
  args.PlanHeads();
  const std::lock_guard lock(mutex_);
  std::vector<cuda::HeadIndexView> views;
  std::vector<cuda::HostAttended> out;
  for (const RankHead& head : args.heads) {
    views.push_back({head.segments, head.tables});
    out.push_back({head.tokens, head.mask, head.n_attended});
  }
  cuda::UploadedIndex index(views, args.head_dim, args.group, args.segment_blocks, args.mean_bits,
                            stream_.get());
  const std::int64_t n_index = index.n_tokens();
  assert(args.last <= n_index);
  const auto n_blocks = static_cast<std::int32_t>(n_index / kBlockTokens);
  const cuda::Lengths lengths = {
      static_cast<std::int32_t>(args.n_tokens), n_blocks, static_cast<std::int32_t>(args.first),
      static_cast<std::int32_t>(args.last), static_cast<std::int32_t>(args.keep)};
  cuda::HostSelection selection(lengths, args.group, static_cast<std::int32_t>(args.heads.size()),
                                stream_.get());
  const std::int64_t stride = cuda::ScoreStride(n_index);
  const cuda::DeviceBuffer<float> scores(static_cast<std::size_t>(selection.n_lists() * stride));
  index.Scores(scores.data(), stride, stream_.get());
  selection.Select(scores.data(), stride);
  selection.Join(out);
  if (args.exp_scale != 0) {
    RestToHost(args, selection, scores.data(), stride, n_blocks, stream_);
  }
}

}  // namespace fathom
