// SPDX-License-Identifier: MIT
#include "model/gguf_file.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>

#include "model/ggml_runtime.h"

namespace fathom {
namespace {

// What ggml's CPU kernels and buffers require of tensor data.
constexpr std::size_t kTensorAlignment = 32;
// magic, version, number of tensors, number of metadata entries
constexpr std::size_t kHeaderBytes = 4 + 4 + 8 + 8;

std::size_t SizeOfType(gguf_type type) {
  switch (type) {
    case GGUF_TYPE_UINT8:
    case GGUF_TYPE_INT8:
    case GGUF_TYPE_BOOL:
      return 1;
    case GGUF_TYPE_UINT16:
    case GGUF_TYPE_INT16:
      return 2;
    case GGUF_TYPE_UINT64:
    case GGUF_TYPE_INT64:
    case GGUF_TYPE_FLOAT64:
      return 8;
    default:
      return 4;
  }
}

}  // namespace

GgufFile::GgufFile(const std::string& path) : path_(path), mapping_(path, ".gguf model file") {
  InitGgml();
  CheckHeader();
  const std::span<const std::byte> bytes = mapping_.bytes();
  const LogCapture log;
  try {
    gguf_init_params params{};
    params.no_alloc = true;
    params.ctx = nullptr;
    context_.reset(gguf_init_from_buffer(bytes.data(), bytes.size(), params));
  } catch (const std::bad_alloc&) {
    throw MakeError(ErrorCode::kNoMemory, "not enough memory for the metadata of the model file");
  }
  if (!context_) {
    throw MakeError(ErrorCode::kCorrupt, "damaged or truncated GGUF header (" +
                                             log.Text("no details") + "); download the file again");
  }
  ReadTensors();
  if (const auto splits = Integer("split.count"); splits.value_or(0) > 1) {
    throw MakeError(ErrorCode::kUnsupported,
                    "one of " + std::to_string(*splits) +
                        " parts of a split model; merge them with llama-gguf-split --merge");
  }
}

void GgufFile::CheckHeader() const {
  const std::span<const std::byte> bytes = mapping_.bytes();
  if (bytes.size() < kHeaderBytes) {
    throw MakeError(ErrorCode::kCorrupt, "not a GGUF file: " + std::to_string(bytes.size()) +
                                             " bytes, a header has at least " +
                                             std::to_string(kHeaderBytes));
  }
  if (std::memcmp(bytes.data(), GGUF_MAGIC, 4) != 0) {
    throw MakeError(ErrorCode::kCorrupt,
                    "not a GGUF file: it does not start with 'GGUF'; convert the model to GGUF");
  }
  std::uint32_t version = 0;
  std::memcpy(&version, bytes.data() + 4, sizeof(version));
  if (version < 2 || version > GGUF_VERSION) {
    throw MakeError(ErrorCode::kUnsupported, "GGUF version " + std::to_string(version) +
                                                 ", known are 2 and 3 (little-endian); convert "
                                                 "the model again with a current converter");
  }
}

void GgufFile::ReadTensors() {
  const std::span<const std::byte> bytes = mapping_.bytes();
  const std::size_t data_offset = gguf_get_data_offset(context_.get());
  const std::int64_t count = gguf_get_n_tensors(context_.get());
  for (std::int64_t i = 0; i < count; ++i) {
    GgufTensor tensor;
    tensor.name = gguf_get_tensor_name(context_.get(), i);
    tensor.type = gguf_get_tensor_type(context_.get(), i);
    std::copy_n(gguf_get_tensor_ne(context_.get(), i), GGML_MAX_DIMS, tensor.shape.begin());
    tensor.bytes = gguf_get_tensor_size(context_.get(), i);
    const std::size_t offset = gguf_get_tensor_offset(context_.get(), i);
    const std::string label = "tensor " + Quoted(tensor.name);
    if (std::any_of(tensor.shape.begin(), tensor.shape.end(), [](auto n) { return n <= 0; })) {
      throw MakeError(ErrorCode::kCorrupt, label + " has a zero dimension, shape " +
                                               ShapeText(tensor.shape) +
                                               "; download the file again");
    }
    if (data_offset > bytes.size() || offset > bytes.size() - data_offset ||
        tensor.bytes > bytes.size() - data_offset - offset) {
      throw MakeError(ErrorCode::kCorrupt,
                      "truncated: " + label + " needs " + std::to_string(tensor.bytes) +
                          " bytes at offset " + std::to_string(data_offset) + " + " +
                          std::to_string(offset) + ", the file has " +
                          std::to_string(bytes.size()) + "; download the file again");
    }
    if ((data_offset + offset) % kTensorAlignment != 0) {
      throw MakeError(ErrorCode::kUnsupported,
                      label + " starts at byte " + std::to_string(data_offset + offset) +
                          ", not a multiple of " + std::to_string(kTensorAlignment) +
                          "; convert the model with general.alignment 32");
    }
    tensor.data = bytes.data() + data_offset + offset;
    tensor_index_.emplace(tensor.name, tensors_.size());
    tensors_.push_back(std::move(tensor));
  }
}

const GgufTensor* GgufFile::FindTensor(const std::string& name) const {
  const auto found = tensor_index_.find(name);
  return found == tensor_index_.end() ? nullptr : &tensors_[found->second];
}

void GgufFile::FeedValue(const std::string& key, const FeedFn& feed) const {
  const gguf_context* c = context_.get();
  const std::int64_t id = gguf_find_key(c, key.c_str());
  if (id < 0) return;
  const auto text = [&feed](const char* value) { feed(value, std::strlen(value) + 1); };
  gguf_type type = gguf_get_kv_type(c, id);
  feed(&type, sizeof type);
  if (type == GGUF_TYPE_STRING) return text(gguf_get_val_str(c, id));
  if (type != GGUF_TYPE_ARRAY) return feed(gguf_get_val_data(c, id), SizeOfType(type));
  type = gguf_get_arr_type(c, id);
  feed(&type, sizeof type);
  const std::size_t n = gguf_get_arr_n(c, id);
  if (type != GGUF_TYPE_STRING) return feed(gguf_get_arr_data(c, id), n * SizeOfType(type));
  for (std::size_t i = 0; i < n; ++i) text(gguf_get_arr_str(c, id, i));
}

std::optional<double> GgufFile::Number(const std::string& key) const {
  const std::int64_t id = gguf_find_key(context_.get(), key.c_str());
  if (id < 0) return std::nullopt;
  const gguf_context* c = context_.get();
  switch (gguf_get_kv_type(c, id)) {
    case GGUF_TYPE_FLOAT32:
      return gguf_get_val_f32(c, id);
    case GGUF_TYPE_FLOAT64:
      return gguf_get_val_f64(c, id);
    default:
      return static_cast<double>(*Integer(key));
  }
}

std::optional<std::int64_t> GgufFile::Integer(const std::string& key) const {
  const std::int64_t id = gguf_find_key(context_.get(), key.c_str());
  if (id < 0) return std::nullopt;
  const gguf_context* c = context_.get();
  switch (gguf_get_kv_type(c, id)) {
    case GGUF_TYPE_UINT8:
      return gguf_get_val_u8(c, id);
    case GGUF_TYPE_INT8:
      return gguf_get_val_i8(c, id);
    case GGUF_TYPE_UINT16:
      return gguf_get_val_u16(c, id);
    case GGUF_TYPE_INT16:
      return gguf_get_val_i16(c, id);
    case GGUF_TYPE_UINT32:
      return gguf_get_val_u32(c, id);
    case GGUF_TYPE_INT32:
      return gguf_get_val_i32(c, id);
    case GGUF_TYPE_INT64:
      return gguf_get_val_i64(c, id);
    case GGUF_TYPE_UINT64: {
      const std::uint64_t value = gguf_get_val_u64(c, id);
      if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
        throw MakeError(ErrorCode::kCorrupt,
                        "key " + Quoted(key) + " is " + std::to_string(value) + ", out of range");
      }
      return static_cast<std::int64_t>(value);
    }
    default:
      throw MakeError(ErrorCode::kCorrupt, "key " + Quoted(key) + " must be an integer, it is " +
                                               gguf_type_name(gguf_get_kv_type(c, id)));
  }
}

