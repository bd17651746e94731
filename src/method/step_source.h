// SPDX-License-Identifier: MIT
// What a decode step needs of a method that is not made by Method::Attend, but on a device
// (src/device): when layers scan, the index that they scan, what the residual adds. The method
// stays the owner of all of it and is told what the step has read. Nothing here is of one method: a
// new one gets on a device by implementing this.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "fathom/method.h"
#include "fathom/plan.h"
#include "method/residual.h"

namespace fathom {

class StepSource {
 public:
  struct Rules {
    std::int64_t k = 0;             // attended per query head, sinks and window included
    std::int32_t dense_layers = 0;  // the first layers never scan
    ResidualRule residual = ResidualRule::kOff;
  };
  // One KV head of an index of the mean codec whose basis is the identity.
  struct PlaneHead {
    const HeadIndex* index;
    std::span<const double> distortion;  // HeadIndex::Distortions
    const DistortionHull* hull;          // of them
  };

  virtual ~StepSource() = default;

  virtual Rules rules() const = 0;
  // Whether the layers beyond dense_layers scan with n_tokens visible.
  virtual bool Scans(std::int64_t n_tokens) const = 0;
  // Why a step that scans cannot be made on a device, in a few words; empty where it can.
  virtual std::string Refusal() const = 0;

  // Brings index, factors and mean values of all layers that scan up to the finished blocks of
  // n_tokens tokens, whose rows are written: what Attend does layer by layer. Requires a finished
  // block.
  virtual void CatchUp(std::int64_t n_tokens) = 0;

  // Of layers that scan, after CatchUp, where nothing is refused; valid until the method changes.
  virtual PlaneHead plane_head(std::int32_t layer, std::int32_t kv_head) const = 0;
  virtual double multiplier() const = 0;  // of the plan of all heads
  // Changes whenever a block that was there is gone or another one, and differs between methods.
  virtual std::uint64_t version() const = 0;
  // With a residual: mean values, and factors [n_layers][n_heads].
  virtual const ValueMeans& values(std::int32_t layer, std::int32_t kv_head) const = 0;
  virtual std::span<const float> factors() const = 0;

  // Adds what a step has read to the method's counters.
  virtual void Count(const MethodCounters& step) = 0;
};

}  // namespace fathom
