// SPDX-License-Identifier: MIT
// Indexes of labels and of whole keys.
#include <cstring>
#include <optional>
#include <utility>

#include "base/parallel.h"
#include "device/bench_packer.h"
#include "device/captured_keys.h"
#include "device/synthetic.h"
#include "fathom/label_table.h"
#include "method/channel_method.h"
#include "store/layout.h"

namespace fathom::cuda {
namespace {

// Tables of one sample as their rows of all blocks: [rows][blocks] items.
std::vector<std::byte> JoinRows(const LabelTable& table, bool codes, std::int64_t n_rows,
                                std::int64_t item) {
  const std::int64_t n_blocks = table.n_blocks();
  std::vector<std::byte> joined(Size(n_rows * n_blocks * item));
  std::int64_t first = 0;
  for (const LabelView& view : table.segments()) {
    const void* from = codes ? static_cast<const void*>(view.codes) : view.scales;
    for (std::int64_t r = 0; r < n_rows; ++r) {
      std::memcpy(joined.data() + (r * n_blocks + first) * item,
                  static_cast<const std::byte*>(from) + r * LabelTable::kSegmentBlocks * item,
                  Size(view.n_blocks * item));
    }
    first += view.n_blocks;
  }
  return joined;
}

// Keys that do not repeat leave the codes random: how fast labels are scanned does not depend on
// what they say.
class LabelBench final : public BenchIndex {
 public:
  LabelBench(const BenchMethod& method, const BenchParts& parts)
      : place_(parts.place),
        shape_(method.labels),
        coordinates_(method.coordinates),
        random_(parts.keys->tiling() == nullptr),
        memory_(parts.arena, place_.on_host),
        index_(parts.sizes(), method.labels, place_.on_host) {
    std::vector<LabelIndex::Layer> made;
    for (std::int32_t layer = 0; layer < place_.sizes.n_layers; ++layer) {
      made.push_back(MakeLayer(layer, parts));
      parts.Done(layer);
    }
    index_.SetLayers(std::move(made));
  }

  IndexScan* scan() override { return &index_; }
  bool is_random() const override { return random_; }

 private:
  bool by_channel() const { return shape_.layout == LabelLayout::kChannels; }
  // Codes are one row of whole blocks, or one for every channel; scales always one for each.
  std::int64_t table_channels() const {
    return by_channel() ? shape_.table_width : shape_.n_channels;
  }
  std::int64_t code_rows() const { return by_channel() ? shape_.table_width : 1; }
  std::int64_t code_item() const {
    return static_cast<std::int64_t>(layout::LabelBlockBytes(shape_.planes)) *
           (by_channel() ? 1 : shape_.table_width);
  }

  LabelIndex::Layer MakeLayer(std::int32_t layer, const BenchParts& parts) {
    const std::int64_t heads = place_.sizes.n_heads(), blocks = place_.cap_blocks();
    const std::int64_t code_bytes = code_rows() * code_item() * blocks;
    const std::int64_t scale_bytes = shape_.table_width * blocks * 2;
    std::byte* codes = memory_.Take(heads * code_bytes);
    std::byte* scales = memory_.Take(heads * scale_bytes);
    if (random_) {
      const std::uint64_t seed = (place_.seed + static_cast<std::uint64_t>(layer)) << 40;
      FillCodes(codes, heads * code_bytes, seed, parts.stream);
      FillScales(reinterpret_cast<Half*>(scales), heads * scale_bytes / 2, seed ^ 1, parts.stream);
    } else {
      PackLayer(layer, parts, codes, code_bytes, scales, scale_bytes);
    }
    segments_.push_back(Pointers<const std::byte>(codes, heads, code_bytes));
    segments_.push_back(Pointers<const std::byte>(scales, heads, scale_bytes));
    std::vector<LabelPiece> pieces;
    for (std::int64_t h = 0; h < heads; ++h) {
      const auto* own = reinterpret_cast<const std::uint8_t*>(codes + h * code_bytes);
      const auto* own_scales = reinterpret_cast<const Half*>(scales + h * scale_bytes);
      pieces.push_back(
          {place_.on_host ? index_.staged_codes() + h * index_.code_bytes() : own,
           place_.on_host ? index_.staged_scales() + h * shape_.n_channels * blocks : own_scales,
           static_cast<std::int32_t>(blocks),
           static_cast<std::int32_t>(place_.n_tokens / kBlockTokens), 0,
           static_cast<std::int32_t>(h)});
    }
    pieces_.push_back(ToDevice(pieces));
    const auto segment_blocks = static_cast<std::int32_t>(blocks);
    return {pieces_.back().data(),
            {segments_[segments_.size() - 2].data(), 1, segment_blocks},
            {segments_.back().data(), 1, segment_blocks},
            channels_.empty() ? nullptr : channels_.back().data(),
            maps_.empty() ? nullptr : maps_.back().data()};
  }

