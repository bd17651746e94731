// SPDX-License-Identifier: MIT
// What the backend tests share: the list of backends, buffers that start one element off alignment
// and end where their allocation ends, and an index packed by `ref`.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <ostream>
#include <span>
#include <string>
#include <vector>

#include "fathom/backend.h"
#include "fathom/scan_table.h"
#include "store/layout.h"
#include "support/random_data.h"

namespace fathom {

inline void PrintTo(const BackendInfo& info, std::ostream* out) { *out << info.name; }

namespace test {

// n elements, misaligned by one; an access beyond either end is a heap overflow under ASan, but for
// the one element before.
template <typename T>
class OffsetBuffer {
 public:
  explicit OffsetBuffer(std::size_t n, T fill = T{}) : data_(n + 1, fill) {}
  explicit OffsetBuffer(const std::vector<T>& v) : data_(v.size() + 1) {
    std::copy(v.begin(), v.end(), data_.begin() + 1);
  }
  T* data() { return data_.data() + 1; }
  const T* data() const { return data_.data() + 1; }
  std::size_t size() const { return data_.size() - 1; }
  T& operator[](std::size_t i) { return data_[i + 1]; }
  std::span<const T> span() const { return {data(), size()}; }

 private:
  std::vector<T> data_;
};

inline std::vector<std::uint32_t> Bits(std::span<const float> v) {
  std::vector<std::uint32_t> bits(v.size());
  std::transform(v.begin(), v.end(), bits.begin(), [](float x) {
    return std::isnan(x) ? 0x7FC00000u : std::bit_cast<std::uint32_t>(x);
  });
  return bits;
}

// A test of one backend against `ref`, skipped with the reason where it cannot run.
class BackendTest : public testing::TestWithParam<BackendInfo> {
 protected:
  void SetUp() override {
    if (!GetParam().available) GTEST_SKIP() << GetParam().name << ": " << GetParam().reason;
    backend_ = MakeBackend(GetParam().name, 2);
    ref_ = MakeBackend("ref", 1);
  }
  const Backend& backend() const { return *backend_; }
  const Backend& ref() const { return *ref_; }
  std::unique_ptr<Backend> WithThreads(int n) const { return MakeBackend(GetParam().name, n); }

 private:
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Backend> ref_;
};

inline std::string BackendTestName(const testing::TestParamInfo<BackendInfo>& info) {
  std::string name = info.param.name;
  std::replace_if(
      name.begin(), name.end(), [](char c) { return c == '/' || c == '-'; }, '_');
  return name;
}

#define FATHOM_TEST_ALL_BACKENDS(fixture)                                          \
  INSTANTIATE_TEST_SUITE_P(, fixture, testing::ValuesIn(::fathom::ListBackends()), \
                           ::fathom::test::BackendTestName)

struct IndexCase {
  Codec codec = Codec::kMean;
  std::int32_t head_dim = 64;
  std::int32_t segment_blocks = 8;
  std::int32_t mean_bits = 4;
  std::vector<std::int32_t> blocks;  // in use in each segment
  DataKind kind = DataKind::kHeavyTailed;
  std::int32_t row_segments = 1;  // that lie between each other's rows
};

// One KV head's index: random keys packed by `backend`.
struct TestIndex {
  std::vector<std::vector<std::uint64_t>> planes;  // of every row_segments segments
  std::vector<std::vector<std::uint8_t>> side;     // of every segment
  std::vector<SegmentView> views;
  std::vector<float> mean_step, range;
  std::vector<float> weight;  // [D][4][4]
  std::int64_t n_tokens = 0;
};

inline void FitSteps(const std::vector<float>& x, const IndexCase& c, TestIndex* index) {
  const auto dim = static_cast<std::size_t>(c.head_dim);
  for (std::size_t j = 0; j < dim; ++j) {
    double square = 1e-12;
    for (std::size_t i = j; i < x.size(); i += dim) square += static_cast<double>(x[i]) * x[i];
    const double rms = std::sqrt(square / std::max<double>(1, static_cast<double>(x.size() / dim)));
    index->mean_step.push_back(static_cast<float>(rms / layout::MeanLimit(c.mean_bits)));
    index->range.push_back(static_cast<float>(2 * rms));
    for (int t = 1; t <= kPlanes; ++t) {
      for (int p = 0; p < kPlanes; ++p) {
        index->weight.push_back(
            p < t ? static_cast<float>(2 * rms * std::exp2(-(p + 1)) * (1 - 0.01 * t)) : 0);
      }
    }
  }
}

inline TestIndex MakeIndex(const IndexCase& c, const Backend& backend, std::uint64_t seed) {
  TestIndex index;
  std::int64_t n_blocks = 0;
  for (const std::int32_t b : c.blocks) n_blocks += b;
  const auto x = RandomData(c.kind, n_blocks * kBlockTokens, c.head_dim, seed);
  FitSteps(x, c, &index);
  const float* at = x.data();
  const auto together = static_cast<std::size_t>(c.row_segments);
  for (std::size_t s = 0; s < c.blocks.size(); ++s) {
    const std::size_t place = s % together, n = std::min(together, c.blocks.size() - s + place);
    if (place == 0) {
      index.planes.emplace_back(n * layout::PlaneBytes(c.head_dim, c.segment_blocks) / 8, ~0ull);
    }
    index.side.emplace_back(layout::SideBytes(c.codec, c.head_dim, c.mean_bits, c.segment_blocks),
                            std::uint8_t{0x77});
    std::uint64_t* planes =
        index.planes.back().data() + place * static_cast<std::size_t>(c.segment_blocks);
    // 0 says that a segment lies by itself, as its own size does.
    const std::int32_t row = n == 1 ? 0 : static_cast<std::int32_t>(n) * c.segment_blocks;
    index.views.push_back({planes, index.side.back().data(), c.blocks[s], 0, row});
    for (std::int32_t b = 0; b < c.blocks[s]; ++b) {
      backend.Pack({c.codec, c.head_dim, c.segment_blocks, c.mean_bits, b, at,
                    index.mean_step.data(), index.range.data(), planes, index.side.back().data(),
                    row});
      at += static_cast<std::ptrdiff_t>(kBlockTokens) * c.head_dim;
    }
  }
  index.n_tokens = n_blocks * kBlockTokens;
  return index;
}

// Random levels, `read` of the channels read at all.
inline std::vector<std::uint8_t> RandomLevels(std::int32_t dim, double read, int most,
                                              std::uint64_t seed) {
  Random random(seed);
  std::vector<std::uint8_t> level(static_cast<std::size_t>(dim));
  for (auto& l : level) {
    l = random.Uniform() < read ? static_cast<std::uint8_t>(random.Integer(1, most)) : 0;
  }
  return level;
}

}  // namespace test
}  // namespace fathom
