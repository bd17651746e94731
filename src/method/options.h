// SPDX-License-Identifier: MIT
// Reads the options of a method spec: defaults, ranges, canonical text and the list of valid keys
// in one place.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "fathom/method.h"

namespace fathom {

// A method reads each of its options once, in the order in which help texts should list them, and
// then calls Finish.
class OptionReader {
 public:
  explicit OptionReader(const MethodSpec& spec) : spec_(spec) {}

  // Each throws Error(kUsage) naming the value and the range when the option is given and does not
  // fit.
  std::int64_t Int(std::string_view key, std::int64_t fallback, std::int64_t low,
                   std::int64_t high);
  double Real(std::string_view key, double fallback, double low, double high);
  std::string Choice(std::string_view key, std::string_view fallback,
                     std::initializer_list<std::string_view> choices);
  bool Has(std::string_view key) const;

  // Throws Error(kUsage) listing the valid keys when the spec has an option that was never read.
  void Finish() const;

  // "name:key=value,..." with every option that was read.
  std::string Canonical() const;
  // "k=512 (37..1000000), basis=raw (raw|klt)" for help texts.
  std::string Help() const;

 private:
  struct Read {
    std::string key;
    std::string value;
    std::string range;
  };
  const std::string* Find(std::string_view key) const;
  [[noreturn]] void Fail(std::string_view key, std::string_view value,
                         std::string_view range) const;

  const MethodSpec& spec_;
  std::vector<Read> read_;
};

// One method of the registry. `check` reads all options; `make` the same and builds; `index_bytes`
// is the closed form of the index of one KV head, without sessions.
struct MethodEntry {
  std::string_view name;
  std::string_view summary;
  void (*check)(OptionReader& options);
  std::unique_ptr<Method> (*make)(OptionReader& options, const MethodContext& context);
  std::int64_t (*index_bytes)(OptionReader& options, HeadGeometry geometry, std::int64_t n_tokens);
};

// Defined beside each method; listed in registry.cc.
extern const MethodEntry kDenseEntry;
extern const MethodEntry kDoubleSparsityEntry;
extern const MethodEntry kExactEntry;
extern const MethodEntry kFathomEntry;
extern const MethodEntry kFull4Entry;
extern const MethodEntry kH2oEntry;
extern const MethodEntry kLandmarkEntry;
extern const MethodEntry kLokiEntry;
extern const MethodEntry kQuestEntry;
extern const MethodEntry kRandomEntry;
extern const MethodEntry kSparqEntry;
extern const MethodEntry kStreamingEntry;
extern const MethodEntry kThumbnailEntry;

}  // namespace fathom
