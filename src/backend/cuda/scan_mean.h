// SPDX-License-Identifier: MIT
// Scans of the mean codec on the device, in the integers that backend.h defines (ScanTable): every
// score equals `ref` bit for bit.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>

#include "backend/cuda/buffer.h"
#include "backend/cuda/lists.h"
#include "fathom/backend.h"

namespace fathom::cuda {

// Planes that the tensor-core filter takes of a table: two operands of 32. Tables with more (or
// with weights that fill more) are filtered by the plain kernel.
constexpr int kFilterSlots = 64;
constexpr int kMostParts = 8;  // of a ScanTable
// The one ScoreSink::tile_step of samples: a token of every block.
constexpr int kMeanSampleStep = kBlockTokens;

// The numbers of a ScanTable.
struct MeanTableHead {
  std::int32_t n_planes;
  std::int32_t n_slots;  // planes as the filter reads them, set by PrepareTables
  std::int32_t n_channels;
  std::int32_t n_parts;
  std::int32_t part_end[kMostParts];
  std::int32_t low[kMostParts * kMaxGroup];  // [part][kMaxGroup]
  std::int32_t constant[kMaxGroup];
  std::int32_t shift[kMaxGroup];
  std::int32_t mean_total[kMaxGroup];  // sum of the mean weights, set by PrepareTables
  float scale[kMaxGroup];
};

// ScanTables on the device; the arrays have one row per table. What is not said to be set by
// PrepareTables is written by whoever makes the tables.
struct MeanTables {
  std::int32_t n_tables;
  std::int32_t head_dim;
  std::int32_t group;
  MeanTableHead* head;        // [n_tables]
  std::int16_t* plane;        // [n_tables][4D] channel * 4 + p, part by part
  std::int16_t* weight;       // [n_tables][4D][group]
  std::int16_t* channel;      // [n_tables][D]
  std::int32_t* mean_weight;  // [n_tables][D][group]
  // Set by PrepareTables.
  std::uint32_t* packed;  // [n_tables][4D][ceil(group / 4)] sum of weight_h << 8 (h % 4)
  std::int16_t* slot;     // [n_tables][kFilterSlots] index of a plane, or -1
  uint2* fragment;        // [n_tables][column group][2][32] weights as operands of the MMA
  uint2* mean_fragment;   // [n_tables][column group][chunk of 32 channels][3 digits][32]
};
FATHOM_HD constexpr int ColumnGroups(int group) { return (group + 7) / 8; }
FATHOM_HD constexpr int MeanChunks(int head_dim) { return (head_dim + 31) / 32; }

// Memory of MeanTables.
class MeanTableSet {
 public:
  MeanTableSet(std::int32_t n_tables, std::int32_t head_dim, std::int32_t group);
  const MeanTables& view() const { return view_; }
  // Copies host tables in and prepares them.
  void Upload(std::span<const ScanTable* const> tables, cudaStream_t stream);

 private:
  MeanTables view_{};
  DeviceBuffer<MeanTableHead> head_;
  DeviceBuffer<std::int16_t> plane_, weight_, channel_, slot_;
  DeviceBuffer<std::int32_t> mean_weight_;
  DeviceBuffer<std::uint32_t> packed_;
  DeviceBuffer<uint2> fragment_, mean_fragment_;
};

// Fills what MeanTables says.
void PrepareTables(const MeanTables& tables, cudaStream_t stream);

// Blocks of one head that lie together and are read by one table; an array of them in device
// memory. Words and means beyond n_blocks up to the next multiple of 16 blocks are read and may
// hold anything.
struct ScanPiece {
  const std::uint64_t* planes;  // 16-byte aligned; row r, block b at planes[r * plane_stride + b]
  std::int64_t plane_stride;    // words, a multiple of 16
  const std::uint8_t* means;    // row c at means + c * mean_stride, as docs/format.md packs them
  std::int64_t
      mean_stride;  // bytes, a multiple of 8 (4-bit means) or 16 (8-bit); rows are aligned to 8
  std::int32_t n_blocks;
  std::int32_t first_block;  // the first one's index in the sequence
  std::int32_t head;
  std::int32_t table;
  // Rows are those of the store (plane: channel * 4 + p), or only what the table reads, in its
  // order.
  bool gathered_planes;
  bool gathered_means;
};

struct MeanScan {
  MeanTables tables;
  std::int32_t mean_bits;
  std::int32_t n_kv_heads;
  const ScanPiece* pieces;
  std::int32_t n_pieces;
  std::int32_t max_tiles;  // most tiles of a piece: the grid's size
  const Lengths* lengths;  // [n_sequences]
  ScoreSink sink;
  // With candidates: rest[list * rest_stride + block] = sum over the block's tokens in [first,
  // last) of min(1, exp(exp_scale * (score - least))), where not null. Blocks without candidates'
  // range get what their tokens inside it sum to.
  float* rest;
  std::int64_t rest_stride;
  float exp_scale;
  // base of every block, as ScanTable has it: samples and candidates read them, FillBases writes
  // them. [n_lists][bases_stride]
  std::int32_t* bases;
  std::int32_t* next_tile;  // [n_pieces] scratch of the filter, zeroed by FillBases
  // At least first_block + n_blocks in whole tiles of 16, for every piece: whole tiles are read.
  std::int64_t bases_stride;
  // Instead of scores: U of every token and base of every block.
  std::uint8_t* sums;  // [n_lists][sink.stride]
  std::int32_t* base;  // [n_lists][base_stride]
  std::int64_t base_stride;
};
void ScanMean(const MeanScan& scan, cudaStream_t stream);
// Fills `bases` for tables and pieces; before samples are scanned, and before every scan of
// candidates. Means have been there before the step. beside_gather: it runs beside the gather of
// planes that is launched before it.
void FillBases(const MeanScan& scan, cudaStream_t stream, bool beside_gather = false);

}  // namespace fathom::cuda
