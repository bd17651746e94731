// SPDX-License-Identifier: MIT
#include "engine/stored_files.h"

namespace fathom {
namespace {

namespace fs = std::filesystem;

struct Stopped {};

}  // namespace

std::uint64_t PieceFile::NewId() {
  static std::atomic<std::uint64_t> last = 0;
  return ++last;
}

PiecePlace PieceFile::Keep(std::uint64_t* id, const PieceBytes& bytes) {
  if (const auto found = known_.find(*id); *id != 0 && found != known_.end()) {
    used_.insert(found->second.file);
    places_.insert(*found);
    return found->second;
  }
  if (writer_ == nullptr) {
    const ArchivedFile file = {number_, ArchiveKind::kPieces, {}, 0, 0};
    writer_ = std::make_unique<ArchiveWriter>(session_ / file.name(), file.kind);
  }
  writer_->PadTo(64);
  const PiecePlace place = {number_, static_cast<std::uint64_t>(writer_->at()) - kArchivePage};
  writer_->Append(bytes());
  *id = NewId();
  places_[*id] = place;
  return place;
}

std::vector<ArchivedFile> PieceFile::Finish(const std::vector<ArchivedFile>& before) {
  std::vector<ArchivedFile> files;
  for (const ArchivedFile& file : before) {
    if (file.kind == ArchiveKind::kPieces && used_.count(file.number) != 0) files.push_back(file);
  }
  if (writer_ != nullptr) {
    files.push_back({number_, ArchiveKind::kPieces, writer_->Finish(), 0, 0});
  }
  return files;
}

const ArchiveMapping& MappedFiles::Map(const fs::path& session, const ArchivedFile& file) {
  auto& mapping = files_[file.number];
  mapping = std::make_unique<ArchiveMapping>(session / file.name(), file.kind, file.digest.bytes);
  if (file.kind == ArchiveKind::kPieces) pieces_.insert(file.number);
  return *mapping;
}

const ArchiveMapping& MappedFiles::MapChecked(const fs::path& session, const ArchivedFile& file) {
  const ArchiveMapping& mapping = Map(session, file);
  const std::span<const std::byte> data = mapping.data();
  if (Checksum({data.data() - kArchivePage, data.size() + kArchivePage}) != file.digest.checksum) {
    ThrowChecksum(session / file.name());
  }
  return mapping;
}

std::span<std::byte> MappedFiles::Find(const PiecePlace& place, std::size_t size,
                                       std::uint64_t* id) {
  const auto found = files_.find(place.file);
  if (found == files_.end() || pieces_.count(place.file) == 0) Fail("a piece is in no file of it");
  const std::span<std::byte> bytes = found->second->data();
  if (place.offset % 64 != 0 || place.offset > bytes.size() || size > bytes.size() - place.offset) {
    Fail("a piece lies beyond its file");
  }
  *id = PieceFile::NewId();
  places_[*id] = place;
  return bytes.subspan(place.offset, size);
}

void MappedFiles::Fail(const std::string& reason) const {
  throw Error(ErrorCode::kCorrupt, "session '" + name_ + "' is damaged: " + reason);
}

Verification::~Verification() {
  stop_ = true;
  if (thread_.joinable()) thread_.join();
}

void Verification::Start(const fs::path& session, std::vector<ArchivedFile> files) {
  thread_ = std::thread([this, session, files = std::move(files)] {
    try {
      for (const ArchivedFile& file : files) Check(session, file);
    } catch (const Stopped&) {
    } catch (...) {
      failure_ = std::current_exception();
    }
  });
}

void Verification::Wait() {
  if (thread_.joinable()) thread_.join();
  if (failure_) std::rethrow_exception(failure_);
}

void Verification::Check(const fs::path& session, const ArchivedFile& file) {
  const ArchiveMapping mapping(session / file.name(), file.kind, file.digest.bytes);
  const std::uint64_t checksum = mapping.ChecksumOfFile([this] {
    if (stop_) throw Stopped();
  });
  if (checksum != file.digest.checksum) ThrowChecksum(session / file.name());
}

}  // namespace fathom
