// SPDX-License-Identifier: MIT
// Decode steps on the device for tests: rows, queries and memory of a batch, and what a step gave.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <ostream>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "backend/cuda/buffer.h"
#include "backend/cuda/cuda_backend.h"
#include "device/attention_step.h"
#include "fathom/backend.h"
#include "support/compare.h"
#include "support/random_data.h"

namespace fathom::test {

inline std::size_t Size(std::int64_t n) { return static_cast<std::size_t>(n); }

inline constexpr std::int32_t kKvHeads = 2;

struct StepCase {
  DataKind kind = DataKind::kNormal;
  std::vector<std::int64_t> n_tokens;  // of every sequence
  std::int32_t head_dim = 128;
  std::int32_t group = 4;
  std::int64_t k = 128;
  bool on_host = false;  // index and rows in mapped host memory
  bool residual = false;
  double bits = 28;  // of the mean codec
  std::int32_t mean_bits = 4;

  HeadGeometry heads() const { return {group * kKvHeads, kKvHeads, head_dim}; }
  std::int32_t batch() const { return static_cast<std::int32_t>(n_tokens.size()); }
  std::int64_t n_heads() const { return std::int64_t{batch()} * kKvHeads; }
  // Room for one block more than the longest sequence has.
  std::int64_t capacity() const {
    return WholeBlocks(*std::ranges::max_element(n_tokens)) + kBlockTokens;
  }
  std::int64_t cap_blocks() const {
    return std::int64_t{cuda::kTileBlocks} *
           cuda::TilesOf(static_cast<std::int32_t>(capacity() / kBlockTokens));
  }
};

inline std::ostream& operator<<(std::ostream& out, const StepCase& c) {
  out << "kind " << static_cast<int>(c.kind) << ", D " << c.head_dim << ", group " << c.group
      << ", k " << c.k << ", bits " << c.bits << "/" << c.mean_bits << (c.on_host ? ", host" : "")
      << (c.residual ? ", residual" : "") << ", tokens";
  for (const std::int64_t n : c.n_tokens) out << " " << n;
  return out;
}

class CudaStep : public testing::Test {
 protected:
  void SetUp() override {
    const std::string reason = ProbeCuda();
    if (!reason.empty()) GTEST_SKIP() << reason;
  }
};

template <typename T>
cuda::DeviceBuffer<T> ToDevice(const std::vector<T>& host) {
  return cuda::DeviceBuffer<T>(std::span<const T>(host));
}

template <typename T>
std::vector<T> ToHost(const T* device, std::size_t n) {
  std::vector<T> host(n);
  cuda::Check(cudaMemcpy(host.data(), device, n * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
  return host;
}

// Zeroed memory that the device reaches: its own, or of the host and mapped.
class StepMemory {
 public:
  StepMemory(bool on_host, std::size_t bytes) : bytes_((bytes + kPage - 1) / kPage * kPage) {
    if (!on_host) {
      own_.Reserve(bytes_);
      device_ = own_.data();
      cuda::Check(cudaMemset(device_, 0, bytes_), "cudaMemset");
      cuda::Check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
      return;
    }
    host_.reset(std::aligned_alloc(kPage, bytes_));
    if (host_ == nullptr) throw std::bad_alloc();
    std::memset(host_.get(), 0, bytes_);
    cuda::Check(cudaHostRegister(host_.get(), bytes_, cudaHostRegisterMapped), "cudaHostRegister");
    registered_ = true;
    cuda::Check(cudaHostGetDevicePointer(&device_, host_.get(), 0), "cudaHostGetDevicePointer");
  }
  ~StepMemory() {
    if (registered_) cuda::Ignore(cudaHostUnregister(host_.get()));
  }
  StepMemory(const StepMemory&) = delete;
  StepMemory& operator=(const StepMemory&) = delete;

  template <typename T>
  T* as() const {
    return static_cast<T*>(device_);
  }
  // Not while the device works with it.
  void Write(std::size_t offset, const void* from, std::size_t bytes) {
    if (host_ != nullptr) {
      std::memcpy(static_cast<std::byte*>(host_.get()) + offset, from, bytes);
      return;
    }
    cuda::Check(
        cudaMemcpy(static_cast<std::byte*>(device_) + offset, from, bytes, cudaMemcpyHostToDevice),
        "cudaMemcpy");
    cuda::Check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
  }
  std::vector<std::byte> Read() const {
    std::vector<std::byte> bytes(bytes_);
    if (host_ != nullptr) {
      std::memcpy(bytes.data(), host_.get(), bytes_);
    } else {
      bytes = ToHost(as<std::byte>(), bytes_);
    }
    return bytes;
  }

 private:
  static constexpr std::size_t kPage = 4096;
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::size_t bytes_;
  cuda::DeviceBuffer<std::byte> own_;
  std::unique_ptr<void, Free> host_;
  bool registered_ = false;
  void* device_ = nullptr;
};

// Addresses base + i * stride as a device array.
template <typename T>
cuda::DeviceBuffer<T*> Addresses(const StepMemory& memory, std::int64_t n, std::int64_t stride) {
  std::vector<T*> all;
  for (std::int64_t i = 0; i < n; ++i) {
    all.push_back(reinterpret_cast<T*>(memory.as<std::byte>() + i * stride));
  }
  return ToDevice(all);
}

// What a step attended and gave.
struct StepResult {
  std::vector<std::int32_t> count;                // [n_heads], -1: all
  std::vector<std::vector<std::int32_t>> tokens;  // of every head
  std::vector<std::vector<std::uint16_t>> mask;
  std::vector<std::int32_t> redo;  // [n_heads]
  std::vector<float> out;          // [n_lists][D]

  std::span<const float> of_head(const StepCase& c, std::int64_t head) const {
    const std::size_t n = Size(std::int64_t{c.group} * c.head_dim);
    return std::span(out).subspan(Size(head) * n, n);
  }
};

// Rows and queries of a batch, and a step over them.
class StepRun {
 public:
  StepRun(const StepCase& c, std::int32_t unit, std::uint64_t seed)
      : case_(c),
        head_bytes_(c.capacity() * 2 * c.head_dim * 2),
        memory_(c.on_host, Size(c.n_heads() * head_bytes_)),
        pointers_(Addresses<const Half>(memory_, c.n_heads(), head_bytes_)),
        q(RandomNormal(c.n_heads() * c.group * c.head_dim, seed + 77)),
        q_(q.size()),
        out_(q.size()),
        step_({c.heads(), 1, c.batch(), c.capacity(), c.k, c.residual}, unit) {
    for (std::int64_t h = 0; h < c.n_heads(); ++h) {
      rows.push_back(RandomRows(c.kind, c.capacity(), c.head_dim, seed + 10 * Size(h)));
    }
    WriteRows();
    WriteQueries();
    SetLengths(c.n_tokens);
  }

  void WriteRows() {
    for (std::size_t h = 0; h < rows.size(); ++h) {
      memory_.Write(h * Size(head_bytes_), rows[h].data(), Size(head_bytes_));
    }
  }
  void WriteQueries() {
    cuda::Check(cudaMemcpy(q_.data(), q.data(), q.size() * 4, cudaMemcpyHostToDevice),
                "cudaMemcpy");
    cuda::Check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
  }
  void SetLengths(const std::vector<std::int64_t>& n_tokens) {
    tokens = n_tokens;
    step_.SetLengths(tokens, false, stream_.get());
  }

  // layer: of the rows' source, filled in here.
  void Record(cuda::IndexScan* index, cuda::LayerRows layer, cudaStream_t stream) {
    layer.source = {pointers_.data(), nullptr, {}};
    step_.Run(0, index, layer, q_.data(), out_.data(), stream);
  }
  StepResult Run(cuda::IndexScan* index, const cuda::LayerRows& layer = {}) {
    Record(index, layer, stream_.get());
    return Read();
  }
  StepResult Read() {
    stream_.Wait();
    StepResult r;
    const cuda::Attended& list = step_.attended();
    r.count = ToHost(list.count, rows.size());
    r.redo = ToHost(step_.redo(), rows.size());
    for (std::size_t h = 0; h < rows.size(); ++h) {
      const std::size_t n = Size(std::max(r.count[h], 0)), at = h * Size(list.capacity);
      EXPECT_LE(n, Size(list.capacity));
      r.tokens.push_back(ToHost(list.tokens + at, n));
      r.mask.push_back(ToHost(list.mask + at, n));
    }
    r.out = ToHost(out_.data(), out_.size());
    return r;
  }

  const StepCase& shape() const { return case_; }
  cuda::AttentionStep& step() { return step_; }
  const Half* const* row_pointers() const { return pointers_.data(); }
  cudaStream_t stream() const { return stream_.get(); }
  const float* head_q(std::int64_t head) const {
    return q.data() + head * case_.group * case_.head_dim;
  }
  const float* device_q() const { return q_.data(); }
  std::int64_t n_tokens(std::int64_t head) const { return tokens[Size(head / kKvHeads)]; }
  std::int64_t n_blocks(std::int64_t head) const { return n_tokens(head) / kBlockTokens; }
  // Candidates end here, in tokens.
  std::int64_t last(std::int64_t head) const {
    return std::min(n_blocks(head) * kBlockTokens, n_tokens(head) - kWindow);
  }
  bool is_sparse(std::int64_t head) const { return n_tokens(head) > case_.k; }

  // Attention of a head over a list, or over all its tokens: [group][D] and [group].
  void Attend(std::int64_t head, const std::vector<std::int32_t>* list,
              const std::vector<std::uint16_t>* mask, std::vector<float>* out,
              std::vector<float>* lse) const {
    out->resize(Size(std::int64_t{case_.group} * case_.head_dim));
    lse->resize(Size(case_.group));
    AttendHead args;
    args.rows = rows[Size(head)].data();
    args.q = head_q(head);
    args.n_attended = n_tokens(head);
    if (list != nullptr) {
      args.tokens = list->data();
      args.mask = mask->data();
      args.n_attended = static_cast<std::int64_t>(list->size());
    }
    args.out = out->data();
    args.lse = lse->data();
    MakeBackend("ref", 1)->Attend({case_.head_dim, case_.group, scale(), {&args, 1}});
  }
  float scale() const { return 1.0F / std::sqrt(static_cast<float>(case_.head_dim)); }

 private:
  const StepCase case_;
  const std::int64_t head_bytes_;
  StepMemory memory_;
  cuda::DeviceBuffer<const Half*> pointers_;
  cuda::Stream stream_;

 public:
  std::vector<std::vector<Half>> rows;  // [n_heads] on the host
  std::vector<float> q;                 // [n_lists][D]
  std::vector<std::int64_t> tokens;     // of the sequences now

 private:
  cuda::DeviceBuffer<float> q_, out_;
  cuda::AttentionStep step_;
};

// The winners of every query head as units of `unit` tokens equal the best `keep` of scores
// [group][stride], apart from units whose score lies within `tolerance` times the list's largest
// magnitude of the least winner's. Sinks, window and tail must be attended by all.
inline void ExpectWinners(const StepRun& run, const StepResult& r, std::int64_t head,
                          const std::vector<float>& scores, std::int64_t stride, std::int32_t unit,
                          double tolerance) {
  const StepCase& c = run.shape();
  const std::int64_t first = (kSinks + unit - 1) / unit, last = run.last(head) / unit;
  const std::int64_t keep = (c.k - kAlwaysKept) / unit;
  std::vector<std::int32_t> winners(Size(c.group * keep)), tokens(Size(last + c.group * keep));
  std::vector<std::uint16_t> mask(tokens.size());
  std::int64_t n = 0;
  SelectHead select{scores.data(), stride, winners.data(), tokens.data(), mask.data(), &n};
  MakeBackend("ref", 1)->Select({c.group, first, last, last, keep, {&select, 1}});
  const auto& list = r.tokens[Size(head)];
  const auto& masks = r.mask[Size(head)];
  ASSERT_TRUE(std::ranges::is_sorted(list));
  ASSERT_EQ(std::ranges::adjacent_find(list), list.end());
  ASSERT_EQ(list.empty() ? -1 : list.back(), run.n_tokens(head) - 1);
  for (std::int32_t h = 0; h < c.group; ++h) {
    std::vector<std::int64_t> times(Size(last), 0);  // tokens of every unit that are attended
    std::int64_t always = 0;
    for (std::size_t i = 0; i < list.size(); ++i) {
      if ((masks[i] >> h & 1) == 0) continue;
      const std::int64_t u = list[i] / unit;
      u >= first&& u < last ? ++times[Size(u)] : ++always;
    }
    EXPECT_EQ(always, run.n_tokens(head) - (last - first) * unit) << "head " << h;
    const float* score = scores.data() + h * stride;
    std::vector<std::int64_t> wanted(times.size(), 0);
    for (std::int64_t i = 0; i < keep; ++i) wanted[Size(winners[Size(h * keep + i)])] = unit;
    float cut = score[winners[Size(h * keep)]], largest = 0;
    for (std::int64_t i = 0; i < keep; ++i) {
      cut = std::fmin(cut, score[winners[Size(h * keep + i)]]);
    }
    for (std::int64_t u = first; u < last; ++u) largest = std::fmax(largest, std::fabs(score[u]));
    std::int64_t n_wrong = 0, n_kept = 0;
    for (std::int64_t u = first; u < last; ++u) {
      n_kept += times[Size(u)] == unit ? 1 : 0;
      if (times[Size(u)] == wanted[Size(u)]) continue;
      if (!(std::fabs(score[u] - cut) <= tolerance * largest) || times[Size(u)] % unit != 0) {
        ++n_wrong;
      }
    }
    EXPECT_EQ(n_wrong, 0) << "of head " << head << ", query head " << h << ", cut " << cut;
    EXPECT_EQ(n_kept, keep) << "of head " << head << ", query head " << h;
  }
}

// Outputs of a step without residual, given what it attended.
inline void ExpectOutputs(const StepRun& run, const StepResult& r) {
  std::vector<float> out, lse;
  for (std::int64_t h = 0; h < run.shape().n_heads(); ++h) {
    const bool sparse = run.is_sparse(h);
    ASSERT_EQ(r.count[Size(h)] >= 0, sparse) << "head " << h;
    run.Attend(h, sparse ? &r.tokens[Size(h)] : nullptr, &r.mask[Size(h)], &out, &lse);
    EXPECT_TRUE(Near(r.of_head(run.shape(), h), out, 1e-4)) << "head " << h;
  }
}

}  // namespace fathom::test
