// SPDX-License-Identifier: MIT
#include "memory/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <cstring>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "base/half.h"

namespace fathom {
namespace {

using Json = nlohmann::json;

static_assert(std::endian::native == std::endian::little, "tensors are little-endian in the file");

struct TypeEntry {
  TensorType type;
  std::string_view name;
  std::int64_t bytes;
};
constexpr std::array kTypes = {
    TypeEntry{TensorType::kF64, "F64", 8},   TypeEntry{TensorType::kF32, "F32", 4},
    TypeEntry{TensorType::kF16, "F16", 2},   TypeEntry{TensorType::kBf16, "BF16", 2},
    TypeEntry{TensorType::kI64, "I64", 8},   TypeEntry{TensorType::kI32, "I32", 4},
    TypeEntry{TensorType::kI16, "I16", 2},   TypeEntry{TensorType::kI8, "I8", 1},
    TypeEntry{TensorType::kU64, "U64", 8},   TypeEntry{TensorType::kU32, "U32", 4},
    TypeEntry{TensorType::kU16, "U16", 2},   TypeEntry{TensorType::kU8, "U8", 1},
    TypeEntry{TensorType::kBool, "BOOL", 1},
};
static_assert([] {
  for (std::size_t i = 0; i < kTypes.size(); ++i) {
    if (kTypes[i].type != static_cast<TensorType>(i)) return false;
  }
  return true;
}());

constexpr std::int64_t kLengthBytes = 8;
constexpr std::int64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit
constexpr std::size_t kMaxRank = 8;
// The root, a tensor's description, and the arrays in it.
constexpr int kMaxDepth = 3;
constexpr const char* kMetadata = "__metadata__";
constexpr std::int64_t kConvertBlock = 4096;  // elements converted at a time

// For one-line messages, whatever the name holds.
std::string Printable(std::string text) {
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) c = '?';
  }
  return "'" + text + "'";
}

// What the JSON library accepts and a header may not have: one key twice, and deep nesting, which
// could take memory without bound.
class HeaderRules {
 public:
  bool operator()(int depth, Json::parse_event_t event, const Json& value) {
    using Event = Json::parse_event_t;
    if (event == Event::object_start || event == Event::array_start) {
      if (depth >= kMaxDepth) {
        too_deep = true;
        return false;
      }
      keys_.at(static_cast<std::size_t>(depth)).clear();
    }
    if (event == Event::key) {
      const auto& key = value.get_ref<const std::string&>();
      const bool added =
          keys_.at(static_cast<std::size_t>(std::min(depth - 1, kMaxDepth - 1))).insert(key).second;
      if (!added && duplicate.empty()) duplicate = Printable(key);
    }
    return true;
  }

  std::string duplicate;
  bool too_deep = false;

 private:
  std::array<std::set<std::string>, kMaxDepth> keys_;  // of the object that is open at a depth
};

// A non-negative whole number that fits 64 signed bits, else -1.
std::int64_t Count(const Json& value) {
  if (!value.is_number_unsigned()) return -1;
  const auto number = value.get<std::uint64_t>();
  constexpr auto kLimit = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  return number > kLimit ? -1 : static_cast<std::int64_t>(number);
}

struct Parsed {
  SafetensorsTensor tensor;
  std::int64_t begin = 0;  // bytes after the header
  std::int64_t end = 0;
};

// One entry of the header, extents not yet compared with the file. `fail` throws.
template <typename Fail>
Parsed ParseTensor(const std::string& name, const Json& entry, const Fail& fail) {
  const std::string label = "tensor " + Printable(name);
  if (!entry.is_object()) fail(label + " has no description");
  for (const char* key : {"dtype", "shape", "data_offsets"}) {
    if (!entry.contains(key)) fail(label + " has no " + key);
  }
  Parsed parsed;
  parsed.tensor.name = name;
  const Json& dtype = entry["dtype"];
  const auto type = std::find_if(kTypes.begin(), kTypes.end(), [&](const TypeEntry& t) {
    return dtype.is_string() && dtype.get_ref<const std::string&>() == t.name;
  });
  if (type == kTypes.end()) {
    fail(label + " has dtype " +
         Printable(dtype.is_string() ? dtype.get<std::string>() : dtype.type_name()) +
         "; known are F64, F32, F16, BF16, I8 to I64, U8 to U64 and BOOL");
  }
  parsed.tensor.type = type->type;
  const Json& shape = entry["shape"];
  if (!shape.is_array() || shape.size() > kMaxRank) {
    fail(label + " has no shape of at most " + std::to_string(kMaxRank) + " dimensions");
  }
  std::int64_t bytes = type->bytes;
  for (const Json& dimension : shape) {
    const std::int64_t n = Count(dimension);
    if (n < 0 || (n > 0 && bytes > std::numeric_limits<std::int64_t>::max() / n)) {
      fail(label + " has a dimension that is no size of memory");
    }
    bytes *= n;
    parsed.tensor.shape.push_back(n);
  }
  parsed.tensor.elements = bytes / type->bytes;
  const Json& offsets = entry["data_offsets"];
  if (!offsets.is_array() || offsets.size() != 2 || Count(offsets[0]) < 0 ||
      Count(offsets[1]) < Count(offsets[0])) {
    fail(label + " has data_offsets that are no range");
  }
  parsed.begin = Count(offsets[0]);
  parsed.end = Count(offsets[1]);
  if (parsed.end - parsed.begin != bytes) {
    fail(label + " has " + std::to_string(parsed.end - parsed.begin) + " bytes, shape " +
         TensorShapeText(parsed.tensor.shape) + " of " + std::string(type->name) + " needs " +
         std::to_string(bytes));
  }
  return parsed;
}

