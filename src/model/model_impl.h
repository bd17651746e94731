// SPDX-License-Identifier: MIT
// The inside of a Model, for the other files of this module.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "fathom/model.h"
#include "model/gguf_file.h"
#include "model/hparams.h"
#include "model/tokenizer.h"
#include "model/weights.h"

namespace fathom {

struct Model::Impl {
  explicit Impl(const std::string& path)
      : file(path), hparams(ReadHParams(file)), weights(file, hparams), tokenizer(file) {}

  // The weights as graphs use them: repacked on the first call, since a program that only looks at
  // a model or tokenizes should not pay for it. Thread-safe.
  const Weights& GraphWeights() const {
    std::call_once(repack_once, [this] {
      file.mapping().Prefetch();
      weights.Repack();
    });
    return weights;
  }

  // What a device keeps of the weights: shared by all runners on it, made by the first and gone
  // with the last. Returns what make() does, or did. Thread-safe.
  template <typename Fn>
  std::shared_ptr<const void> OnDevice(const Fn& make) const {
    const std::lock_guard<std::mutex> lock(device_mutex);
    std::shared_ptr<const void> shared = device_weights.lock();
    if (!shared) {
      shared = make();
      device_weights = shared;
    }
    return shared;
  }

  GgufFile file;
  HParams hparams;
  mutable Weights weights;  // changed by GraphWeights only
  Tokenizer tokenizer;
  ModelInfo info;
  mutable std::once_flag fingerprint_once;
  mutable std::string fingerprint;
  mutable std::once_flag repack_once;
  mutable std::mutex device_mutex;
  mutable std::weak_ptr<const void> device_weights;
};

}  // namespace fathom
