// SPDX-License-Identifier: MIT
// Export and import: a stored session as a tar archive of its folder, manifest first.
#include <archive.h>
#include <archive_entry.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "archive/file_ops.h"
#include "archive/manifest.h"
#include "archive/staging.h"
#include "fathom/error.h"
#include "fathom/session_folder.h"

namespace fathom {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kBuffer = std::size_t{1} << 20;

struct FreeArchive {
  void operator()(archive* a) const { archive_free(a); }
};
struct FreeEntry {
  void operator()(archive_entry* e) const { archive_entry_free(e); }
};
using Archive = std::unique_ptr<archive, FreeArchive>;
using Entry = std::unique_ptr<archive_entry, FreeEntry>;

[[noreturn]] void ThrowArchive(const std::string& what, const fs::path& path, archive* a) {
  const int error = archive_errno(a);
  if (error > 0 && error < 200) ThrowIo(what, path, error);
  const char* reason = archive_error_string(a);
  throw Error(ErrorCode::kCorrupt, "cannot " + what + " '" + path.string() +
                                       "': " + (reason == nullptr ? "unknown reason" : reason));
}

void AddEntry(archive* out, const fs::path& to, const std::string& name, std::int64_t bytes) {
  const Entry entry(archive_entry_new());
  archive_entry_set_pathname(entry.get(), name.c_str());
  archive_entry_set_size(entry.get(), bytes);
  archive_entry_set_filetype(entry.get(), AE_IFREG);
  archive_entry_set_perm(entry.get(), 0600);
  if (archive_write_header(out, entry.get()) != ARCHIVE_OK) ThrowArchive("write to", to, out);
}

void AddData(archive* out, const fs::path& to, std::span<const std::byte> bytes) {
  if (archive_write_data(out, bytes.data(), bytes.size()) !=
      static_cast<la_ssize_t>(bytes.size())) {
    ThrowArchive("write to", to, out);
  }
}

void AddFile(archive* out, const fs::path& to, const fs::path& session, const ArchivedFile& file) {
  const ArchiveMapping mapping(session / file.name(), file.kind, file.digest.bytes);
  AddEntry(out, to, file.name(), file.digest.bytes);
  // The header page lies before data().
  AddData(out, to,
          {mapping.data().data() - kArchivePage, static_cast<std::size_t>(file.digest.bytes)});
}

void WriteTar(const fs::path& session, const Manifest& manifest, const fs::path& to) {
  const Archive out(archive_write_new());
  if (archive_write_set_format_pax_restricted(out.get()) != ARCHIVE_OK ||
      archive_write_open_filename(out.get(), to.c_str()) != ARCHIVE_OK) {
    ThrowArchive("create", to, out.get());
  }
  const std::string text = ManifestText(manifest);
  AddEntry(out.get(), to, kManifestName, static_cast<std::int64_t>(text.size()));
  AddData(out.get(), to, std::as_bytes(std::span(text.data(), text.size())));
  for (const ArchivedFile& file : manifest.files) AddFile(out.get(), to, session, file);
  if (archive_write_close(out.get()) != ARCHIVE_OK) ThrowArchive("write to", to, out.get());
}

// Calls fn with the data of the current entry, part by part.
template <typename Fn>
void ReadEntry(archive* in, const fs::path& from, const Fn& fn) {
  std::vector<std::byte> buffer(kBuffer);
  for (;;) {
    const la_ssize_t n = archive_read_data(in, buffer.data(), buffer.size());
    if (n < 0) ThrowArchive("read", from, in);
    if (n == 0) return;
    fn(std::span<const std::byte>(buffer.data(), static_cast<std::size_t>(n)));
  }
}

// Name of the next entry, empty at the end.
std::string NextEntry(archive* in, const fs::path& from) {
  archive_entry* entry = nullptr;
  const int result = archive_read_next_header(in, &entry);
  if (result == ARCHIVE_EOF) return {};
  if (result != ARCHIVE_OK) ThrowArchive("read", from, in);
  const char* name = archive_entry_pathname(entry);
  return name == nullptr ? "?" : name;
}

std::string ReadManifestEntry(archive* in, const fs::path& from) {
  constexpr std::size_t kMostText = std::size_t{64} << 20;
  if (NextEntry(in, from) != kManifestName) {
    throw Error(
        ErrorCode::kCorrupt,
        "'" + from.string() + "' is not an exported session: it does not begin with a manifest");
  }
  std::string text;
  ReadEntry(in, from, [&](std::span<const std::byte> part) {
    text.append(reinterpret_cast<const char*>(part.data()), part.size());
    if (text.size() > kMostText) {
      throw Error(ErrorCode::kCorrupt, "the manifest in '" + from.string() + "' is too large");
    }
  });
  return text;
}

void WriteEntry(archive* in, const fs::path& from, const fs::path& to, std::int64_t bytes) {
  NewFile file(to);
  ReadEntry(in, from, [&](std::span<const std::byte> part) {
    bytes -= static_cast<std::int64_t>(part.size());
    if (bytes < 0) {
      throw Error(ErrorCode::kCorrupt,
                  "'" + from.string() + "' is damaged: a file in it is too long");
    }
    file.Write(part);
  });
  file.Finish();
}

void CheckContent(const fs::path& staging, const Manifest& manifest, const fs::path& from) {
  for (const ArchivedFile& file : manifest.files) {
    std::error_code error;
    if (!fs::exists(staging / file.name(), error)) {
      throw Error(ErrorCode::kCorrupt,
                  "'" + from.string() + "' is cut off: " + file.name() + " is missing");
    }
    const ArchiveMapping header(staging / file.name(), file.kind, file.digest.bytes);
    if (FileChecksum(staging / file.name(), [](std::int64_t) {}) != file.digest.checksum) {
      throw Error(ErrorCode::kCorrupt, "'" + from.string() + "' is damaged: the checksum of " +
                                           file.name() + " differs");
    }
  }
}

}  // namespace

