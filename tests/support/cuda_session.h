// SPDX-License-Identifier: MIT
// Decode steps of a session on a device beside the same steps by Method::Attend: below the model,
// q, k and v of every layer are given.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "device/session_attention.h"
#include "support/compare.h"
#include "support/layered_session.h"

namespace fathom::test {

struct SessionCase {
  std::string spec;
  std::int32_t head_dim = 64, group = 4, n_layers = 2;
  std::int64_t capacity = 512;
  std::uint64_t seed = 5;

  HeadGeometry heads() const { return {group * 2, 2, head_dim}; }
};

inline std::ostream& operator<<(std::ostream& out, const SessionCase& c) {
  return out << c.spec << ", D " << c.head_dim << ", group " << c.group << ", seed " << c.seed;
}

// One sequence with two methods, each with its own rows.
class SessionPair {
 public:
  explicit SessionPair(const SessionCase& c, cuda::HostPinner pinner = cuda::CudaPinner())
      : case_(c),
        host_(c.n_layers, c.heads(), c.capacity, c.seed),
        device_(c.n_layers, c.heads(), c.capacity, c.seed),
        host_method_(host_.Make(c.spec)),
        device_method_(device_.Make(c.spec)),
        attention_(&device_.rows, 2, std::move(pinner)),
        q_(Size(std::int64_t{c.group} * 2 * c.head_dim)),
        k_(Size(std::int64_t{2} * c.head_dim)),
        v_(k_.size()),
        out_(Size(c.n_layers) * q_.size()),
        host_q_(out_.size()),
        host_k_(Size(c.n_layers) * k_.size()),
        host_v_(host_k_.size()) {}

  // Tokens up to n, as a prefill writes them; every 8th leaves its query.
  void Prefill(std::int64_t n, bool build = true) {
    for (LayeredSession* s : {&host_, &device_}) {
      WriteRows(s, n_tokens_, n);
      for (std::int64_t p = WholeBlocks(n_tokens_); p < n; p += 8) {
        if (p + 40 > n) s->AddRecent({p}, case_.seed + Size(1000 * p));
      }
    }
    n_tokens_ = n;
    if (build) {
      host_method_->BuildIndex(n);
      device_method_->BuildIndex(n);
    }
    attention_.Forget();
  }

  void Truncate(std::int64_t n) {
    for (LayeredSession* s : {&host_, &device_}) s->rows.Truncate(n);
    host_method_->Truncate(n);
    device_method_->Truncate(n);
    n_tokens_ = n;
    attention_.Forget();
  }

  // Other keys and values from token n on.
  void ChangeFrom(std::int64_t n) {
    const std::size_t width = k_.size();
    for (LayeredSession* s : {&host_, &device_}) {
      for (std::size_t layer = 0; layer < s->keys.size(); ++layer) {
        std::reverse(s->keys[layer].begin() + static_cast<std::ptrdiff_t>(Size(n) * width),
                     s->keys[layer].end());
        std::reverse(s->values[layer].begin() + static_cast<std::ptrdiff_t>(Size(n) * width),
                     s->values[layer].end());
      }
    }
  }

  // One token by both; why the device could not, then neither has moved.
  std::string Step() {
    const std::string why = attention_.Prepare(*device_method_->step_source(), n_tokens_);
    if (!why.empty()) return why;
    const MethodCounters before = device_method_->counters(),
                         host_before = host_method_->counters();
    const std::vector<float> actual = DeviceStep();
    const std::vector<float> expected = HostStep();
    Compare(actual, expected, before, host_before);
    ++n_tokens_;
    for (LayeredSession* s : {&host_, &device_}) s->rows.Commit(n_tokens_);
    ExpectSameRows();
    return {};
  }
  void Steps(int n) {
    for (int i = 0; i < n && !testing::Test::HasFailure(); ++i) ASSERT_EQ(Step(), "");
  }
  // The same token by Method::Attend alone.
  void HostStepOfBoth() {
    HostStep();
    std::vector<float> out(q_.size());
    WriteRows(&device_, n_tokens_, n_tokens_ + 1);
    for (std::int32_t layer = 0; layer < case_.n_layers; ++layer) {
      device_method_->Attend(layer, n_tokens_ + 1, Query(layer).data(), out.data());
    }
    ++n_tokens_;
    host_.rows.Commit(n_tokens_);
  }

  std::int64_t n_tokens() const { return n_tokens_; }
  const MethodCounters& counters() const { return device_method_->counters(); }
  int n_recorded() const { return n_recorded_; }

 private:
  static void WriteRows(LayeredSession* s, std::int64_t first, std::int64_t n) {
    const std::int64_t width = std::int64_t{s->heads.n_kv_heads} * s->heads.head_dim;
    for (std::int32_t layer = 0; layer < s->rows.n_layers(); ++layer) {
      s->rows.Write(layer, first, n - first, s->keys[Size(layer)].data() + first * width,
                    s->values[Size(layer)].data() + first * width);
    }
    s->rows.Commit(n);
  }
  std::vector<float> Query(std::int32_t layer) const {
    return host_.Query(case_.seed + Size(n_tokens_ * 10 + layer + 7), 2);
  }

