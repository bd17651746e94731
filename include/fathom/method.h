// SPDX-License-Identifier: MIT
// Method: how one decode step attends to the cached tokens of a session. `dense`, `exact` and
// `random` bracket the rest.
//
// A method is built from a spec string `name:key=value,...` such as "fathom:bits=28,k=512" and
// belongs to one session. It reads the session's rows and may keep an index of its own. One
// protocol holds for all (design section 5): the first 4 and the last 32 tokens and every token not
// yet in a finished block are always attended; k counts the 36; the other k - 36 are chosen per
// query head among the finished blocks; ties go to the smaller token; decode is dense while the
// session has at most k tokens or fewer than `min` tokens.
//
// Thread safety: none; one session, one thread at a time. Work inside a call is spread by the
// backend.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fathom/backend.h"
#include "fathom/stats.h"
#include "fathom/store.h"

namespace fathom {

// Sums over decode steps since the last ResetCounters. Bytes are those of the algorithm (closed
// form), not of caches.
struct MethodCounters {
  std::int64_t steps = 0;         // decode steps
  std::int64_t calls = 0;         // steps * layers * KV heads
  std::int64_t sparse_calls = 0;  // of those, calls that scanned; the rest were dense
  double read_bits = 0;           // read bits per token per KV head, summed over sparse calls
  std::int64_t index_bytes =
      0;                  // bytes of planes, means, scales (or keys, for `exact`) a scan reads
  std::int64_t rows = 0;  // rows attended (union over the group), whose keys are read
  std::int64_t value_rows =
      0;                       // of those, rows of which the value is read; all but for values=lazy
  std::int64_t row_bytes = 0;  // (rows + value_rows) * 2 * head_dim
  std::int64_t value_mean_bytes = 0;  // of the block means of values that the residual reads

  MethodCounters& operator+=(const MethodCounters& other);
  double mean_read_bits() const {
    return sparse_calls ? read_bits / static_cast<double>(sparse_calls) : 0;
  }
};

// A parsed spec: name and options, not yet checked against the method.
struct MethodSpec {
  std::string name;
  std::map<std::string, std::string> options;

  // Throws Error(kUsage) on a malformed spec: empty name, empty or repeated key, missing '='.
  static MethodSpec Parse(std::string_view text);
  // Canonical text: name, then options by key.
  std::string ToString() const;
};

class Calibration;

// What a method may use of its session. Everything outlives the method.
struct MethodContext {
  const RowStore* rows = nullptr;
  const Backend* backend = nullptr;
  // Queries of the prefill, [n_layers]; none from decode. May be null or hold no samples: then
  // statistics know the keys alone, and the residual, which has nothing to be fitted on, is off.
  const std::vector<LayerQueries>* queries = nullptr;
  bool has_qk_norm = false;  // decides `basis=auto` of the published read
  // Statistics of a file instead of the session's own; null for none. Its geometry must be the
  // rows' (Calibration::Check).
  const Calibration* calibration = nullptr;
};

class StateReader;
class StateWriter;
class StepSource;

// The tokens that one KV head attended in the last step. Empty tokens: all of them, by all heads.
struct AttendedTokens {
  std::span<const std::int32_t> tokens;  // ascending, without repeats
  std::span<const std::uint16_t> mask;   // bit h: query head h of the group attended the token
};

class Method {
 public:
  virtual ~Method() = default;

  // The full spec with all defaults filled in; building from it gives the same method.
  virtual std::string spec() const = 0;

  // Decode attention of one position in one layer, after its row was written. n_tokens: visible
  // tokens, that position included. q: [n_heads][D]; out: [n_heads][D]. Blocks that finished since
  // the last call join the index first.
  virtual void Attend(std::int32_t layer, std::int64_t n_tokens, const float* q, float* out) = 0;

  // Makes the index of the first n_tokens tokens now, at the end of a prefill, rather than at the
  // first Attend. Does nothing for a session too short to index, or when the index there is was
  // made of at least 4/5 of the tokens: else it is made again, for keys drift with their positions.
  virtual void BuildIndex(std::int64_t n_tokens) = 0;

  // The session forgot tokens from n_tokens on. What remains is as if they had never been seen.
  virtual void Truncate(std::int64_t n_tokens) = 0;

  // Writes what a new method of the same spec over the same rows needs to go on as this one would.
  // False, and nothing written, for a method that cannot: its index is made again from the rows.
  virtual bool Save(StateWriter* /*out*/) { return false; }
  // What Save has written. Requires a method that has not been used. Throws Error(kCorrupt).
  virtual void Load(StateReader* /*in*/) {}

  // Index bytes that the method needs now, equal to the closed form of its shape. Rivals count what
  // their own system stores; those that run on the common 4-bit store hold all its planes (68 bytes
  // per token and KV head at D = 128) and count the part that they can read.
  virtual std::int64_t MemoryBytes() const = 0;

  // What a decode step needs of the method that is not made by Attend, but on a device
  // (src/method/step_source.h). Null: steps are made by Attend alone.
  virtual StepSource* step_source() { return nullptr; }

  // What the last Attend attended; valid until the next call. Of steps on a device nothing is kept.
  virtual AttendedTokens attended(std::int32_t /*kv_head*/) const { return {}; }

  // Fitted factors of the residual mass, [n_layers][n_heads]; 0 where none was fitted yet. Empty
  // for a method that fits none.
  virtual std::span<const float> residual_factors() const { return {}; }

  const MethodCounters& counters() const { return counters_; }
  void ResetCounters() { counters_ = {}; }

 protected:
  MethodCounters counters_;
};

struct MethodInfo {
  std::string name;
  std::string summary;  // one line
  std::string options;  // "k=512 (37..), bits=28 (0..512), ..." for help texts
};

// All methods of this build, in alphabetical order.
std::vector<MethodInfo> ListMethods();

// Throws Error(kUsage) for an unknown name or option (listing the valid ones), or a value out of
// range.
std::unique_ptr<Method> MakeMethod(const MethodSpec& spec, const MethodContext& context);

// Checks a spec without a session: the same errors as MakeMethod.
void ValidateMethodSpec(const MethodSpec& spec);

// Index bytes that the method of `spec` will need for a session of n_tokens, all layers: the closed
// form, as Method::MemoryBytes counts.
std::int64_t IndexBytes(const MethodSpec& spec, std::int32_t n_layers, HeadGeometry geometry,
                        std::int64_t n_tokens);

}  // namespace fathom