  // A sample's table, and what a query needs to know of it.
  struct Packed {
    LabelTable table;
    std::vector<std::int32_t> channels;  // of the basis
    Basis basis;
  };

  Packed PackSample(BenchKeys* keys, std::int32_t set, std::int32_t sample,
                    const Backend& backend) const {
    using Coordinates = BenchMethod::Coordinates;
    const auto n = static_cast<std::int32_t>(table_channels());
    Packed packed{LabelTable({shape_.layout, shape_.planes, n}), AllChannels(n),
                  RawBasis(place_.sizes.heads.head_dim, {})};
    if (coordinates_ == Coordinates::kLargest) {
      packed.channels = LargestChannels(keys->Stats(set, sample, BasisRule::kRaw, true), n);
    } else if (coordinates_ == Coordinates::kPrincipal) {
      packed.basis = keys->Stats(set, sample, BasisRule::kKlt, false).basis;
    }
    const SampleRows rows = keys->Sample(set, sample);
    packed.table.AppendRows(rows.rows, packed.basis, packed.channels, rows.n_blocks, backend);
    return packed;
  }

  // The keys that repeat are packed once, on the host, and their blocks copied to where they recur.
  void PackLayer(std::int32_t layer, const BenchParts& parts, std::byte* codes,
                 std::int64_t code_bytes, std::byte* scales, std::int64_t scale_bytes) {
    BenchKeys& keys = *parts.keys;
    const std::int32_t set = layer % keys.n_sets();
    std::vector<Packed> packed(Size(keys.n_samples()));
    const auto backend = MakeBackend("cpu", 0);
    ParallelFor(keys.n_samples(), backend->n_threads(), [&](std::int64_t s) {
      packed[Size(s)] = PackSample(&keys, set, static_cast<std::int32_t>(s), *backend);
    });
    Put(packed, true, code_rows(), code_item(), parts, codes, code_bytes);
    Put(packed, false, table_channels(), sizeof(Half), parts, scales, scale_bytes);
    std::vector<std::int32_t> channels;
    std::vector<float> map;
    for (std::int32_t h = 0; h < place_.sizes.n_heads(); ++h) {
      const Packed& one = packed[Size(keys.SampleOf(h))];
      channels.insert(channels.end(), one.channels.begin(), one.channels.end());
      for (std::size_t d = 0; d < one.basis.query_map.size(); d += Size(one.basis.dim)) {
        for (const std::int32_t c : one.channels) map.push_back(one.basis.query_map[d + Size(c)]);
      }
    }
    if (coordinates_ == BenchMethod::Coordinates::kLargest) channels_.push_back(ToDevice(channels));
    if (coordinates_ == BenchMethod::Coordinates::kPrincipal) maps_.push_back(ToDevice(map));
  }

  // Codes or scales of all heads, also of the blocks that fill the last tile up.
  void Put(const std::vector<Packed>& packed, bool codes, std::int64_t n_rows, std::int64_t item,
           const BenchParts& parts, std::byte* to, std::int64_t head_bytes) {
    std::vector<std::byte> all;
    for (const Packed& sample : packed) {
      const std::vector<std::byte> one = JoinRows(sample.table, codes, n_rows, item);
      all.insert(all.end(), one.begin(), one.end());
    }
    const DeviceBuffer<std::byte> from = ToDevice(all);
    const auto heads = Pointers(to, place_.sizes.n_heads(), head_bytes);
    RepeatItems repeat = BlocksOf(place_.sizes, *parts.keys, from.data(), item);
    repeat.n_rows = static_cast<std::int32_t>(n_rows);
    repeat.to = heads.data();
    repeat.to_stride = repeat.n = place_.cap_blocks();
    Repeat(repeat, parts.stream);
    Check(cudaStreamSynchronize(parts.stream), "cudaStreamSynchronize");
  }

