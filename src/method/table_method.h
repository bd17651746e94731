// SPDX-License-Identifier: MIT
// Methods with a table of their own that is derived from the keys block by block: the authors' own
// systems, and labels. Here is its life: made once, extended as blocks finish, cut on truncation.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "method/sparse_method.h"

namespace fathom {

class TableMethod : public SparseMethod {
 public:
  TableMethod(const MethodContext& context, SparseConfig config, std::string spec);

 protected:
  // Both are called from several threads for different KV heads.
  // Takes the statistics of the first n_tokens tokens; the table is empty then.
  virtual void StartHead(std::int32_t layer, std::int32_t kv_head, std::int64_t n_tokens) = 0;
  // Derives blocks first .. n_blocks - 1, which may have been derived before and cut since.
  virtual void ExtendHead(std::int32_t layer, std::int32_t kv_head, std::int64_t first,
                          std::int64_t n_blocks) = 0;
  // Forgets blocks from n_blocks on. Without it they stay, unused, until they are derived again.
  virtual void CutHead(std::int32_t /*layer*/, std::int32_t /*kv_head*/,
                       std::int64_t /*n_blocks*/) {}
  // Bytes that the author's system stores beyond the fp16 rows, for one KV head.
  virtual std::int64_t StoredBytes(std::int64_t n_blocks) const = 0;

  void BuildAll(std::int64_t n_tokens) override;
  void ExtendIndex(std::int32_t layer, std::int64_t n_tokens) override;
  void TruncateIndex(std::int64_t n_tokens) override;
  std::int64_t IndexMemory() const override;

  std::size_t Slot(std::int32_t layer, std::int32_t kv_head) const {
    return static_cast<std::size_t>(layer) * static_cast<std::size_t>(geometry().n_kv_heads) +
           static_cast<std::size_t>(kv_head);
  }
  std::size_t n_slots() const { return Slot(n_layers(), 0); }

 private:
  std::vector<std::int64_t> built_tokens_;  // [n_layers] the statistics saw, 0 before the build
  std::vector<std::int64_t> n_blocks_;      // [n_layers]
};

}  // namespace fathom
