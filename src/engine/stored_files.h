// SPDX-License-Identifier: MIT
// Files of a stored session while it runs: where its pieces go to and come from, and the check of
// their content.
#pragma once

#include <atomic>
#include <exception>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "archive/archive_file.h"
#include "archive/manifest.h"
#include "fathom/error.h"
#include "memory/state_stream.h"

namespace fathom {

// Full segments of indexes, in one new file per save. Not thread-safe.
class PieceFile final : public PieceStore {
 public:
  using Places = std::map<std::uint64_t, PiecePlace>;  // by id

  // known: of pieces in files of earlier saves. Both must outlive it.
  PieceFile(const std::filesystem::path& session, std::uint64_t number, const Places& known)
      : session_(session), number_(number), known_(known) {}

  PiecePlace Keep(std::uint64_t* id, const PieceBytes& bytes) override;
  // Files of earlier saves that are still needed, and the new one if there is any.
  std::vector<ArchivedFile> Finish(const std::vector<ArchivedFile>& before);
  const Places& places() const { return places_; }

  static std::uint64_t NewId();

 private:
  const std::filesystem::path& session_;
  const std::uint64_t number_;
  const Places& known_;
  Places places_;
  std::set<std::uint64_t> used_;
  std::unique_ptr<ArchiveWriter> writer_;
};

// All that a resumed session lies in, and where its pieces are.
class MappedFiles final : public StateReader::PieceSource {
 public:
  explicit MappedFiles(std::string name) : name_(std::move(name)) {}

  const ArchiveMapping& Map(const std::filesystem::path& session, const ArchivedFile& file);
  // The same of a small file, whose checksum is compared at once. Throws Error(kCorrupt).
  const ArchiveMapping& MapChecked(const std::filesystem::path& session, const ArchivedFile& file);
  std::span<std::byte> Find(const PiecePlace& place, std::size_t size, std::uint64_t* id) override;
  const PieceFile::Places& places() const { return places_; }

 private:
  [[noreturn]] void Fail(const std::string& reason) const;

  std::string name_;
  std::map<std::uint64_t, std::unique_ptr<ArchiveMapping>> files_;
  std::set<std::uint64_t> pieces_;
  PieceFile::Places places_;
};

// Compares checksums of files in a thread of its own; given up when it goes away.
class Verification {
 public:
  Verification() = default;
  ~Verification();
  Verification(const Verification&) = delete;
  Verification& operator=(const Verification&) = delete;

  // Rows are read through a mapping of their own: nothing is copied.
  void Start(const std::filesystem::path& session, std::vector<ArchivedFile> files);
  // Throws what the check has found, each time.
  void Wait();

 private:
  void Check(const std::filesystem::path& session, const ArchivedFile& file);

  std::atomic<bool> stop_ = false;
  std::thread thread_;
  std::exception_ptr failure_;
};

}  // namespace fathom
