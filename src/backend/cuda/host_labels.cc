// SPDX-License-Identifier: MIT
// Score and ScanLabels of host memory: tables are gathered, copied, scored and forgotten.
#include <algorithm>
#include <cassert>
#include <cstring>
#include <numeric>
#include <vector>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/host_copy.h"
#include "backend/cuda/scan_labels.h"
#include "backend/cuda/score_rows.h"
#include "store/layout.h"

namespace fathom {
namespace {

// Heads that read equally many channels, laid out for one scan.
class LabelUpload {
 public:
  LabelUpload(const LabelScanArgs& args, std::span<const LabelScanHead> heads)
      : args_(args), heads_(heads), n_channels_(heads.front().n_channels) {
    for (std::size_t i = 0; i < heads.size(); ++i) AddHead(static_cast<std::int32_t>(i));
  }

  void Scan(cudaStream_t stream) {
    if (pieces_.empty()) return;
    const auto codes = cuda::OnDevice(codes_, stream);
    const auto scales = cuda::OnDevice(scales_, stream);
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      pieces_[i].codes = codes.data() + codes_at_[i];
      pieces_[i].scales = scales.data() + scales_at_[i];
    }
    const auto pieces = cuda::OnDevice(pieces_, stream);
    const auto channels = cuda::OnDevice(channels_, stream);
    const auto q = cuda::OnDevice(q_, stream);
    const std::int64_t stride = (max_tokens_ + 3) / 4 * 4;
    const auto lists = static_cast<std::int64_t>(heads_.size()) * args_.group;
    const cuda::DeviceBuffer<float> scores(static_cast<std::size_t>(lists * stride));
    cuda::ScanLabels({args_.layout,
                      args_.planes,
                      args_.group,
                      static_cast<std::int32_t>(heads_.size()),
                      pieces.data(),
                      static_cast<std::int32_t>(pieces_.size()),
                      max_tiles_,
                      n_channels_,
                      channels.data(),
                      q.data(),
                      nullptr,
                      {scores.data(), stride, 1, nullptr, {}}},
                     stream);
    for (std::size_t i = 0; i < heads_.size(); ++i) {
      for (std::int32_t h = 0; h < args_.group; ++h) {
        const std::int64_t list = static_cast<std::int64_t>(i) * args_.group + h;
        cuda::CopyToHost(heads_[i].scores + h * heads_[i].stride, scores.data() + list * stride,
                         static_cast<std::size_t>(n_tokens_[i]), stream);
      }
    }
    cuda::Check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }

 private:
  // Only the rows of channels that are read are copied, in the order in which the table has them;
  // channels_ says which row is whose.
  void AddHead(std::int32_t index) {
    const LabelScanHead& head = heads_[static_cast<std::size_t>(index)];
    std::vector<std::int32_t> row(static_cast<std::size_t>(n_channels_));  // of the table
    std::iota(row.begin(), row.end(), 0);
    std::vector<std::int32_t> order = row;
    if (args_.layout == LabelLayout::kChannels && head.channels != nullptr) {
      std::copy_n(head.channels, n_channels_, row.begin());
      std::sort(order.begin(), order.end(), [&row](std::int32_t x, std::int32_t y) {
        return row[static_cast<std::size_t>(x)] < row[static_cast<std::size_t>(y)];
      });
      std::sort(row.begin(), row.end());
    }
    const std::size_t first = channels_.size();
    channels_.resize(first + order.size());
    for (std::size_t r = 0; r < order.size(); ++r) {
      channels_[first + static_cast<std::size_t>(order[r])] = static_cast<std::int32_t>(r);
    }
    q_.insert(q_.end(), head.q, head.q + static_cast<std::ptrdiff_t>(args_.group) * n_channels_);
    std::int32_t n_blocks = 0;
    for (const LabelView& segment : head.segments) {
      if (segment.n_blocks > 0) AddSegment(segment, row, n_blocks, index);
      n_blocks += segment.n_blocks;
    }
    n_tokens_.push_back(std::int64_t{n_blocks} * kBlockTokens);
    max_tokens_ = std::max(max_tokens_, n_tokens_.back());
  }

