// SPDX-License-Identifier: MIT
// The list of methods. A new method is a file beside dense.cc, an entry declared in options.h and a
// line here.
#include <array>

#include "fathom/error.h"
#include "method/options.h"

namespace fathom {
namespace {

constexpr std::array kEntries = {
    &kDenseEntry, &kDoubleSparsityEntry, &kExactEntry,     &kFathomEntry, &kFull4Entry,
    &kH2oEntry,   &kLandmarkEntry,       &kLokiEntry,      &kQuestEntry,  &kRandomEntry,
    &kSparqEntry, &kStreamingEntry,      &kThumbnailEntry,
};

const MethodEntry& FindEntry(const std::string& name) {
  std::string valid;
  for (const MethodEntry* entry : kEntries) {
    if (entry->name == name) return *entry;
    valid += (valid.empty() ? "" : ", ") + std::string(entry->name);
  }
  throw Error(ErrorCode::kUsage, "unknown method '" + name + "'; valid: " + valid);
}

}  // namespace

MethodCounters& MethodCounters::operator+=(const MethodCounters& other) {
  steps += other.steps;
  calls += other.calls;
  sparse_calls += other.sparse_calls;
  read_bits += other.read_bits;
  index_bytes += other.index_bytes;
  rows += other.rows;
  value_rows += other.value_rows;
  row_bytes += other.row_bytes;
  value_mean_bytes += other.value_mean_bytes;
  return *this;
}

std::vector<MethodInfo> ListMethods() {
  std::vector<MethodInfo> list;
  for (const MethodEntry* entry : kEntries) {
    const MethodSpec spec{std::string(entry->name), {}};
    OptionReader options(spec);
    entry->check(options);
    list.push_back({spec.name, std::string(entry->summary), options.Help()});
  }
  return list;
}

void ValidateMethodSpec(const MethodSpec& spec) {
  OptionReader options(spec);
  FindEntry(spec.name).check(options);
}

std::unique_ptr<Method> MakeMethod(const MethodSpec& spec, const MethodContext& context) {
  OptionReader options(spec);
  return FindEntry(spec.name).make(options, context);
}

std::int64_t IndexBytes(const MethodSpec& spec, std::int32_t n_layers, HeadGeometry geometry,
                        std::int64_t n_tokens) {
  OptionReader options(spec);
  const std::int64_t per_head = FindEntry(spec.name).index_bytes(options, geometry, n_tokens);
  return per_head * n_layers * geometry.n_kv_heads;
}

}  // namespace fathom
