// SPDX-License-Identifier: MIT
// A GGUF file: mapped read-only, its metadata and tensor table checked before anything trusts them.
#pragma once

#include <ggml.h>
#include <gguf.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "fathom/error.h"
#include "memory/file_mapping.h"

namespace fathom {

struct GgufTensor {
  std::string name;
  ggml_type type = GGML_TYPE_F32;
  std::array<std::int64_t, GGML_MAX_DIMS> shape{};  // fastest first; 1 beyond the last dimension
  const std::byte* data = nullptr;                  // in the mapping, 32-byte aligned
  std::size_t bytes = 0;

  std::int64_t elements() const { return shape[0] * shape[1] * shape[2] * shape[3]; }
};

class GgufFile {
 public:
  // Throws Error: kIo, kCorrupt (not GGUF, truncated, damaged), kUnsupported (version, split file).
  explicit GgufFile(const std::string& path);

  const std::string& path() const { return path_; }
  const FileMapping& mapping() const { return mapping_; }
  const std::vector<GgufTensor>& tensors() const { return tensors_; }
  const GgufTensor* FindTensor(const std::string& name) const;

  // Metadata. Empty when the key is absent; Error(kCorrupt) when its value has another kind.
  // Integer takes any integer type, Number any integer or float type.
  std::optional<std::int64_t> Integer(const std::string& key) const;
  std::optional<double> Number(const std::string& key) const;
  std::optional<bool> Flag(const std::string& key) const;
  std::optional<std::string> Text(const std::string& key) const;
  // A per-layer value that must be the same in all layers: one integer, or an array of equal ones.
  std::optional<std::int64_t> UniformInteger(const std::string& key) const;
  std::vector<std::string> Keys() const;
  // Feeds type and value of a key's value to a hash, whatever its kind.
  using FeedFn = std::function<void(const void* data, std::size_t size)>;
  void FeedValue(const std::string& key, const FeedFn& feed) const;
  // Size of an array of the given element type, or -1 when the key is absent.
  std::int64_t ArraySize(const std::string& key, gguf_type element) const;
  const char* ArrayText(const std::string& key, std::int64_t i) const;

  // Error with the path in front.
  Error MakeError(ErrorCode code, const std::string& what) const;

 private:
  struct ContextDeleter {
    void operator()(gguf_context* context) const { gguf_free(context); }
  };

  void CheckHeader() const;
  void ReadTensors();

  std::string path_;
  FileMapping mapping_;
  std::unique_ptr<gguf_context, ContextDeleter> context_;
  std::vector<GgufTensor> tensors_;
  std::unordered_map<std::string, std::size_t> tensor_index_;  // by name
};

// "[384, 4096]", without trailing ones.
std::string ShapeText(std::span<const std::int64_t> shape);

}  // namespace fathom