std::optional<bool> GgufFile::Flag(const std::string& key) const {
  const std::int64_t id = gguf_find_key(context_.get(), key.c_str());
  if (id < 0) return std::nullopt;
  if (gguf_get_kv_type(context_.get(), id) == GGUF_TYPE_BOOL) {
    return gguf_get_val_bool(context_.get(), id);
  }
  return *Integer(key) != 0;
}

std::optional<std::string> GgufFile::Text(const std::string& key) const {
  const std::int64_t id = gguf_find_key(context_.get(), key.c_str());
  if (id < 0) return std::nullopt;
  const gguf_type type = gguf_get_kv_type(context_.get(), id);
  if (type != GGUF_TYPE_STRING) {
    throw MakeError(ErrorCode::kCorrupt,
                    "key " + Quoted(key) + " must be a string, it is " + gguf_type_name(type));
  }
  return gguf_get_val_str(context_.get(), id);
}

std::optional<std::int64_t> GgufFile::UniformInteger(const std::string& key) const {
  const std::int64_t id = gguf_find_key(context_.get(), key.c_str());
  const gguf_context* c = context_.get();
  if (id < 0 || gguf_get_kv_type(c, id) != GGUF_TYPE_ARRAY) return Integer(key);
  const gguf_type type = gguf_get_arr_type(c, id);
  const std::size_t count = gguf_get_arr_n(c, id);
  if ((type != GGUF_TYPE_INT32 && type != GGUF_TYPE_UINT32) || count == 0) {
    throw MakeError(ErrorCode::kCorrupt, "key " + Quoted(key) + " must hold integers");
  }
  const auto* values = static_cast<const std::int32_t*>(gguf_get_arr_data(c, id));
  if (!std::all_of(values, values + count, [&](std::int32_t v) { return v == values[0]; })) {
    throw MakeError(ErrorCode::kUnsupported,
                    "key " + Quoted(key) +
                        " differs between layers; only models whose layers all "
                        "have the same shape are supported");
  }
  return values[0];
}