// The tensors' bytes must be all of the file, each byte once.
template <typename Fail>
void CheckExtents(const std::vector<Parsed>& tensors, std::int64_t data_bytes, const Fail& fail) {
  std::vector<const Parsed*> order;
  for (const Parsed& p : tensors) {
    if (p.end > data_bytes) {
      fail("truncated: tensor " + Printable(p.tensor.name) + " ends at byte " +
           std::to_string(p.end) + " of the data, the file has " + std::to_string(data_bytes));
    }
    order.push_back(&p);
  }
  std::sort(order.begin(), order.end(), [](const Parsed* a, const Parsed* b) {
    return std::pair(a->begin, a->end) < std::pair(b->begin, b->end);
  });
  std::int64_t at = 0;
  for (const Parsed* p : order) {
    if (p->begin != at) {
      fail("tensor " + Printable(p->tensor.name) + " starts at byte " + std::to_string(p->begin) +
           " of the data, where the one before it ends at " + std::to_string(at) +
           (p->begin < at ? ": they overlap" : ": there is a gap"));
    }
    at = p->end;
  }
  if (at != data_bytes) {
    fail("the tensors end at byte " + std::to_string(at) + " of the data, the file has " +
         std::to_string(data_bytes));
  }
}

}  // namespace

std::string_view TensorTypeName(TensorType type) {
  return kTypes.at(static_cast<std::size_t>(type)).name;
}

std::int64_t TensorElementBytes(TensorType type) {
  return kTypes.at(static_cast<std::size_t>(type)).bytes;
}

std::uint16_t FloatToBf16(float f) {
  const auto bits = std::bit_cast<std::uint32_t>(f);
  const std::uint32_t upper = bits >> 16;
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return static_cast<std::uint16_t>(upper | 0x40U);
  return static_cast<std::uint16_t>((bits + 0x7FFFU + (upper & 1U)) >> 16);
}

float Bf16ToFloat(std::uint16_t b) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(b) << 16);
}

std::string TensorShapeText(std::span<const std::int64_t> shape) {
  std::string text;
  for (const std::int64_t n : shape) text += (text.empty() ? "" : ", ") + std::to_string(n);
  return "[" + text + "]";
}

SafetensorsFile::SafetensorsFile(const std::string& path, const std::string& kind)
    : path_(path), mapping_(path, kind) {
  ParseHeader();
}

