// SPDX-License-Identifier: MIT
// Kernel set "avx512vbmi". The includes inside the namespace are on purpose: see kernels.h.
// GCC bug 105593: the "undefined" operand of unmasked intrinsics counts as read.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <immintrin.h>

#include <cstdint>

#include "backend/cpu/kernels.h"
#include "store/layout.h"

#define FATHOM_SCAN_WIDE
#define FATHOM_INLINE inline __attribute__((always_inline))

namespace fathom::cpu {
namespace {

#include "backend/cpu/simd_avx512.h"

#include "backend/cpu/kernels_impl.h"

#include "backend/cpu/base_codes_vbmi.h"

#include "backend/cpu/scan_base_plan_impl.h"

#include "backend/cpu/scan_base_wide_impl.h"

constexpr KernelTable WideTable() {
  KernelTable table = MakeTable("avx512vbmi", WidePlanBytes, MakeWidePlan, WideSums);
  table.scan_base_plan_bytes = WideBasePlanBytes;
  table.scan_base_plan = MakeWideBasePlan;
  table.scan_base = WideBase;
  return table;
}

constexpr KernelTable kTable = WideTable();

}  // namespace

const KernelTable* Avx512VbmiKernels() { return &kTable; }

}  // namespace fathom::cpu