void SessionFolder::Export(const std::string& name, const fs::path& file) const {
  Require(name);
  std::error_code error;
  if (fs::exists(file, error)) {
    throw Error(ErrorCode::kUsage, "'" + file.string() + "' exists already; choose another name");
  }
  const fs::path part = file.string() + ".partial";
  try {
    WriteTar(SessionPath(name), ReadManifest(SessionPath(name)), part);
    const int written = open(part.c_str(), O_RDONLY | O_CLOEXEC);
    const bool durable = written >= 0 && Files().Sync(written) == 0;
    const int reason = errno;
    if (written >= 0) close(written);
    if (!durable) ThrowIo("make durable", part, reason);
    if (Files().Rename(part.string(), file.string()) != 0) ThrowIo("create", file, errno);
  } catch (...) {
    static_cast<void>(Files().Unlink(part.string()));
    throw;
  }
}

void SessionFolder::Import(const fs::path& file, const std::string& name) {
  CheckName(name);
  RequireAbsent(name);
  RemoveStagings(path_);
  const Archive in(archive_read_new());
  archive_read_support_format_tar(in.get());
  if (archive_read_open_filename(in.get(), file.c_str(), kBuffer) != ARCHIVE_OK) {
    ThrowArchive("read", file, in.get());
  }
  const std::string text = ReadManifestEntry(in.get(), file);
  const Manifest manifest = ParseManifest(text, file);
  Staging staging(path_);
  for (std::string entry; !(entry = NextEntry(in.get(), file)).empty();) {
    // Nothing but what the manifest names, so that no path leads elsewhere.
    const auto known = std::ranges::find(manifest.files, entry, &ArchivedFile::name);
    if (known == manifest.files.end()) {
      throw Error(ErrorCode::kCorrupt, "'" + file.string() +
                                           "' is no exported session: it holds '" + entry +
                                           "', which its manifest does not name");
    }
    WriteEntry(in.get(), file, staging.path() / entry, known->digest.bytes);
  }
  CheckContent(staging.path(), manifest, file);
  WriteManifest(staging.path(), manifest);
  staging.MoveTo(SessionPath(name));
}

}  // namespace fathom