void SafetensorsFile::ParseHeader() {
  const auto fail = [this](const std::string& what) { throw Corrupt(what); };
  const std::span<const std::byte> bytes = mapping_.bytes();
  if (file_bytes() < kLengthBytes) {
    fail("not a safetensors file: " + std::to_string(file_bytes()) +
         " bytes, the header's length alone takes " + std::to_string(kLengthBytes));
  }
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof(length));
  const std::int64_t limit = std::min(kMaxHeaderBytes, file_bytes() - kLengthBytes);
  if (length > static_cast<std::uint64_t>(limit)) {
    fail("not a safetensors file, or truncated: a header of " + std::to_string(length) +
         " bytes, at most " + std::to_string(limit) + " are possible");
  }
  const auto* text = reinterpret_cast<const char*>(bytes.data()) + kLengthBytes;
  if (length == 0 || text[0] != '{')
    fail("not a safetensors file: the header does not start with {");
  HeaderRules rules;
  Json header;
  try {
    header = Json::parse(text, text + length, std::ref(rules));
  } catch (const Json::parse_error& error) {
    fail("the header is not valid JSON at byte " + std::to_string(error.byte));
  } catch (const Json::exception&) {
    fail("the header is not valid JSON");
  }
  if (rules.too_deep || !header.is_object()) fail("the header is not a table of tensors");
  if (!rules.duplicate.empty()) fail("the header has " + rules.duplicate + " twice");

  std::vector<Parsed> parsed;
  for (const auto& [name, entry] : header.items()) {
    if (name != kMetadata) {
      parsed.push_back(ParseTensor(name, entry, fail));
      continue;
    }
    if (!entry.is_object()) fail(std::string(kMetadata) + " is not a table of strings");
    for (const auto& [key, value] : entry.items()) {
      if (!value.is_string()) {
        fail(std::string(kMetadata) + " entry " + Printable(key) + " is not a string");
      }
      metadata_[key] = value.get<std::string>();
    }
  }
  const auto header_bytes = kLengthBytes + static_cast<std::int64_t>(length);
  CheckExtents(parsed, file_bytes() - header_bytes, fail);
  for (Parsed& p : parsed) {
    p.tensor.data = bytes.data() + header_bytes + p.begin;
    tensors_.push_back(std::move(p.tensor));
  }
}

const SafetensorsTensor* SafetensorsFile::Find(std::string_view name) const {
  const auto found = std::lower_bound(
      tensors_.begin(), tensors_.end(), name,
      [](const SafetensorsTensor& tensor, std::string_view n) { return tensor.name < n; });
  return found != tensors_.end() && found->name == name ? &*found : nullptr;
}

void SafetensorsFile::ReadFloats(const SafetensorsTensor& tensor, std::int64_t first,
                                 std::int64_t n, float* out) const {
  assert(first >= 0 && n >= 0 && first + n <= tensor.elements);
  const TensorType type = tensor.type;
  if (type != TensorType::kF32 && type != TensorType::kF16 && type != TensorType::kBf16) {
    throw Corrupt("tensor " + Printable(tensor.name) + " has dtype " +
                  std::string(TensorTypeName(type)) + ", it must be F32, F16 or BF16");
  }
  const std::byte* in = tensor.data + first * TensorElementBytes(type);
  if (type == TensorType::kF32) {
    if (n > 0) std::memcpy(out, in, static_cast<std::size_t>(n) * sizeof(float));
    return;
  }
  // Copied first: the file may hold them at an odd address.
  std::array<std::uint16_t, kConvertBlock> block{};
  for (std::int64_t done = 0; done < n; done += kConvertBlock) {
    const std::int64_t m = std::min(kConvertBlock, n - done);
    std::memcpy(block.data(), in + done * 2, static_cast<std::size_t>(m) * 2);
    if (type == TensorType::kF16) {
      ConvertHalfToFloat(block.data(), m, out + done);
    } else {
      std::transform(block.begin(), block.begin() + m, out + done, Bf16ToFloat);
    }
  }
}

void SafetensorsFile::ReadDoubles(const SafetensorsTensor& tensor, std::int64_t first,
                                  std::int64_t n, double* out) const {
  assert(first >= 0 && n >= 0 && first + n <= tensor.elements);
  if (tensor.type != TensorType::kF64) {
    throw Corrupt("tensor " + Printable(tensor.name) + " has dtype " +
                  std::string(TensorTypeName(tensor.type)) + ", it must be F64");
  }
  const auto bytes = static_cast<std::ptrdiff_t>(sizeof(double));
  if (n > 0) std::memcpy(out, tensor.data + first * bytes, static_cast<std::size_t>(n * bytes));
}

std::vector<std::int64_t> SafetensorsFile::ReadIntegers(const SafetensorsTensor& tensor) const {
  std::vector<std::int64_t> out(static_cast<std::size_t>(tensor.elements));
  if (tensor.type == TensorType::kI64) {
    if (!out.empty()) std::memcpy(out.data(), tensor.data, out.size() * sizeof(out[0]));
    return out;
  }
  if (tensor.type != TensorType::kI32) {
    throw Corrupt("tensor " + Printable(tensor.name) + " has dtype " +
                  std::string(TensorTypeName(tensor.type)) + ", it must be I64 or I32");
  }
  for (std::size_t i = 0; i < out.size(); ++i) {
    std::int32_t value = 0;
    std::memcpy(&value, tensor.data + i * sizeof(value), sizeof(value));
    out[i] = value;
  }
  return out;
}

Error SafetensorsFile::Corrupt(const std::string& what) const {
  return {ErrorCode::kCorrupt, path_ + ": " + what};
}

}  // namespace fathom
