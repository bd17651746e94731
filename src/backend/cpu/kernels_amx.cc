// SPDX-License-Identifier: MIT
// Kernel set "amx": the set "avx512vbmi" with prefill in tiles of bf16. The includes inside the
// namespace are on purpose: see kernels.h.
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

KernelTable DeriveTable() {
  KernelTable table = *PlainKernels();
  table.isa = "amx";
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
