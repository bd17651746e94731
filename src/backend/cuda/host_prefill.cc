// SPDX-License-Identifier: MIT
// Prefill with arguments in host memory: all rows that the chunk sees are copied to the device.
#include <cassert>
#include <cstdint>
#include <vector>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/host_copy.h"
#include "backend/cuda/prefill.h"

namespace fathom {

void CudaBackend::Prefill(const PrefillArgs& a) const {
  const HeadGeometry& g = a.geometry;
  assert(g.n_kv_heads > 0 && g.n_heads % g.n_kv_heads == 0 && g.group() <= kMaxGroup);
  assert(g.head_dim > 0 && g.head_dim <= kMaxHeadDim && g.head_dim % 16 == 0);
  assert(a.rows.size() == static_cast<std::size_t>(g.n_kv_heads));
  if (a.n_queries == 0) return;
  const std::lock_guard lock(mutex_);
  cudaStream_t stream = stream_.get();
  const auto row = 2 * static_cast<std::size_t>(g.head_dim);
  const std::size_t rows_of_head = static_cast<std::size_t>(a.first + a.n_queries) * row;
  const std::size_t n = static_cast<std::size_t>(a.n_queries) *
                        static_cast<std::size_t>(g.n_heads) * static_cast<std::size_t>(g.head_dim);
  const cuda::DeviceBuffer<Half> rows(rows_of_head * a.rows.size());
  const cuda::DeviceBuffer<float> q(n), out(n);
  std::vector<const Half*> pointers;
  for (std::size_t h = 0; h < a.rows.size(); ++h) {
    Half* to = rows.data() + h * rows_of_head;
    cuda::CopyToDevice(to, a.rows[h], rows_of_head, stream);
    pointers.push_back(to);
  }
  const auto rows_of = cuda::OnDevice(pointers, stream);
  cuda::CopyToDevice(q.data(), a.q, n, stream);
  cuda::Prefill({g, a.scale, a.first, a.n_queries, q.data(), rows_of.data(), out.data()}, stream);
  cuda::CopyToHost(a.out, out.data(), n, stream);
  stream_.Wait();
}

}  // namespace fathom
