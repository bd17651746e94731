// SPDX-License-Identifier: MIT
// Kernel set "amx": the set "avx512vbmi" with prefill in tiles of bf16 and the bases of blocks in
// tiles of bytes. The includes inside the namespace are on purpose: see kernels.h.
// GCC bug 105593: the "undefined" operand of unmasked intrinsics counts as read.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <immintrin.h>

#include <cstdint>

#include "backend/cpu/kernels.h"

#define FATHOM_INLINE inline __attribute__((always_inline))

namespace fathom::cpu {
namespace {

FATHOM_INLINE const KernelTable* PlainKernels() { return Avx512VbmiKernels(); }

#include "backend/cpu/simd_avx512.h"

#include "backend/cpu/tile_amx.h"

#include "backend/cpu/prefill_amx_impl.h"

#include "backend/cpu/base_codes_vbmi.h"

#include "backend/cpu/scan_base_plan_impl.h"

#include "backend/cpu/scan_base_amx_impl.h"

KernelTable DeriveTable() {
  KernelTable table = *PlainKernels();
  table.isa = "amx";
  table.scan_base_plan_bytes = TileBasePlanBytes;
  table.scan_base_plan = MakeTileBasePlan;
  table.scan_base = TileBase;
  table.prefill_scratch = PrefillScratch;
  table.prefill_tile = PrefillTile;
  return table;
}

}  // namespace

const KernelTable* AmxKernels() {
  static const KernelTable kTable = DeriveTable();
  return &kTable;
}

}  // namespace fathom::cpu
