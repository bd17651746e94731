// SPDX-License-Identifier: MIT
#include "memory/state_stream.h"

namespace fathom {
namespace {

constexpr std::size_t kLine = 64;
constexpr std::uint8_t kOpen = 0, kSealed = 1;

std::size_t NextLine(std::size_t at) { return (at + kLine - 1) / kLine * kLine; }

}  // namespace

void StateWriter::Append(const void* data, std::size_t size) {
  const auto* from = static_cast<const std::byte*>(data);
  bytes_.insert(bytes_.end(), from, from + size);
}

void StateWriter::PutOpen(std::span<const std::byte> bytes) {
  Put(kOpen);
  bytes_.resize(NextLine(bytes_.size()));
  Append(bytes.data(), bytes.size());
}

void StateWriter::PutSealed(std::uint64_t* id, const PieceBytes& bytes) {
  if (pieces_ == nullptr) return PutOpen(bytes());
  const PiecePlace place = pieces_->Keep(id, bytes);
  Put(kSealed);
  Put(place);
}

const std::byte* StateReader::Take(std::size_t size) {
  if (size > left()) Fail("it ends too early");
  at_ += size;
  return bytes_.data() + at_ - size;
}

std::string StateReader::GetText() {
  const auto text = GetAll<char>();
  return {text.begin(), text.end()};
}

std::span<std::byte> StateReader::GetPiece(std::size_t size, std::uint64_t* id) {
  *id = 0;
  const auto kind = Get<std::uint8_t>();
  if (kind == kSealed && pieces_ != nullptr) {
    const auto place = Get<PiecePlace>();
    return pieces_->Find(place, size, id);
  }
  if (kind != kOpen) Fail("a piece is of no known kind");
  const std::size_t pad = NextLine(at_) - at_;
  Take(pad);
  Take(size);
  return bytes_.subspan(at_ - size, size);
}

void StateReader::Finish() const {
  if (left() != 0) Fail("there are " + std::to_string(left()) + " bytes too many");
}

void StateReader::Fail(const std::string& reason) const {
  throw Error(ErrorCode::kCorrupt, "the " + what_ + " is damaged: " + reason);
}

}  // namespace fathom
