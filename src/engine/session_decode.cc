// SPDX-License-Identifier: MIT
// Where a session's decode steps are made: wholly on the device, or layer by layer with attention
// by the backend.
#include <utility>

#include "base/timer.h"
#include "engine/session_impl.h"
#include "fathom/error.h"

namespace fathom {

void Session::Impl::OpenDeviceDecode() {
  if (options.device != "cuda" || options.decode_attention != "device") return;
  try {
    device_decode = MakeSessionDecode(model, &rows, backend->n_threads());
  } catch (const Error& error) {
    // The forward pass has its memory; what is missing is that of decode.
    if (error.code() != ErrorCode::kNoMemory) throw;
    no_device_decode = error.what();
  }
}

bool Session::Impl::PrepareDevice() {
  std::string why = no_device_decode;
  if (device_decode) {
    why = device_decode->Prepare(*method, static_cast<std::int64_t>(tokens.size()));
    if (why.empty()) {
      decode_attention = "device";
      return true;
    }
  }
  decode_attention = why.empty() ? "cpu" : "cpu: " + why;
  return false;
}

void Session::Impl::DecodeByBackend(Token token) {
  const auto position = static_cast<std::int64_t>(tokens.size());
  double attention_s = 0;
  const auto attention = [&](std::int32_t layer, std::int64_t /*n*/, const float* q, const float* k,
                             const float* v, float* out) {
    const double layer_start = NowSeconds();
    rows.Write(layer, position, 1, k, v);
    method->Attend(layer, position + 1, q, out);
    attention_s += NowSeconds() - layer_start;
  };
  try {
    logits = runner.Forward({&token, 1}, position, attention, true);
  } catch (...) {
    method->Truncate(
        position);  // a block that this step finished may have joined the index of some layers
    throw;
  }
  times.decode_attention_s += attention_s;
}

}  // namespace fathom
