// SPDX-License-Identifier: MIT
// Attention of a session's decode steps on the device, from q, k and v of every layer to its
// output, as the session's method attends. Rows stay where the session has them, in host memory
// registered with CUDA; the device holds sinks and recent rows, and a mirror of the method's index.
// The method stays the owner of index and statistics: Prepare brings the mirror up to date between
// steps.
//
// A block joins the index with the step after the one that finished it, for only then all its keys
// are there: of 64 steps one attends to up to 64 recent tokens more than Method::Attend would.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>

#include "backend/cuda/buffer.h"
#include "backend/cuda/host_pins.h"
#include "device/attention_step.h"
#include "device/plane_mirror.h"
#include "device/value_mirror.h"
#include "fathom/store.h"
#include "method/step_source.h"
#include "model/cuda/pinned_buffer.h"

namespace fathom::cuda {

// One session, one thread. A step is Prepare, the recorded work of Begin, Layer for every layer in
// order and End, a wait for the stream, Finish.
class SessionAttention {
 public:
  // rows: of the session; it must outlive this, and no part of it may be mapped anew from the first
  // RegisterRows or Prepare on. n_threads: for copies on the host. No work of the device may be
  // left when this ends.
  SessionAttention(RowStore* rows, int n_threads, HostPinner pinner = CudaPinner());
  SessionAttention(const SessionAttention&) = delete;
  SessionAttention& operator=(const SessionAttention&) = delete;

  // Begins to register the memory of rows, all that the store can ever hold; once.
  void RegisterRows();

  // Makes ready for the step of the token behind the first n_tokens, whose rows are complete, and
  // waits. Returns why the device cannot make it, or nothing; then nothing has changed but the
  // method's index, which may have caught up. Throws what CUDA reports, but no lack of memory.
  std::string Prepare(StepSource& source, std::int64_t n_tokens);
  // Changes whenever a step that was recorded before is not the one that Prepare made ready.
  std::uint64_t recipe() const { return recipe_; }

  // Record work on the stream and wait for nothing. Page-locked memory that they read is written by
  // Prepare alone. q, out: [n_heads][D]; k, v: [n_kv_heads][D], on the device.
  void Begin(cudaStream_t stream);
  void Layer(std::int32_t layer, const float* q, const float* k, const float* v, float* out,
             cudaStream_t stream);
  void End(cudaStream_t stream);

  // After the step: its rows are in the store, not committed. Counts it.
  void Finish(StepSource& source);
  // Rows, index or method changed otherwise than by these steps.
  void Forget();

  const std::int32_t* position() const { return place_.data(); }  // [1] on the device

 private:
  // What a step reads beside lengths: position, and the first token in the ring.
  static constexpr int kPlaceNumbers = 2;
  struct Read {
    std::int32_t n_planes, n_slots, n_channels;  // the first numbers of MeanTableHead
  };

  std::string PrepareScan(StepSource& source, std::int64_t n_tokens, bool* scans);
  void MakeStep(const StepSource::Rules& rules, bool scans);
  void LoadResident(std::int64_t n_tokens);
  LayerRows RowsOf(std::int32_t layer) const;
  std::int64_t HeadAt(std::int32_t layer) const {
    return std::int64_t{layer} * rows_->geometry().n_kv_heads;
  }
  void CountLayer(std::int32_t layer, MethodCounters* counters) const;

  RowStore* const rows_;
  const int n_threads_;
  HostPins pins_;
  bool registers_ = false;  // rows are registered, or asked to be
  std::string no_rows_;     // why they cannot be, for good
  std::string refusal_;     // until Forget
  const Stream stream_;     // of uploads, between steps

  DeviceBuffer<Half*> row_lists_;  // [n_layers][n_kv_heads]
  DeviceBuffer<Half> sinks_;       // [n_layers][n_kv_heads][kSinks][2][D]
  DeviceBuffer<Half> ring_;        // [n_layers][n_kv_heads][kRing][2][D]
  std::int64_t resident_ = -1;     // tokens that sinks and ring are of

  StepSource::Rules rules_;  // that step_ was made for
  bool can_scan_ = false;    // it was made for steps that scan, too
  std::unique_ptr<AttentionStep> step_;
  std::unique_ptr<PlaneMirror> planes_;
  std::unique_ptr<ValueMirror> values_;
  std::uint64_t version_ = 0;      // of the source that the mirrors follow
  std::int64_t value_blocks_ = 0;  // in values_
  bool stale_ = true;              // the mirrors are to be compared with the source
  bool scans_ = false;             // the step that was made ready does
  std::uint64_t recipe_ = 0;       // of that step
  std::uint64_t recipes_[2] = {};  // of steps that are dense, and that scan
  std::uint64_t last_recipe_ = 0;
  std::int64_t n_tokens_ = 0;  // of the step, its own token included

  DeviceBuffer<std::int32_t> place_;
  PinnedBuffer<std::int32_t> host_place_;
  PinnedBuffer<Lengths> host_lengths_;      // [3], of AttentionStep
  PinnedBuffer<std::int32_t> host_counts_;  // AttentionStep::counts
  PinnedBuffer<Read> host_read_;            // [n_layers][n_kv_heads]
};

}  // namespace fathom::cuda
