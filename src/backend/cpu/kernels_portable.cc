// SPDX-License-Identifier: MIT
// Kernel set "portable". The includes inside the namespace are on purpose: see kernels.h.
#include <cstdint>

#include "backend/cpu/kernels.h"
#include "store/layout.h"

#define FATHOM_SCAN_MASKED
#define FATHOM_INLINE inline __attribute__((always_inline))

namespace fathom::cpu {
namespace {

#include "backend/cpu/simd_portable.h"

#include "backend/cpu/kernels_impl.h"

constexpr KernelTable kTable = MakeTable("portable", MaskedPlanBytes, MakeMaskedPlan, MaskedSums);

}  // namespace

const KernelTable* PortableKernels() { return &kTable; }

}  // namespace fathom::cpu
