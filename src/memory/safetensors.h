// SPDX-License-Identifier: MIT
// Files of named tensors in the safetensors format: a little-endian u64 header length, a JSON
// header, and the tensors' bytes without gaps. Reading maps the file; writing streams pieces in any
// order, so that neither needs the memory of a whole tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fathom/error.h"
#include "memory/file_mapping.h"

namespace fathom {

enum class TensorType : std::uint8_t {
  kF64,
  kF32,
  kF16,
  kBf16,
  kI64,
  kI32,
  kI16,
  kI8,
  kU64,
  kU32,
  kU16,
  kU8,
  kBool,
};
std::string_view TensorTypeName(TensorType type);  // "BF16", as in the header
std::int64_t TensorElementBytes(TensorType type);

// BF16 is the upper half of a float. Rounds to nearest even; NaN stays NaN, large values become
// inf.
std::uint16_t FloatToBf16(float f);
float Bf16ToFloat(std::uint16_t b);

// "[128, 8, 64]".
std::string TensorShapeText(std::span<const std::int64_t> shape);

struct SafetensorsTensor {
  std::string name;
  TensorType type = TensorType::kF32;
  std::vector<std::int64_t> shape;  // slowest first
  const std::byte* data = nullptr;  // in the mapping; may have any alignment
  std::int64_t elements = 0;        // product of the shape
};

// A file opened for reading: header and extents of all tensors are checked, values are not.
// Immutable; safe to share between threads.
class SafetensorsFile {
 public:
  // kind: what the file is, for messages. Throws Error: kIo (missing, unreadable), kCorrupt (header
  // damaged, names twice, extents that overlap, leave gaps, reach beyond the file or do not agree
  // with shape and type).
  SafetensorsFile(const std::string& path, const std::string& kind);

  const std::string& path() const { return path_; }
  std::int64_t file_bytes() const { return static_cast<std::int64_t>(mapping_.bytes().size()); }
  // Sorted by name.
  const std::vector<SafetensorsTensor>& tensors() const { return tensors_; }
  const SafetensorsTensor* Find(std::string_view name) const;  // null when there is none
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  // Elements first .. first + n - 1 of an F32, F16 or BF16 tensor; Error(kCorrupt) for other types.
  // Requires the range to be inside the tensor.
  void ReadFloats(const SafetensorsTensor& tensor, std::int64_t first, std::int64_t n,
                  float* out) const;
  // The same of an F64 tensor.
  void ReadDoubles(const SafetensorsTensor& tensor, std::int64_t first, std::int64_t n,
                   double* out) const;
  // All elements of an I64 or I32 tensor; Error(kCorrupt) for other types.
  std::vector<std::int64_t> ReadIntegers(const SafetensorsTensor& tensor) const;

  // "PATH: what".
  Error Corrupt(const std::string& what) const;

 private:
  void ParseHeader();

  std::string path_;
  FileMapping mapping_;
  std::vector<SafetensorsTensor> tensors_;
  std::map<std::string, std::string> metadata_;
};

struct SafetensorsSpec {
  std::string name;
  TensorType type = TensorType::kF32;
  std::vector<std::int64_t> shape;
};

// Writes a file whose tensors are all declared first. The bytes go to PATH.partial, which Commit
// renames to PATH and the destructor removes otherwise: PATH never holds half a file. Tensors are
// stored by falling element size, so that all are aligned to their elements. Not thread-safe.
class SafetensorsWriter {
 public:
  // Takes the disk space at once, where the file system can do that. Throws Error: kUsage (a name
  // twice, a negative dimension), kIo (no permission, no room: how much is needed and free; another
  // process writes the same file; PATH is no regular file).
  SafetensorsWriter(const std::string& path, std::vector<SafetensorsSpec> tensors,
                    const std::map<std::string, std::string>& metadata);
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  // Elements first .. first + values.size() - 1 of a tensor, by its place in the declaration.
  // Floats go to F32, F16 and BF16 tensors, rounded to nearest even; doubles to F64 and integers to
  // I64 tensors. Throws Error(kIo); Error(kInternal) for another type or a range outside the
  // tensor.
  void WriteFloats(std::size_t tensor, std::int64_t first, std::span<const float> values);
  void WriteDoubles(std::size_t tensor, std::int64_t first, std::span<const double> values);
  void WriteIntegers(std::size_t tensor, std::int64_t first, std::span<const std::int64_t> values);

  // Makes the file durable and gives it its name. Throws Error(kInternal) when the elements written
  // of a tensor are not as many as it has, Error(kIo). Nothing may be written afterwards.
  void Commit();

  std::int64_t file_bytes() const { return file_bytes_; }

 private:
  struct Extent {
    std::int64_t begin = 0;  // byte in the file
    std::int64_t elements = 0;
    std::int64_t written = 0;
  };

  std::string Layout(const std::map<std::string, std::string>& metadata);
  void Open();
  void Reserve() const;
  void Put(std::int64_t offset, const void* data, std::size_t bytes) const;
  std::int64_t Place(std::size_t tensor, std::int64_t first, std::size_t n);
  Error IoError(const std::string& what, int code) const;
  Error NoRoom(std::int64_t free_bytes) const;

  std::string path_;
  std::string partial_;
  std::vector<SafetensorsSpec> specs_;
  std::vector<Extent> extents_;  // beside specs_
  std::int64_t file_bytes_ = 0;
  int fd_ = -1;
};

}  // namespace fathom