  std::vector<float> HostStep() {
    const std::int64_t width = std::int64_t{host_.heads.n_kv_heads} * host_.heads.head_dim;
    std::vector<float> out(out_.size());
    for (std::int32_t layer = 0; layer < case_.n_layers; ++layer) {
      host_.rows.Write(layer, n_tokens_, 1, host_.keys[Size(layer)].data() + n_tokens_ * width,
                       host_.values[Size(layer)].data() + n_tokens_ * width);
      host_method_->Attend(layer, n_tokens_ + 1, Query(layer).data(),
                           out.data() + Size(layer) * q_.size());
    }
    return out;
  }

  // All layers as one piece of work, recorded once per recipe; what a model computes between them
  // is a copy of q, k and v here.
  void Record(cudaStream_t stream) {
    attention_.Begin(stream);
    for (std::int32_t layer = 0; layer < case_.n_layers; ++layer) {
      const auto copy = [&](const cuda::DeviceBuffer<float>& to,
                            const cuda::PinnedBuffer<float>& from) {
        cuda::Check(cudaMemcpyAsync(to.data(), from.data() + Size(layer) * to.size(),
                                    to.size() * sizeof(float), cudaMemcpyHostToDevice, stream),
                    "cudaMemcpyAsync");
      };
      copy(q_, host_q_);
      copy(k_, host_k_);
      copy(v_, host_v_);
      attention_.Layer(layer, q_.data(), k_.data(), v_.data(),
                       out_.data() + Size(layer) * q_.size(), stream);
    }
    attention_.End(stream);
  }

  std::vector<float> DeviceStep() {
    for (std::int32_t layer = 0; layer < case_.n_layers; ++layer) {
      const auto set = [&](const cuda::PinnedBuffer<float>& to, const float* from, std::size_t n) {
        std::copy_n(from, n, to.data() + Size(layer) * n);
      };
      const std::size_t at = Size(n_tokens_) * k_.size();
      set(host_q_, Query(layer).data(), q_.size());
      set(host_k_, device_.keys[Size(layer)].data() + at, k_.size());
      set(host_v_, device_.values[Size(layer)].data() + at, v_.size());
    }
    if (recipe_ != attention_.recipe()) {
      recipe_ = attention_.recipe();
      graph_.reset();
      ++n_recorded_;
      Record(stream_.get());
    } else {
      if (!graph_) graph_.emplace(stream_.get(), [this](cudaStream_t s) { Record(s); });
      graph_->Launch(stream_.get());
    }
    stream_.Wait();
    attention_.Finish(*device_method_->step_source());
    std::vector<float> out(out_.size());
    cuda::Check(
        cudaMemcpy(out.data(), out_.data(), out.size() * sizeof(float), cudaMemcpyDeviceToHost),
        "cudaMemcpy");
    return out;
  }

  void Compare(const std::vector<float>& actual, const std::vector<float>& expected,
               const MethodCounters& before, const MethodCounters& host_before) const {
    SCOPED_TRACE(testing::Message() << case_ << ", at " << n_tokens_ + 1 << " tokens");
    const MethodCounters& now = device_method_->counters();
    const MethodCounters& host = host_method_->counters();
    EXPECT_EQ(now.steps - before.steps, 1);
    EXPECT_EQ(now.calls - before.calls, host.calls - host_before.calls);
    EXPECT_EQ(now.sparse_calls - before.sparse_calls, host.sparse_calls - host_before.sparse_calls);
    // A block that this token finishes is not in the device's index yet: its tokens are attended.
    const bool ends_block = (n_tokens_ + 1) % kBlockTokens == 0;
    EXPECT_TRUE(Near(actual, expected, ends_block ? 0.2 : 2e-3));
    if (ends_block) return;
    EXPECT_NEAR(now.read_bits - before.read_bits, host.read_bits - host_before.read_bits, 1e-6);
    EXPECT_EQ(now.rows - before.rows, host.rows - host_before.rows);
    EXPECT_EQ(now.row_bytes - before.row_bytes, host.row_bytes - host_before.row_bytes);
    EXPECT_EQ(now.index_bytes - before.index_bytes, host.index_bytes - host_before.index_bytes);
  }

  void ExpectSameRows() const {
    const std::int64_t row = std::int64_t{2} * case_.head_dim;
    for (std::int32_t layer = 0; layer < case_.n_layers; ++layer) {
      for (std::int32_t h = 0; h < 2; ++h) {
        const Half* expected = host_.rows.rows(layer, h);
        const Half* actual = std::as_const(device_.rows).rows(layer, h);
        ASSERT_TRUE(std::equal(expected, expected + n_tokens_ * row, actual))
            << case_ << ", layer " << layer << ", KV head " << h;
      }
    }
  }

  const SessionCase case_;
  LayeredSession host_, device_;
  std::unique_ptr<Method> host_method_, device_method_;
  cuda::SessionAttention attention_;
  std::int64_t n_tokens_ = 0;
  cuda::DeviceBuffer<float> q_, k_, v_, out_;           // out: of all layers
  cuda::PinnedBuffer<float> host_q_, host_k_, host_v_;  // likewise
  std::optional<cuda::Graph> graph_;
  std::uint64_t recipe_ = 0;
  int n_recorded_ = 0;
  cuda::Stream stream_;
};

}  // namespace fathom::test
