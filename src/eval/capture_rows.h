// SPDX-License-Identifier: MIT
// A capture's layer in the form in which a session holds it: rows, and queries sampled from its
// prefill.
#pragma once

#include <cstdint>

#include "fathom/capture.h"
#include "fathom/stats.h"
#include "fathom/store.h"

namespace fathom {

// Writes tokens 0 .. n_tokens - 1 of a layer to layer `slot` of the rows. Throws as
// CaptureFile::LoadRows.
void LoadCaptureRows(const CaptureFile& capture, std::int32_t layer, std::int64_t n_tokens,
                     std::int32_t slot, RowStore* rows);

// The queries for statistics at positions below `end`, times factor; `recent` are the last 16, as
// of a session. Throws as CaptureFile::LoadStatsQueries.
LayerQueries LoadCaptureSamples(const CaptureFile& capture, std::int32_t layer, std::int64_t end,
                                float factor = 1.0F);

}  // namespace fathom