std::vector<std::string> GgufFile::Keys() const {
  std::vector<std::string> keys;
  for (std::int64_t i = 0; i < gguf_get_n_kv(context_.get()); ++i) {
    keys.emplace_back(gguf_get_key(context_.get(), i));
  }
  return keys;
}

std::int64_t GgufFile::ArraySize(const std::string& key, gguf_type element) const {
  const std::int64_t id = gguf_find_key(context_.get(), key.c_str());
  if (id < 0) return -1;
  if (gguf_get_kv_type(context_.get(), id) != GGUF_TYPE_ARRAY ||
      gguf_get_arr_type(context_.get(), id) != element) {
    throw MakeError(ErrorCode::kCorrupt,
                    "key " + Quoted(key) + " must be an array of " + gguf_type_name(element));
  }
  return static_cast<std::int64_t>(gguf_get_arr_n(context_.get(), id));
}

const char* GgufFile::ArrayText(const std::string& key, std::int64_t i) const {
  const std::int64_t id = gguf_find_key(context_.get(), key.c_str());
  return gguf_get_arr_str(context_.get(), id, static_cast<std::size_t>(i));
}

Error GgufFile::MakeError(ErrorCode code, const std::string& what) const {
  return {code, path_ + ": " + what};
}

std::string ShapeText(std::span<const std::int64_t> shape) {
  std::size_t rank = shape.size();
  while (rank > 1 && shape[rank - 1] == 1) --rank;
  std::string out = "[";
  for (std::size_t i = 0; i < rank; ++i) {
    out += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return out + "]";
}

}  // namespace fathom
