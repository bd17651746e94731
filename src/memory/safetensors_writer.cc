// SPDX-License-Identifier: MIT
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "base/half.h"
#include "memory/safetensors.h"

namespace fathom {
namespace {

constexpr std::size_t kHeaderAlignment =
    8;  // so that all tensors lie at multiples of their elements
constexpr std::size_t kConvertBlock = 4096;  // elements converted and written at a time

std::string MebibyteText(std::int64_t bytes) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.1f MiB", static_cast<double>(bytes) / (1 << 20));
  return text.data();
}

// Bytes of a tensor. Throws Error(kUsage) for a shape that is none.
std::int64_t SpecBytes(const SafetensorsSpec& spec) {
  std::int64_t bytes = TensorElementBytes(spec.type);
  for (const std::int64_t n : spec.shape) {
    if (n < 0 || (n > 0 && bytes > std::numeric_limits<std::int64_t>::max() / 2 / n)) {
      throw Error(ErrorCode::kUsage, "tensor '" + spec.name + "' cannot have shape " +
                                         TensorShapeText(spec.shape) +
                                         "; dimensions are sizes that fit a file");
    }
    bytes *= n;
  }
  return bytes;
}

std::string Folder(const std::string& path) {
  const auto folder = std::filesystem::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

bool SameFile(int fd, const std::string& path) {
  struct stat open_file {};
  struct stat named {};
  return fstat(fd, &open_file) == 0 && stat(path.c_str(), &named) == 0 &&
         open_file.st_ino == named.st_ino && open_file.st_dev == named.st_dev;
}

}  // namespace

SafetensorsWriter::SafetensorsWriter(const std::string& path, std::vector<SafetensorsSpec> tensors,
                                     const std::map<std::string, std::string>& metadata)
    : path_(path), partial_(path + ".partial"), specs_(std::move(tensors)) {
  const std::string header = Layout(metadata);
  struct stat target {};
  if (stat(path_.c_str(), &target) == 0 && !S_ISREG(target.st_mode)) {
    throw Error(ErrorCode::kIo, path_ + ": exists and is not a regular file; choose another name");
  }
  Open();
  try {
    Reserve();
    Put(0, header.data(), header.size());
  } catch (...) {
    unlink(partial_.c_str());
    close(fd_);
    throw;
  }
}

SafetensorsWriter::~SafetensorsWriter() {
  if (fd_ < 0) return;
  unlink(partial_.c_str());  // before the lock goes with the descriptor
  close(fd_);
}

// Places the tensors and returns the header: its length, and JSON padded with spaces.
std::string SafetensorsWriter::Layout(const std::map<std::string, std::string>& metadata) {
  std::vector<std::size_t> order(specs_.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [this](std::size_t a, std::size_t b) {
    return TensorElementBytes(specs_[a].type) > TensorElementBytes(specs_[b].type);
  });
  nlohmann::ordered_json json;
  if (!metadata.empty()) json["__metadata__"] = metadata;
  extents_.resize(specs_.size());
  std::int64_t at = 0;
  for (const std::size_t i : order) {
    const SafetensorsSpec& spec = specs_[i];
    const std::int64_t bytes = SpecBytes(spec);
    if (json.contains(spec.name)) {
      throw Error(ErrorCode::kUsage, "tensor '" + spec.name + "' is declared twice");
    }
    if (bytes > std::numeric_limits<std::int64_t>::max() / 2 - at) {
      throw Error(ErrorCode::kUsage, "the tensors up to '" + spec.name + "' do not fit any file");
    }
    json[spec.name] = {{"dtype", TensorTypeName(spec.type)},
                       {"shape", spec.shape},
                       {"data_offsets", {at, at + bytes}}};
    extents_[i] = {at, bytes / TensorElementBytes(spec.type), 0};
    at += bytes;
  }
  // Bytes that are not UTF-8 (a file's name) are replaced: JSON cannot hold them.
  std::string text =
      json.is_null() ? "{}" : json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  text.resize((text.size() + kHeaderAlignment - 1) / kHeaderAlignment * kHeaderAlignment, ' ');
  const std::uint64_t length = text.size();
  std::string header(sizeof(length), '\0');
  std::memcpy(header.data(), &length, sizeof(length));
  header += text;
  for (Extent& extent : extents_) extent.begin += static_cast<std::int64_t>(header.size());
  file_bytes_ = static_cast<std::int64_t>(header.size()) + at;
  return header;
}

// Opens PATH.partial for this process alone. One that a killed process left behind is written anew.
void SafetensorsWriter::Open() {
  constexpr int kTries = 8;
  for (int i = 0; i < kTries; ++i) {
    fd_ = open(partial_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (fd_ < 0) throw IoError("cannot create the file", errno);
    if (flock(fd_, LOCK_EX | LOCK_NB) != 0) {
      close(std::exchange(fd_, -1));
      throw Error(ErrorCode::kIo, partial_ +
                                      ": another process is writing this file; wait for it "
                                      "or choose another name");
    }
    // Its writer may have renamed or removed it between the two calls.
    if (SameFile(fd_, partial_)) return;
    close(std::exchange(fd_, -1));
  }
  throw Error(ErrorCode::kIo, partial_ + ": other processes keep replacing this file");
}

void SafetensorsWriter::Reserve() const {
  if (ftruncate(fd_, 0) != 0) throw IoError("cannot empty the file", errno);
  struct statvfs disk {};
  if (statvfs(Folder(path_).c_str(), &disk) == 0) {
    const std::uint64_t free_bytes = std::uint64_t{disk.f_bavail} * disk.f_frsize;
    if (free_bytes < static_cast<std::uint64_t>(file_bytes_)) {
      throw NoRoom(static_cast<std::int64_t>(free_bytes));
    }
  }
  if (fallocate(fd_, 0, 0, file_bytes_) == 0) return;
  const int code = errno;
  if (code == ENOSPC || code == EDQUOT) {
    throw IoError("cannot take " + MebibyteText(file_bytes_) + " of disk space", code);
  }
  // Not every file system can reserve; then a full disk shows while writing.
  if (ftruncate(fd_, file_bytes_) != 0) {
    throw IoError("cannot make a file of " + MebibyteText(file_bytes_), errno);
  }
}

std::int64_t SafetensorsWriter::Place(std::size_t tensor, std::int64_t first, std::size_t n) {
  const SafetensorsSpec& spec = specs_.at(tensor);
  Extent& extent = extents_[tensor];
  const auto count = static_cast<std::int64_t>(n);
  if (first < 0 || first > extent.elements || count > extent.elements - first) {
    throw Error(ErrorCode::kInternal, path_ + ": elements " + std::to_string(first) + " to " +
                                          std::to_string(first + count) + " of tensor '" +
                                          spec.name + "', which has " +
                                          std::to_string(extent.elements));
  }
  extent.written += count;
  return extent.begin + first * TensorElementBytes(spec.type);
}

void SafetensorsWriter::WriteFloats(std::size_t tensor, std::int64_t first,
                                    std::span<const float> values) {
  std::int64_t offset = Place(tensor, first, values.size());
  const TensorType type = specs_[tensor].type;
  if (type == TensorType::kF32) return Put(offset, values.data(), values.size_bytes());
  if (type != TensorType::kF16 && type != TensorType::kBf16) {
    throw Error(ErrorCode::kInternal, path_ + ": floats for tensor '" + specs_[tensor].name +
                                          "' of " + std::string(TensorTypeName(type)));
  }
  std::array<std::uint16_t, kConvertBlock> block{};
  while (!values.empty()) {
    const std::span<const float> part = values.first(std::min(kConvertBlock, values.size()));
    if (type == TensorType::kF16) {
      ConvertFloatToHalf(part.data(), static_cast<std::int64_t>(part.size()), block.data());
    } else {
      std::transform(part.begin(), part.end(), block.begin(), FloatToBf16);
    }
    Put(offset, block.data(), part.size() * sizeof(block[0]));
    offset += static_cast<std::int64_t>(part.size() * sizeof(block[0]));
    values = values.subspan(part.size());
  }
}

void SafetensorsWriter::WriteDoubles(std::size_t tensor, std::int64_t first,
                                     std::span<const double> values) {
  const std::int64_t offset = Place(tensor, first, values.size());
  if (specs_[tensor].type != TensorType::kF64) {
    throw Error(ErrorCode::kInternal,
                path_ + ": doubles for tensor '" + specs_[tensor].name + "', which is not F64");
  }
  Put(offset, values.data(), values.size_bytes());
}

void SafetensorsWriter::WriteIntegers(std::size_t tensor, std::int64_t first,
                                      std::span<const std::int64_t> values) {
  const std::int64_t offset = Place(tensor, first, values.size());
  if (specs_[tensor].type != TensorType::kI64) {
    throw Error(ErrorCode::kInternal,
                path_ + ": integers for tensor '" + specs_[tensor].name + "', which is not I64");
  }
  Put(offset, values.data(), values.size_bytes());
}

void SafetensorsWriter::Put(std::int64_t offset, const void* data, std::size_t bytes) const {
  const auto* at = static_cast<const std::byte*>(data);
  while (bytes > 0) {
    const ssize_t n = pwrite(fd_, at, bytes, offset);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0)
      throw IoError("cannot write at byte " + std::to_string(offset), n < 0 ? errno : EIO);
    at += n;
    offset += n;
    bytes -= static_cast<std::size_t>(n);
  }
}

void SafetensorsWriter::Commit() {
  for (std::size_t i = 0; i < specs_.size(); ++i) {
    if (extents_[i].written != extents_[i].elements) {
      throw Error(ErrorCode::kInternal, path_ + ": " + std::to_string(extents_[i].written) +
                                            " of " + std::to_string(extents_[i].elements) +
                                            " elements of tensor '" + specs_[i].name +
                                            "' were written");
    }
  }
  if (fsync(fd_) != 0) throw IoError("cannot write the file to the disk", errno);
  if (rename(partial_.c_str(), path_.c_str()) != 0) {
    throw IoError("cannot rename the file to " + path_, errno);
  }
  close(std::exchange(fd_, -1));
  // The name too must survive a power cut; where a folder cannot be synced nothing is lost but
  // that.
  const int folder = open(Folder(path_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder >= 0) {
    static_cast<void>(fsync(folder));
    close(folder);
  }
}

Error SafetensorsWriter::IoError(const std::string& what, int code) const {
  return {ErrorCode::kIo, partial_ + ": " + what + ": " + std::strerror(code)};
}

Error SafetensorsWriter::NoRoom(std::int64_t free_bytes) const {
  return {ErrorCode::kIo, path_ + ": the file needs " + MebibyteText(file_bytes_) + " and " +
                              MebibyteText(free_bytes) +
                              " are free on that disk; free some or choose another"};
}

}  // namespace fathom
