// SPDX-License-Identifier: MIT
// The two stores of a session: rows (keys and values at full precision) and the bit-plane index of
// the keys. Byte layouts: docs/format.md. Both are single-writer; concurrent readers are safe while
// nobody writes.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "fathom/backend.h"
#include "fathom/stats.h"
#include "fathom/types.h"

namespace fathom {

class BlockReader;
class Reservation;
class StateReader;
class StateWriter;

// Keys and values in fp16, K and V of a token adjacent:
// [n_layers][n_kv_heads][capacity, in whole blocks][2][head_dim]. Address space for `capacity`
// tokens is reserved at once, so rows never move; memory is taken as tokens arrive.
class RowStore {
 public:
  // Throws Error(kNoMemory) when the address space cannot be reserved, Error(kUsage) for an invalid
  // geometry.
  RowStore(std::int32_t n_layers, HeadGeometry geometry, std::int64_t capacity);
  ~RowStore();
  RowStore(const RowStore&) = delete;
  RowStore& operator=(const RowStore&) = delete;

  std::int32_t n_layers() const { return n_layers_; }
  const HeadGeometry& geometry() const { return geometry_; }
  std::int64_t capacity() const { return capacity_; }
  // Tokens complete in all layers.
  std::int64_t n_tokens() const { return n_tokens_; }

  // Writes rows of tokens first .. first + n - 1 of one layer, rounding to nearest even. k, v:
  // [n][n_kv_heads][D]. Requires first + n <= capacity. Does not change n_tokens(): call Commit
  // when all layers are written.
  void Write(std::int32_t layer, std::int64_t first, std::int64_t n, const float* k,
             const float* v);
  void Commit(std::int64_t n_tokens) { n_tokens_ = n_tokens; }
  // Tokens first .. first + n - 1 of every layer and KV head become those of an open file, read as
  // they are needed and never written back to it: rows of layer l and KV head h are the first n of
  // those that begin (l * n_kv_heads + h) * stride tokens from offset. first and stride: multiples
  // of 64 tokens, n <= stride; offset: bytes, a multiple of the page. The file must not shrink
  // while the store lives. Does not change n_tokens(). Throws Error(kIo) when the system refuses,
  // Error(kUsage) when first + n exceeds the capacity.
  void Map(std::int64_t first, std::int64_t n, std::int64_t stride, int file, std::int64_t offset);
  // Forgets tokens from n_tokens on; their memory stays taken and is written again. Requires
  // n_tokens <= n_tokens().
  void Truncate(std::int64_t n_tokens) { n_tokens_ = n_tokens; }

  // Rows of one KV head: token i at result + i * 2 * head_dim.
  const Half* rows(std::int32_t layer, std::int32_t kv_head) const;
  // The same to write to, `capacity` tokens in whole blocks, at a multiple of 4 KiB.
  Half* rows(std::int32_t layer, std::int32_t kv_head);

  // Closed form: n_layers * n_kv_heads * n_tokens * 2 * head_dim * 2 bytes.
  static std::int64_t Bytes(std::int32_t n_layers, HeadGeometry geometry, std::int64_t n_tokens);
  std::int64_t MemoryBytes() const { return Bytes(n_layers_, geometry_, n_tokens_); }

 private:
  Half* head(std::int32_t layer, std::int32_t kv_head) const;

  std::int32_t n_layers_;
  HeadGeometry geometry_;
  std::int64_t capacity_;
  std::int64_t stride_;  // tokens from one KV head to the next, whole blocks
  std::int64_t n_tokens_ = 0;
  std::unique_ptr<Reservation> memory_;
};

// Shape of the index of one KV head. segment_blocks: capacity of a segment, even and positive.
struct IndexShape {
  Codec codec = Codec::kMean;
  std::int32_t head_dim = 0;
  std::int32_t mean_bits = 4;  // 4 or 8, mean codec only
  std::int32_t segment_blocks = 64;

