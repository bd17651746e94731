// SPDX-License-Identifier: MIT
// Decode steps of a session wholly on a device, from the token to the logits, without the host in
// between. What a session sees of them; nothing here needs CUDA to be included.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "fathom/method.h"
#include "fathom/model.h"

namespace fathom {

// One session, one thread.
class SessionDecode {
 public:
  virtual ~SessionDecode() = default;

  // Decode will follow: begins to register the memory of rows, where the method's steps are likely
  // to be made here.
  virtual void Expect(Method& method) = 0;
  // Makes ready for the step behind the first n_tokens tokens, whose rows are complete. Returns why
  // the device cannot make it, or nothing. Throws what CUDA reports, but no lack of memory.
  virtual std::string Prepare(Method& method, std::int64_t n_tokens) = 0;
  // The step that was made ready: writes the token's rows, counts as Method::Attend would, and
  // returns the logits, valid until the next step. token: of the vocabulary. Throws what CUDA
  // reports; then nothing has changed but memory of rows beyond the session.
  virtual std::span<const float> Step(Method& method, Token token) = 0;
  // Rows, index or method changed otherwise.
  virtual void Forget() = 0;
};

// On the first CUDA device; with FATHOM_CUDA only. The weights are those of the model's runners.
// rows must outlive the result and may not be mapped anew from the first call on. Throws Error:
// kUnsupported, kNoMemory, what CUDA reports.
std::unique_ptr<SessionDecode> MakeSessionDecode(std::shared_ptr<const Model> model, RowStore* rows,
                                                 int n_threads);

}  // namespace fathom
