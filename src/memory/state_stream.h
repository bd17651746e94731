// SPDX-License-Identifier: MIT
// How parts of a session write what they know and read it back: plain bytes of this machine, in a
// fixed order, with big immutable pieces kept apart so that they are stored once.
//
// A reader never trusts what it reads: sizes are checked against what is left, and whoever calls
// checks values against its own shape. Errors are Error(kCorrupt) naming the part.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "fathom/error.h"

namespace fathom {

// Where a piece lies that was stored by itself.
struct PiecePlace {
  std::uint64_t file = 0;    // number of the file
  std::uint64_t offset = 0;  // a multiple of 64
};

// Makes the bytes of a piece, valid until those of another piece are made.
using PieceBytes = std::function<std::span<const std::byte>()>;

// Keeps pieces that will not change any more.
class PieceStore {
 public:
  virtual ~PieceStore() = default;
  // The place of a piece. *id is 0 for a piece that no store has seen, and set to one that this
  // process gives to no other piece; of a piece whose id the store knows, bytes are not asked for.
  virtual PiecePlace Keep(std::uint64_t* id, const PieceBytes& bytes) = 0;
};

class StateWriter {
 public:
  // pieces: may be null, then pieces lie among the rest.
  explicit StateWriter(PieceStore* pieces = nullptr) : pieces_(pieces) {}

  template <typename T>
  void Put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    Append(&value, sizeof(T));
  }
  template <typename T>
  void PutAll(std::span<const T> values) {
    static_assert(std::is_trivially_copyable_v<T>);
    Put<std::uint64_t>(values.size());
    Append(values.data(), values.size_bytes());
  }
  template <typename T>
  void PutAll(const std::vector<T>& values) {
    PutAll(std::span<const T>(values));
  }
  void PutText(const std::string& text) { PutAll(std::span<const char>(text)); }
  // A piece that may still change lies at a cache line among the rest.
  void PutOpen(std::span<const std::byte> bytes);
  // One that does not: see PieceStore::Keep.
  void PutSealed(std::uint64_t* id, const PieceBytes& bytes);

  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  void Append(const void* data, std::size_t size);

  PieceStore* pieces_;
  std::vector<std::byte> bytes_;
};

// Bytes that a reader hands out stay valid, and may be changed, as long as what it reads from.
class StateReader {
 public:
  // Finds pieces again, and the id under which the store knows them. Throws Error(kCorrupt).
  class PieceSource {
   public:
    virtual ~PieceSource() = default;
    virtual std::span<std::byte> Find(const PiecePlace& place, std::size_t size,
                                      std::uint64_t* id) = 0;
  };

  // bytes: starts at a cache line. what: for messages, "index of session 'a'".
  StateReader(std::span<std::byte> bytes, PieceSource* pieces, std::string what)
      : bytes_(bytes), pieces_(pieces), what_(std::move(what)) {}

  template <typename T>
  T Get() {
    static_assert(std::is_trivially_copyable_v<T>);
    T value;
    std::memcpy(&value, Take(sizeof(T)), sizeof(T));
    return value;
  }
  // Of any size that the bytes hold.
  template <typename T>
  std::vector<T> GetAll() {
    const auto n = Get<std::uint64_t>();
    if (n > left() / sizeof(T)) Fail("a list is longer than the file");
    std::vector<T> values(static_cast<std::size_t>(n));
    if (n > 0)
      std::memcpy(values.data(), Take(values.size() * sizeof(T)), values.size() * sizeof(T));
    return values;
  }
  // Of exactly n values.
  template <typename T>
  std::vector<T> GetAll(std::size_t n) {
    std::vector<T> values = GetAll<T>();
    if (values.size() != n) {
      Fail("a list has " + std::to_string(values.size()) + " values where " + std::to_string(n) +
           " belong");
    }
    return values;
  }
  std::string GetText();
  // A piece, open or sealed; *id is 0 for an open one.
  std::span<std::byte> GetPiece(std::size_t size, std::uint64_t* id);
  // Throws unless all has been read.
  void Finish() const;

  // A value that must be in low .. high.
  template <typename T>
  T GetIn(T low, T high) {
    const T value = Get<T>();
    if (!(value >= low && value <= high)) Fail("a number is out of range");
    return value;
  }
  [[noreturn]] void Fail(const std::string& reason) const;

 private:
  std::size_t left() const { return bytes_.size() - at_; }
  const std::byte* Take(std::size_t size);

  std::span<std::byte> bytes_;
  PieceSource* pieces_;
  std::string what_;
  std::size_t at_ = 0;
};

}  // namespace fathom
