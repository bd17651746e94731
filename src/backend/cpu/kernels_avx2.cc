// SPDX-License-Identifier: MIT
// Kernel set "avx2". The includes inside the namespace are on purpose: see kernels.h.
#include <immintrin.h>

#include <cstdint>

#include "backend/cpu/kernels.h"
#include "store/layout.h"

#define FATHOM_SCAN_MASKED
#define FATHOM_SCAN_NIBBLE
#define FATHOM_INLINE inline __attribute__((always_inline))

namespace fathom::cpu {
namespace {

#include "backend/cpu/simd_avx2.h"

#include "backend/cpu/kernels_impl.h"

constexpr KernelTable kTable = MakeTable("avx2", NibblePlanBytes, MakeNibblePlan, NibbleSums);
constexpr KernelTable kMaskedTable =
    MakeTable("avx2-masked", MaskedPlanBytes, MakeMaskedPlan, MaskedSums);

}  // namespace

const KernelTable* Avx2Kernels() { return &kTable; }
const KernelTable* Avx2MaskedKernels() { return &kMaskedTable; }

}  // namespace fathom::cpu
