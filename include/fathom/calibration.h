// SPDX-License-Identifier: MIT
// Calibration: statistics of a model's keys and queries, kept in a file and used instead of a
// session's own (design section 3, "Statistics"; docs/format.md, "Statistics file"). Without one,
// every session takes its statistics from its own prefill. fathom/calibrate.h makes one.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fathom/stats.h"
#include "fathom/store.h"
#include "fathom/types.h"

namespace fathom {

// Statistics of one KV head in the coordinates of one basis.
struct HeadStats {
  Basis basis;
  std::vector<double> variance;   // [D] of the coordinates, unbiased, first 16 tokens left out
  std::vector<double> abs_key;    // [D] E|x_j| over the finished blocks
  std::vector<double> abs_query;  // [D] E|q_j| of the group's queries; zeros without queries
};

// Moments of one KV head in the model's own channels: bases can be made of them again.
struct HeadMoments {
  std::vector<float> key_mean;        // [D], first 16 tokens left out, as in the next
  std::vector<float> key_covariance;  // [D][D], unbiased
  std::vector<float> query_moment;    // [D][D] E[q q^T] of the group's queries, not centred
};

// What a calibration knows of one KV head in one basis. Codecs are those of our own store, by mean
// bits, with decoders fitted by least squares; empty for BasisRule::kRaw, which our own store never
// uses.
struct HeadCalibration {
  HeadStats stats;
  std::array<MeanCodec, 2> codec;                 // of 4 and 8 mean bits
  std::array<std::vector<double>, 2> distortion;  // [kLevels][D] mean squared errors, likewise
  std::vector<std::int32_t> order;  // [D] channels by falling abs_query * abs_key (Double Sparsity)
};

// The name under which a calibration keeps what was fitted for a method: its canonical spec without
// `min`, which says from which length on a session is sparse and not how, and `values`, which says
// only which values are read.
std::string CalibrationKey(std::string_view canonical_spec);

// Immutable once made; safe to share between threads and sessions.
class Calibration {
 public:
  // Reads a file and checks all of it. Throws Error: kIo (missing, unreadable), kCorrupt (damaged,
  // or not a statistics file: names tensor and value; bases that are no exact pair), kUnsupported
  // (a later version).
  static std::shared_ptr<const Calibration> Open(const std::string& path);
  // Writes a file, replacing what has the name, once it is complete. What is opened again is equal
  // bit for bit. Throws Error(kIo).
  void Save(const std::string& path) const;

  // Throws Error(kUsage), naming both, when a model of this shape cannot use it: other heads, or
  // not all of its layers.
  void Check(std::int32_t n_layers, HeadGeometry geometry) const;
  // The same for some layers of a model, those of a capture.
  void CheckLayers(std::span<const std::int32_t> chosen, HeadGeometry geometry) const;
  // Of these layers of the model alone, in this order: entry i of everything is of chosen[i].
  // Throws Error(kUsage) for a layer that is not there.
  std::shared_ptr<const Calibration> Select(std::span<const std::int32_t> chosen) const;

  std::vector<std::int32_t>
      layers;  // of the model; all of them, or those of the capture it is from
  HeadGeometry heads;
  std::int64_t n_tokens = 0;                       // tokens the statistics saw
  std::string source;                              // the text they come from, may be empty
  std::string model;                               // name of the model, may be empty
  std::vector<HeadMoments> moments;                // [layers][n_kv_heads]
  std::vector<HeadCalibration> head_calibrations;  // [layers][n_kv_heads][kBasisRules]
  // Factors of the residual mass, [layers][n_heads], by CalibrationKey.
  std::map<std::string, std::vector<float>> residual;
  // Bits per layer, [layers], by CalibrationKey of a spec with budgets=file, whose bits or budget
  // is their mean at most.
  std::map<std::string, std::vector<double>> budgets;

  // slot: place in `layers`.
  const HeadCalibration& head(std::int32_t slot, std::int32_t kv_head, BasisRule rule) const {
    return head_calibrations[(static_cast<std::size_t>(slot) *
                                  static_cast<std::size_t>(heads.n_kv_heads) +
                              static_cast<std::size_t>(kv_head)) *
                                 kBasisRules +
                             static_cast<std::size_t>(rule)];
  }
  // What was fitted for a method, by its canonical spec; null where there is nothing.
  const std::vector<float>* FindResidual(std::string_view canonical_spec) const;
  const std::vector<double>* FindBudgets(std::string_view canonical_spec) const;
};

}  // namespace fathom
