// SPDX-License-Identifier: MIT
// Attend and Weigh with arguments in host memory.
#include <algorithm>
#include <cassert>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "backend/cuda/attend.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/host_copy.h"
#include "backend/cuda/weigh.h"

namespace fathom {
namespace {

using cuda::CopyToDevice;
using cuda::CopyToHost;
using cuda::DeviceBuffer;
using cuda::OnDevice;
using cuda::Zeros;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

// --- attend -------------------------------------------------------------------------------------

// Rows, masks and queries of a call on the device. Only listed rows are read.
struct AttendInput {
  std::int32_t capacity = 1;
  DeviceBuffer<Half> rows;  // [n_heads][capacity][2][D]
  DeviceBuffer<std::uint16_t> mask;
  DeviceBuffer<std::int32_t> count;
  DeviceBuffer<float> q;

  cuda::Attended attended() const { return {nullptr, mask.data(), count.data(), capacity}; }
};

void UploadRows(const AttendArgs& a, const AttendHead& head, Half* rows, cudaStream_t stream) {
  const std::size_t row = 2 * Size(a.head_dim);
  if (head.tokens == nullptr) {
    CopyToDevice(rows, head.rows, Size(head.n_attended) * row, stream);
    return;
  }
  std::vector<Half> listed(Size(head.n_attended) * row);
  for (std::size_t i = 0; i < Size(head.n_attended); ++i) {
    std::copy_n(head.rows + Size(head.tokens[i]) * row, row, listed.data() + i * row);
  }
  CopyToDevice(rows, listed.data(), listed.size(), stream);
}

AttendInput UploadAttend(const AttendArgs& a, cudaStream_t stream) {
  AttendInput in;
  for (const AttendHead& head : a.heads) {
    assert(head.n_attended >= 0 && head.n_attended <= std::numeric_limits<std::int32_t>::max());
    in.capacity = std::max(in.capacity, static_cast<std::int32_t>(head.n_attended));
  }
  const std::size_t n_heads = a.heads.size();
  const std::size_t capacity = Size(in.capacity);
  const std::size_t queries = Size(a.group) * Size(a.head_dim);
  const auto everyone = static_cast<std::uint16_t>((1U << a.group) - 1);
  in.rows.Reserve(n_heads * capacity * 2 * Size(a.head_dim));
  in.q.Reserve(n_heads * queries);
  std::vector<std::uint16_t> mask(n_heads * capacity, everyone);
  std::vector<std::int32_t> count;
  for (std::size_t h = 0; h < n_heads; ++h) {
    const AttendHead& head = a.heads[h];
    UploadRows(a, head, in.rows.data() + h * capacity * 2 * Size(a.head_dim), stream);
    CopyToDevice(in.q.data() + h * queries, head.q, queries, stream);
    if (head.tokens != nullptr) {
      std::copy_n(head.mask, Size(head.n_attended), mask.data() + h * capacity);
    }
    count.push_back(static_cast<std::int32_t>(head.n_attended));
  }
  in.mask = OnDevice(mask, stream);
  in.count = OnDevice(count, stream);
  return in;
}

// Limits of lists with lazy values; heads without a list read all of theirs.
DeviceBuffer<float> Limits(const AttendArgs& a, const AttendInput& in, cudaStream_t stream) {
  const std::vector<float> none(Size(a.group), -kInfinity);
  const auto n_heads = static_cast<std::int32_t>(a.heads.size());
  DeviceBuffer<float> limit(a.heads.size() * none.size());
  cuda::FindLazyLimits({a.head_dim, a.group, n_heads, a.scale, a.least_weight, in.rows.data(),
                        in.attended(), in.q.data(), limit.data()},
                       stream);
  for (std::size_t h = 0; h < a.heads.size(); ++h) {
    if (a.heads[h].tokens != nullptr) continue;
    CopyToDevice(limit.data() + h * none.size(), none.data(), none.size(), stream);
  }
  return limit;
}

// [n_heads][D], zeros for heads that have none.
DeviceBuffer<float> MeanValues(const AttendArgs& a, cudaStream_t stream) {
  DeviceBuffer<float> mean = Zeros<float>(a.heads.size() * Size(a.head_dim), stream);
  for (std::size_t h = 0; h < a.heads.size(); ++h) {
    if (a.heads[h].mean_value == nullptr) continue;
    CopyToDevice(mean.data() + h * Size(a.head_dim), a.heads[h].mean_value, Size(a.head_dim),
                 stream);
  }
  return mean;
}

// --- weigh --------------------------------------------------------------------------------------

// Arguments of a call on the device. Block means are copied whether they are read or not.
struct WeighInput {
  DeviceBuffer<Half> means;  // [n_heads][n_blocks][D]
  DeviceBuffer<const Half*> means_of;
  DeviceBuffer<float> mean, mass, least;
  DeviceBuffer<cuda::Lengths> lengths;
};

WeighInput UploadWeigh(const WeighArgs& a, cudaStream_t stream) {
  const std::size_t n_heads = a.heads.size();
  const std::size_t means = Size(a.n_blocks) * Size(a.head_dim);
  const std::size_t masses = Size(a.n_blocks) * Size(a.group);
  WeighInput in;
  in.means.Reserve(n_heads * means);
  in.mean.Reserve(n_heads * Size(a.head_dim));
  in.mass.Reserve(n_heads * masses);
  std::vector<const Half*> means_of;
  std::vector<float> least(n_heads * Size(a.group), kInfinity);
  for (std::size_t h = 0; h < n_heads; ++h) {
    const WeighHead& head = a.heads[h];
    CopyToDevice(in.mean.data() + h * Size(a.head_dim), head.mean, Size(a.head_dim), stream);
    if (masses > 0) CopyToDevice(in.mass.data() + h * masses, head.mass, masses, stream);
    means_of.push_back(nullptr);
    if (head.means == nullptr || means == 0) continue;
    means_of.back() = in.means.data() + h * means;
    CopyToDevice(in.means.data() + h * means, head.means, means, stream);
    std::copy_n(head.least, Size(a.group), least.data() + h * Size(a.group));
  }
  in.means_of = OnDevice(means_of, stream);
  in.least = OnDevice(least, stream);
  in.lengths =
      OnDevice<cuda::Lengths>({{0, static_cast<std::int32_t>(a.n_blocks), 0, 0, 0}}, stream);
  return in;
}

// Results of Attend, to where the heads want them.
void CopyResults(const AttendArgs& a, const DeviceBuffer<float>& out,
                 const DeviceBuffer<float>& lse, const DeviceBuffer<std::int32_t>& n_values,
                 cudaStream_t stream) {
  const std::size_t dim = Size(a.head_dim);
  std::vector<std::int32_t> read(a.heads.size());
  CopyToHost(read.data(), n_values.data(), read.size(), stream);
  for (std::size_t h = 0; h < a.heads.size(); ++h) {
    const std::size_t first = h * Size(a.group);
    CopyToHost(a.heads[h].out, out.data() + first * dim, Size(a.group) * dim, stream);
    CopyToHost(a.heads[h].lse, lse.data() + first, Size(a.group), stream);
  }
  cuda::Check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  const bool lazy = a.least_weight > 0;
  for (std::size_t h = 0; h < a.heads.size(); ++h) {
    if (a.heads[h].n_values == nullptr) continue;
    *a.heads[h].n_values = lazy && a.heads[h].tokens != nullptr ? read[h] : a.heads[h].n_attended;
  }
}

}  // namespace

void CudaBackend::Attend(const AttendArgs& a) const {
  if (a.heads.empty()) return;
  assert(a.group > 0 && a.group <= kMaxGroup);
  assert(a.head_dim > 0 && a.head_dim <= kMaxHeadDim && a.head_dim % 16 == 0);
  const std::lock_guard lock(mutex_);
  cudaStream_t stream = stream_.get();
  const std::size_t n_lists = a.heads.size() * Size(a.group);
  const std::size_t dim = Size(a.head_dim);
  const auto n_heads = static_cast<std::int32_t>(a.heads.size());
  const AttendInput in = UploadAttend(a, stream);
  const std::int32_t n_splits = cuda::AttendSplits(n_heads, in.capacity);
  const bool lazy = a.least_weight > 0;
  DeviceBuffer<float> limit, mean;
  if (lazy) {
    limit = Limits(a, in, stream);
    mean = MeanValues(a, stream);
  }
  const DeviceBuffer<float> part_out(n_lists * Size(n_splits) * dim), out(n_lists * dim),
      lse(n_lists);
  const DeviceBuffer<cuda::PartState> part(n_lists * Size(n_splits));
  const auto n_values = Zeros<std::int32_t>(a.heads.size(), stream);
  cuda::Attend({a.head_dim,
                a.group,
                n_heads,
                n_heads,
                a.scale,
                in.rows.data(),
                {},
                in.attended(),
                nullptr,
                in.q.data(),
                limit.data(),
                n_values.data(),
                n_splits,
                part_out.data(),
                part.data()},
               stream);
  cuda::Merge({a.head_dim,
               a.group,
               n_heads,
               n_heads,
               n_splits,
               part_out.data(),
               part.data(),
               mean.data(),
               out.data(),
               lse.data(),
               {}},
              stream);
  CopyResults(a, out, lse, n_values, stream);
}

void CudaBackend::Weigh(const WeighArgs& a) const {
  if (a.heads.empty()) return;
  assert(a.group > 0 && a.group <= kMaxGroup);
  assert(a.head_dim > 0 && a.head_dim <= kMaxHeadDim && a.head_dim % 16 == 0);
  const std::lock_guard lock(mutex_);
  cudaStream_t stream = stream_.get();
  const std::size_t n_lists = a.heads.size() * Size(a.group);
  const std::size_t dim = Size(a.head_dim);
  const auto n_heads = static_cast<std::int32_t>(a.heads.size());
  const WeighInput in = UploadWeigh(a, stream);
  const std::int32_t n_splits = cuda::WeighSplits(n_heads, a.n_blocks);
  const DeviceBuffer<float> part_out(n_lists * Size(n_splits) * dim),
      part_other(n_lists * Size(n_splits)), out(n_lists * dim);
  const auto n_read = Zeros<std::int32_t>(a.heads.size(), stream);
  // One sequence: all heads have the same blocks.
  cuda::Weigh({a.head_dim,
               a.group,
               n_heads,
               n_heads,
               in.means_of.data(),
               in.mean.data(),
               in.mass.data(),
               a.n_blocks,
               in.least.data(),
               in.lengths.data(),
               n_splits,
               part_out.data(),
               part_other.data(),
               n_read.data(),
               {},
               out.data()},
              stream);
  std::vector<std::int32_t> read(a.heads.size());
  CopyToHost(read.data(), n_read.data(), read.size(), stream);
  for (std::size_t h = 0; h < a.heads.size(); ++h) {
    CopyToHost(a.heads[h].out, out.data() + h * Size(a.group) * dim, Size(a.group) * dim, stream);
  }
  stream_.Wait();
  for (std::size_t h = 0; h < a.heads.size(); ++h) {
    if (a.heads[h].n_read != nullptr) *a.heads[h].n_read = read[h];
  }
}

}  // namespace fathom
