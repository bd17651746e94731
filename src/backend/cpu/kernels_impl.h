// SPDX-License-Identifier: MIT
// The kernels of one instruction set, written once over the words of simd_*.h. Included inside the
// anonymous namespace of kernels_<isa>.cc, after the vocabulary: never on its own.

// Kernels address planes as plane * row_blocks + block and expand bits from the lowest up.
// layout.h owns that; it is used in constant expressions only, see kernels.h for why.
static_assert(layout::PlaneWord(3, 2, 5, 64) == (3 * kPlanes + 2) * 64 + 5);
static_assert(layout::Code(2, 0, 2, 0, 1) == 10);
static_assert(layout::UnpackNibble(0x5A, 0) == 10 - 8 && layout::UnpackNibble(0x5A, 1) == 5 - 8);
static_assert(layout::SideBytes(Codec::kMean, 3, 4, 64) == 3 * 32);
static_assert(layout::TokenLabel(2, 32, 29, 1, 3).byte == (2 + 1) * 256 + 3 * 4 + 1);
static_assert(layout::TokenLabel(2, 32, 29, 1, 3).shift == 6);
static_assert(layout::ChannelLabel(64, 3, 5, 44).byte == (3 * 64 + 5) * 32 + 16 + 4);
static_assert(layout::SideBytes(Codec::kMean, 3, 8, 64) == 3 * 64);

#include "backend/cpu/attend_impl.h"
#include "backend/cpu/attend_list_impl.h"
#include "backend/cpu/mass_impl.h"
#include "backend/cpu/pack_impl.h"
#include "backend/cpu/prefill_impl.h"
#include "backend/cpu/scan_labels_impl.h"
#include "backend/cpu/scan_mean_impl.h"
#include "backend/cpu/scan_paper_impl.h"
#include "backend/cpu/score_impl.h"
#include "backend/cpu/select_impl.h"
#include "backend/cpu/weigh_impl.h"

#include "backend/cpu/rank_impl.h"
// The scans of the set: those its file has asked for.
#ifdef FATHOM_SCAN_MASKED
#include "backend/cpu/scan_masked_impl.h"
#endif
#ifdef FATHOM_SCAN_NIBBLE
#include "backend/cpu/scan_nibble_impl.h"
#endif
#ifdef FATHOM_SCAN_WIDE
#include "backend/cpu/scan_wide_impl.h"
#endif

constexpr KernelTable MakeTable(const char* isa, decltype(KernelTable::scan_plan_bytes) plan_bytes,
                                decltype(KernelTable::scan_plan) plan,
                                decltype(KernelTable::scan_sums) sums) {
  return {
      .isa = isa,
      .pack_sums = PackSums,
      .pack_maxima = PackMaxima,
      .pack_codes = PackCodes,
      .scan_plan_bytes = plan_bytes,
      .scan_plan = plan,
      .scan_sums = sums,
      .scan_base_plan_bytes = nullptr,
      .scan_base_plan = nullptr,
      .scan_base = ScanBase,
      .scan_scores = ScanScores,
      .scan_paper = ScanPaper,
      .score_rows = ScoreRows,
      .scan_labels = ScanLabels,
      .mass_blocks = MassBlocks,
      .top_k = TopK,
      .rank_blocks = RankBlocks,
      .rank_keys = RankKeys,
      .rank_union = RankUnion,
      .kth_key = RankKthKey,
      .attend_listed = AttendListed,
      .attend_keys = AttendKeys,
      .attend_dense = AttendDense,
      .weigh_blocks = WeighBlocks,
      .prefill_scratch = PrefillScratch,
      .prefill_tile = PrefillTile,
  };
}