  // Planes and means or scales of one segment.
  std::int64_t SegmentBytes() const;
  // Segments needed for n_blocks times SegmentBytes: what HeadIndex::MemoryBytes reports.
  std::int64_t IndexBytes(std::int64_t n_blocks) const;
};

// Frozen steps and decoders of the mean codec, per channel (design 3.1 points 1 and 2).
struct MeanCodec {
  std::vector<float>
      mean_step;  // [D] step of the quantized block means: 4 sigma of the block means / lim
  std::vector<float> range;  // [D] a_j, see Ranges; a cell is a_j / 8
  std::vector<float>
      weight;  // [D][4][4]: weight[t-1][p] of bipolar bit p when t planes are read, least squares
};

// How the planes of the mean codec are turned into values.
enum class Decoders : std::uint8_t {
  kLeastSquares,  // weights fitted on the keys (design 3.1 point 2)
  kCentre,        // centres of the quantizer's cells: weight a_j 2^-(p+1)
};

// How wide the planes of the mean codec reach, per channel.
enum class Ranges : std::uint8_t {
  // The multiple of the residual's rms, of 2, 3, 4, 6, 8 and 11, whose decoders leave the least
  // distortion (sum of logarithms over 2, 3 and 4 planes). Channels with rare large values, which
  // some models use to mark the tokens that all others look at, need far more than 2.
  kMeasured,
  kRms,  // twice the residual's rms (design 3.1 point 1)
};

// Choices of an index that do not change its shape.
struct IndexRules {
  Ranges ranges = Ranges::kMeasured;            // mean codec
  Decoders decoders = Decoders::kLeastSquares;  // mean codec
  bool distortions = false;  // keep what Distortions() needs; the mean codec always does
};

// Bit-plane index of one KV head of one layer.
//
// Invariants: (1) a finished block is never rewritten; (2) all segments made by Build share codec
// 0 and lie in one piece of memory that begins with the planes of the first, while nothing was
// truncated; a segment added later has its own codec, fitted on the rows of the segment before it;
// (3) Distortions() follows the whole index.
class HeadIndex {
 public:
  HeadIndex(IndexShape shape, Basis basis, IndexRules rules = {});
  ~HeadIndex();
  HeadIndex(HeadIndex&&) noexcept;
  HeadIndex& operator=(HeadIndex&&) noexcept;

  // Fits the codec on blocks 0 .. n_blocks - 1 and packs them. rows: [n_blocks * 64][2][D].
  // Requires an empty index. codec: steps and decoders to use instead of fitted ones (mean codec;
  // from a calibration), or null.
  void Build(const Half* rows, std::int64_t n_blocks, const Backend& backend,
             const MeanCodec* codec = nullptr);
  // Packs blocks n_blocks() .. n_blocks - 1. rows: the same base as in Build. Requires n_blocks() >
  // 0 before. When memory runs out, the blocks packed so far stay.
  void Append(const Half* rows, std::int64_t n_blocks, const Backend& backend);
  // Forgets blocks from n_blocks on. What remains is as if they had never been appended; the codec
  // of Build stays as it was fitted. With n_blocks = 0 the index is empty again.
  void Truncate(const Half* rows, std::int64_t n_blocks);

  // Writes all but shape, basis and rules, full segments as sealed pieces. Not const: these get
  // ids by which they are known again.
  void Save(StateWriter* out);
  // What Save has written of an index of the same shape, basis and rules; segments stay where the
  // reader has them. Requires an empty index. Throws Error(kCorrupt).
  void Load(StateReader* in);

  const IndexShape& shape() const { return shape_; }
  const Basis& basis() const { return basis_; }
  std::int64_t n_blocks() const { return n_blocks_; }
  std::int64_t n_tokens() const { return n_blocks_ * kBlockTokens; }
  std::span<const SegmentView> segments() const { return views_; }
  // Codecs in use; SegmentView::table indexes them. Empty for the paper codec.
  std::span<const MeanCodec> codecs() const { return codecs_; }
  // Mean squared error of every level over all indexed keys, [kLevels][D]. Of the paper codec only
  // with IndexRules::distortions; its level 1, which it does not have, is that of level 0.
  std::vector<double> Distortions() const;
  std::int64_t MemoryBytes() const { return shape_.IndexBytes(n_blocks_); }

 private:
  struct Segment;
  struct Built;
  void PackBlocks(const Half* rows, std::int64_t n_blocks, const Backend& backend, bool building);
  void AddSegment(std::int32_t table);
  void AddNextSegment(BlockReader& reader, const Backend& backend);
  std::vector<double> SegmentErrors(std::size_t s) const;
  void CloseSegment(std::size_t s, std::vector<double> errors);
  PackArgs BlockArgs(std::int32_t block, const float* x);
  void Clear();
  bool tracks() const { return shape_.codec == Codec::kMean || rules_.distortions; }

  IndexShape shape_;
  Basis basis_;
  IndexRules rules_;
  std::vector<float> cell_weight_;  // [D][4][4] of the paper codec, in units of the block's scale
  std::int64_t n_blocks_ = 0;
  std::unique_ptr<Built> built_;  // memory of the segments that Build made
  std::vector<Segment> segments_;
  std::vector<SegmentView> views_;
  std::vector<MeanCodec> codecs_;
  std::vector<double>
      closed_errors_;  // [kLevels][D] summed squared errors of all segments but the last
};

}  // namespace fathom