  const BenchPlace place_;
  const LabelIndex::Shape shape_;
  const BenchMethod::Coordinates coordinates_;
  const bool random_;
  Memory memory_;
  LabelIndex index_;
  std::vector<DeviceBuffer<const std::byte*>> segments_;
  std::vector<DeviceBuffer<LabelPiece>> pieces_;
  std::vector<DeviceBuffer<std::int32_t>> channels_;  // as LabelIndex::Layer has them
  std::vector<DeviceBuffer<float>> maps_;
};

// Keys themselves, or the means of chunks; of keys that do not repeat normal numbers.
class KeyBench final : public BenchIndex {
 public:
  KeyBench(const BenchMethod& method, const BenchParts& parts)
      : place_(parts.place),
        n_keys_(place_.n_tokens / kBlockTokens * kBlockTokens / method.chunk),
        cap_keys_((n_keys_ + kTileTokens) / kTileTokens * kTileTokens),
        random_(parts.keys->tiling() == nullptr),
        memory_(parts.arena, place_.on_host),
        counts_(ToDevice(std::vector<std::int32_t>(Size(place_.sizes.n_heads()),
                                                   static_cast<std::int32_t>(n_keys_)))),
        index_({place_.sizes.heads, place_.sizes.batch, cap_keys_ / kBlockTokens, parts.lengths},
               method.chunk, place_.sizes.heads.head_dim, counts_.data(),
               static_cast<std::int32_t>(n_keys_), place_.on_host) {
    const std::int64_t heads = place_.sizes.n_heads(), dim = place_.sizes.heads.head_dim;
    const std::int64_t head_bytes = cap_keys_ * dim * 2;
    std::optional<Packer> packer;
    if (!random_) packer.emplace(parts);
    std::vector<KeyIndex::Layer> made;
    for (std::int32_t layer = 0; layer < place_.sizes.n_layers; ++layer) {
      std::byte* keys = memory_.Take(heads * head_bytes);
      if (packer) {
        Pack(layer, keys, head_bytes, method.chunk, parts.stream, &*packer);
      } else {
        FillNormal(reinterpret_cast<Half*>(keys), heads * head_bytes / 2, 1.0F,
                   (place_.seed + static_cast<std::uint64_t>(layer)) << 40, parts.stream);
      }
      segments_.push_back(Pointers<const std::byte>(keys, heads, head_bytes));
      keys_.push_back(Pointers<const Half>(
          place_.on_host ? index_.staged() : reinterpret_cast<Half*>(keys), heads, head_bytes / 2));
      HostSegments table;
      if (place_.on_host) {
        table = {segments_.back().data(), 1, static_cast<std::int32_t>(cap_keys_ / kBlockTokens)};
      }
      made.push_back({keys_.back().data(), table});
      parts.Done(layer);
    }
    index_.SetLayers(std::move(made),
                     place_.on_host ? static_cast<double>(heads * n_keys_ * dim * 2) : 0.0);
  }

  IndexScan* scan() override { return &index_; }
  bool is_random() const override { return random_; }

 private:
  void Pack(std::int32_t layer, std::byte* keys, std::int64_t head_bytes, std::int32_t chunk,
            cudaStream_t stream, Packer* packer) {
    const auto heads = Pointers(keys, place_.sizes.n_heads(), head_bytes);
    const std::int64_t per_block = kBlockTokens / chunk;
    packer->ForChunks(layer, [&](std::int64_t first, std::int64_t n) {
      FillMeanKeys({place_.sizes.n_heads(), place_.sizes.heads.head_dim, chunk, packer->rows(),
                    heads.data(), first * per_block, n * per_block},
                   stream);
    });
    Check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }

  const BenchPlace place_;
  const std::int64_t n_keys_, cap_keys_;
  const bool random_;
  Memory memory_;
  DeviceBuffer<std::int32_t> counts_;
  KeyIndex index_;
  std::vector<DeviceBuffer<const std::byte*>> segments_;
  std::vector<DeviceBuffer<const Half*>> keys_;
};

}  // namespace

std::unique_ptr<BenchIndex> MakeLabelBench(const BenchMethod& method, const BenchParts& parts) {
  return std::make_unique<LabelBench>(method, parts);
}

std::unique_ptr<BenchIndex> MakeKeyBench(const BenchMethod& method, const BenchParts& parts) {
  return std::make_unique<KeyBench>(method, parts);
}

}  // namespace fathom::cuda
