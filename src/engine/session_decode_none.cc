// SPDX-License-Identifier: MIT
// Decode steps on a device in a build without CUDA, where no session has one.
#include "device/session_decode.h"
#include "fathom/error.h"

namespace fathom {

std::unique_ptr<SessionDecode> MakeSessionDecode(std::shared_ptr<const Model> /*model*/,
                                                 RowStore* /*rows*/, int /*n_threads*/) {
  throw Error(ErrorCode::kUnsupported,
              "this build has no CUDA; configure with -DFATHOM_CUDA=ON, or use device 'cpu'");
}

}  // namespace fathom