  void AddSegment(const LabelView& segment, const std::vector<std::int32_t>& row,
                  std::int32_t first_block, std::int32_t head) {
    const std::int32_t tiles = cuda::TilesOf(segment.n_blocks);
    const std::int32_t row_blocks = tiles * cuda::kTileBlocks;
    const auto n_blocks = static_cast<std::size_t>(segment.n_blocks);
    max_tiles_ = std::max(max_tiles_, tiles);
    codes_at_.push_back(codes_.size());
    scales_at_.push_back(scales_.size());
    pieces_.push_back({nullptr, nullptr, row_blocks, segment.n_blocks, first_block, head});

    const std::size_t capacity = row.size() * static_cast<std::size_t>(row_blocks);
    scales_.resize(scales_.size() + capacity);
    Half* scales = scales_.data() + scales_at_.back();
    for (std::size_t r = 0; r < row.size(); ++r) {
      const Half* from = segment.scales + std::ptrdiff_t{row[r]} * args_.segment_blocks;
      std::memcpy(scales + r * static_cast<std::size_t>(row_blocks), from, n_blocks * sizeof(Half));
    }
    if (args_.layout == LabelLayout::kTokens) {
      const int width = layout::LabelWidth(args_.layout, args_.planes, n_channels_);
      const std::size_t bytes =
          static_cast<std::size_t>(width) * layout::LabelBlockBytes(args_.planes) * n_blocks;
      codes_.insert(codes_.end(), segment.codes, segment.codes + bytes);
      return;
    }
    const std::size_t block_bytes = layout::LabelBlockBytes(args_.planes);
    codes_.resize(codes_.size() + capacity * block_bytes);
    std::uint8_t* codes = codes_.data() + codes_at_.back();
    for (std::size_t r = 0; r < row.size(); ++r) {
      const auto from = layout::ChannelLabel(args_.segment_blocks, row[r], 0, 0);
      std::memcpy(codes + r * static_cast<std::size_t>(row_blocks) * block_bytes,
                  segment.codes + from.byte, n_blocks * block_bytes);
    }
  }

  const LabelScanArgs& args_;
  std::span<const LabelScanHead> heads_;
  std::int32_t n_channels_;
  std::int32_t max_tiles_ = 0;
  std::int64_t max_tokens_ = 0;
  std::vector<std::int64_t> n_tokens_;  // of a head
  std::vector<std::uint8_t> codes_;
  std::vector<Half> scales_;
  std::vector<cuda::LabelPiece> pieces_;
  std::vector<std::size_t> codes_at_, scales_at_;  // of a piece
  std::vector<std::int32_t> channels_;             // [head][n_channels]
  std::vector<float> q_;                           // [head][group][n_channels]
};

}  // namespace

void CudaBackend::ScanLabels(const LabelScanArgs& a) const {
  assert(a.group > 0 && a.group <= kMaxGroup && a.planes >= 1 && a.planes <= kPlanes);
  assert(a.layout == LabelLayout::kTokens || a.planes > 2);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (std::size_t first = 0; first < a.heads.size();) {
    std::size_t end = first + 1;
    while (end < a.heads.size() && a.heads[end].n_channels == a.heads[first].n_channels) ++end;
    LabelUpload(a, a.heads.subspan(first, end - first)).Scan(stream_.get());
    first = end;
  }
}

void CudaBackend::Score(const ScoreArgs& a) const {
  assert(a.group > 0 && a.group <= kMaxGroup && a.head_dim % 16 == 0);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (a.heads.empty() || a.n_tokens == 0) return;
  const cudaStream_t stream = stream_.get();
  const std::size_t n_heads = a.heads.size();
  const auto n = static_cast<std::size_t>(a.n_tokens);
  const auto dim = static_cast<std::size_t>(a.head_dim);
  const auto group = static_cast<std::size_t>(a.group);
  const auto from = static_cast<std::size_t>(a.key_stride > 0 ? a.key_stride : 2 * a.head_dim);

  const cuda::DeviceBuffer<Half> keys(n_heads * n * dim);
  std::vector<const Half*> host_rows;
  std::vector<float> host_q;
  for (const ScoreHead& head : a.heads) {
    Half* to = keys.data() + host_rows.size() * n * dim;
    cuda::Check(cudaMemcpy2DAsync(to, dim * sizeof(Half), head.rows, from * sizeof(Half),
                                  dim * sizeof(Half), n, cudaMemcpyHostToDevice, stream),
                "cudaMemcpy2DAsync of keys");
    host_rows.push_back(to);
    host_q.insert(host_q.end(), head.q, head.q + group * dim);
  }
  const auto rows = cuda::OnDevice(host_rows, stream);
  const auto q = cuda::OnDevice(host_q, stream);
  const std::vector<std::int32_t> host_n(n_heads, static_cast<std::int32_t>(n));
  const auto n_keys = cuda::OnDevice(host_n, stream);
  const cuda::DeviceBuffer<float> scores(n_heads * group * n);
  cuda::ScoreRows({a.head_dim,
                   a.group,
                   static_cast<std::int32_t>(n_heads),
                   static_cast<std::int32_t>(n_heads),
                   rows.data(),
                   a.head_dim,
                   n_keys.data(),
                   static_cast<std::int32_t>(n),
                   q.data(),
                   nullptr,
                   {scores.data(), a.n_tokens, 1, nullptr, {}}},
                  stream);
  for (std::size_t i = 0; i < n_heads; ++i) {
    for (std::size_t h = 0; h < group; ++h) {
      cuda::CopyToHost(a.heads[i].scores + static_cast<std::int64_t>(h) * a.heads[i].stride,
                       scores.data() + (i * group + h) * n, n, stream);
    }
  }
  stream_.Wait();
}

}  // namespace fathom
