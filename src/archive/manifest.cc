// SPDX-License-Identifier: MIT
#include "archive/manifest.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <utility>

#include "archive/file_ops.h"
#include "fathom/error.h"

namespace fathom {
namespace {

using nlohmann::json;

constexpr const char* kFormat = "fathom session";
constexpr const char* kReplacement = "manifest.new";
constexpr std::size_t kMostText = std::size_t{64} << 20;
constexpr std::array kKinds = {ArchiveKind::kRows, ArchiveKind::kQueries, ArchiveKind::kPieces,
                               ArchiveKind::kState};

// 64-bit numbers do not survive programs that read JSON numbers as doubles.
std::string Hex(std::uint64_t value) {
  std::array<char, 17> text{};
  std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(value));
  return text.data();
}

std::uint64_t ChecksumOf(const std::string& text) {
  return Checksum(std::as_bytes(std::span(text.data(), text.size())));
}

json FileJson(const ArchivedFile& file) {
  json out = {{"number", file.number},
              {"kind", ArchiveKindName(file.kind)},
              {"bytes", file.digest.bytes},
              {"checksum", Hex(file.digest.checksum)}};
  if (file.kind == ArchiveKind::kRows) {
    out["first"] = file.first;
    out["count"] = file.count;
  }
  return out;
}

json Body(const Manifest& m) {
  json files = json::array();
  for (const ArchivedFile& file : m.files) files.push_back(FileJson(file));
  return {{"format", kFormat},
          {"version", kArchiveVersion},
          {"fingerprint", m.fingerprint},
          {"model", m.model},
          {"method", m.method},
          {"n_layers", m.n_layers},
          {"n_heads", m.heads.n_heads},
          {"n_kv_heads", m.heads.n_kv_heads},
          {"head_dim", m.heads.head_dim},
          {"n_tokens", m.n_tokens},
          {"saved_tokens", m.saved_tokens},
          {"mark", m.mark},
          {"has_index", m.has_index},
          {"created", m.created},
          {"next_number", m.next_number},
          {"files", std::move(files)}};
}

// Takes values out of JSON that may hold anything.
class Fields {
 public:
  Fields(const json& object, const std::filesystem::path& path) : object_(object), path_(path) {}

  std::int64_t Number(const char* key, std::int64_t low, std::int64_t high) const {
    const json& value = At(key);
    if (!value.is_number_integer()) Fail(std::string(key) + " is not a whole number");
    const bool too_large = value.is_number_unsigned() &&
                           value.get<std::uint64_t>() >
                               static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
    const auto number = too_large ? -1 : value.get<std::int64_t>();
    if (too_large || number < low || number > high) {
      Fail(std::string(key) + " is " + value.dump() + ", not in " + std::to_string(low) + " .. " +
           std::to_string(high));
    }
    return number;
  }
  std::string Text(const char* key) const {
    const json& value = At(key);
    if (!value.is_string()) Fail(std::string(key) + " is not a text");
    return value.get<std::string>();
  }
  bool Flag(const char* key) const {
    const json& value = At(key);
    if (!value.is_boolean()) Fail(std::string(key) + " is not true or false");
    return value.get<bool>();
  }
  const json& At(const char* key) const {
    if (!object_.is_object() || !object_.contains(key)) Fail(std::string(key) + " is missing");
    return object_.at(key);
  }
  [[noreturn]] void Fail(const std::string& reason) const {
    throw Error(ErrorCode::kCorrupt, "'" + path_.string() + "' is damaged: " + reason);
  }

 private:
  const json& object_;
  const std::filesystem::path& path_;
};

constexpr std::int64_t kMostTokens = std::int64_t{1} << 40;
constexpr std::int64_t kMostBytes = std::int64_t{1} << 60;

ArchivedFile ParseFile(const json& object, const std::filesystem::path& path) {
  const Fields fields(object, path);
  ArchivedFile file;
  file.number = static_cast<std::uint64_t>(fields.Number("number", 1, kMostBytes));
  const std::string kind = fields.Text("kind");
  const auto* const known = std::ranges::find(kKinds, kind, ArchiveKindName);
  if (known == kKinds.end()) fields.Fail("a file is of unknown kind '" + kind + "'");
  file.kind = *known;
  file.digest.bytes = fields.Number("bytes", static_cast<std::int64_t>(kArchivePage), kMostBytes);
  const std::string checksum = fields.Text("checksum");
  if (checksum.size() != 16 ||
      checksum.find_first_not_of("0123456789abcdef") != std::string::npos) {
    fields.Fail("a checksum is not 16 hexadecimal digits");
  }
  file.digest.checksum = std::stoull(checksum, nullptr, 16);
  if (file.kind == ArchiveKind::kRows) {
    file.first = fields.Number("first", 0, kMostTokens);
    file.count = fields.Number("count", 1, kMostTokens);
  }
  return file;
}

std::int64_t RowBytes(const Manifest& m, std::int64_t count) {
  return static_cast<std::int64_t>(kArchivePage) +
         WholeBlocks(count) * m.n_layers * m.heads.n_kv_heads * m.heads.head_dim * 4;
}

// Rows must cover all tokens in order; a file's size follows from its tokens.
void CheckFiles(const Manifest& m, const Fields& fields) {
  std::set<std::uint64_t> numbers;
  std::int64_t covered = 0;
  std::map<ArchiveKind, int> count;
  for (const ArchivedFile& file : m.files) {
    if (!numbers.insert(file.number).second || file.number >= m.next_number) {
      fields.Fail("the number of a file is used twice or not given yet");
    }
    ++count[file.kind];
    if (file.kind != ArchiveKind::kRows) continue;
    if (file.first % kBlockTokens != 0 || file.first > covered ||
        file.count > kMostTokens - file.first || (file.first == 0) != (count[file.kind] == 1) ||
        file.first + file.count <= file.first) {
      fields.Fail("its rows do not follow each other");
    }
    if (file.digest.bytes != RowBytes(m, file.count)) {
      fields.Fail("the size of its rows is not that of their tokens");
    }
    covered = file.first + file.count;
  }
  if (covered < m.n_tokens) fields.Fail("its rows end before its tokens");
  if (count[ArchiveKind::kState] != 1 || count[ArchiveKind::kQueries] > 1) {
    fields.Fail("it must name one file of state, and one of queries at most");
  }
}

HeadGeometry ParseHeads(const Fields& fields) {
  const auto n_kv_heads = static_cast<std::int32_t>(fields.Number("n_kv_heads", 1, 1 << 20));
  const auto n_heads = static_cast<std::int32_t>(fields.Number("n_heads", 1, 1 << 20));
  const auto head_dim = static_cast<std::int32_t>(fields.Number("head_dim", 1, kMaxHeadDim));
  if (n_heads % n_kv_heads != 0 || n_heads / n_kv_heads > kMaxGroup || head_dim % 16 != 0) {
    fields.Fail("its heads are of no shape that fathom has");
  }
  return {n_heads, n_kv_heads, head_dim};
}

void CheckVersion(const Fields& fields, const std::filesystem::path& path) {
  if (fields.Text("format") != kFormat) fields.Fail("it is not the manifest of a session");
  const std::int64_t version =
      fields.Number("version", 1, std::numeric_limits<std::int32_t>::max());
  if (version > kArchiveVersion) {
    ThrowNewer(path, version);
  }
}

void WriteDurably(const std::string& path, const std::string& text) {
  static_cast<void>(Files().Unlink(path));  // of an interrupted replacement
  NewFile file(path);
  file.Write(std::as_bytes(std::span(text.data(), text.size())));
  file.Finish();
}

}  // namespace

std::string ArchivedFile::name() const {
  return std::string(ArchiveKindName(kind)) + "-" + std::to_string(number);
}

std::int64_t Manifest::Bytes() const {
  std::int64_t bytes = 0;
  for (const ArchivedFile& file : files) bytes += file.digest.bytes;
  return bytes;
}

const ArchivedFile* Manifest::Find(ArchiveKind kind) const {
  const auto found = std::ranges::find(files, kind, &ArchivedFile::kind);
  return found == files.end() ? nullptr : &*found;
}

std::string ManifestText(const Manifest& manifest) {
  json body = Body(manifest);
  body["checksum"] = Hex(ChecksumOf(body.dump()));
  return body.dump(1) + "\n";
}

Manifest ParseManifest(const std::string& text, const std::filesystem::path& path) {
  json body = json::parse(text, nullptr, /*allow_exceptions=*/false);
  const Fields fields(body, path);
  if (!body.is_object()) fields.Fail("it is not JSON");
  CheckVersion(fields, path);
  const std::string checksum = fields.Text("checksum");
  body.erase("checksum");
  if (checksum != Hex(ChecksumOf(body.dump(-1, ' ', false, json::error_handler_t::replace)))) {
    fields.Fail("its checksum differs");
  }
  Manifest m;
  const json& fingerprint = fields.At("fingerprint");
  if (!fingerprint.is_object()) fields.Fail("fingerprint is not an object");
  for (const auto& [key, value] : fingerprint.items()) {
    if (!value.is_string()) fields.Fail("a fingerprint is not a text");
    m.fingerprint[key] = value.get<std::string>();
  }
  m.model = fields.Text("model");
  m.method = fields.Text("method");
  m.heads = ParseHeads(fields);
  m.n_layers = static_cast<std::int32_t>(fields.Number("n_layers", 1, 1 << 20));
  m.n_tokens = fields.Number("n_tokens", 0, kMostTokens);
  m.saved_tokens = fields.Number("saved_tokens", m.n_tokens, kMostTokens);
  m.mark = fields.Number("mark", 0, kMostTokens);
  m.has_index = fields.Flag("has_index");
  m.created = fields.Number("created", 0, kMostBytes);
  m.next_number = static_cast<std::uint64_t>(fields.Number("next_number", 1, kMostBytes));
  const json& files = fields.At("files");
  if (!files.is_array()) fields.Fail("files is not a list");
  for (const json& file : files) m.files.push_back(ParseFile(file, path));
  CheckFiles(m, fields);
  return m;
}

Manifest ReadManifest(const std::filesystem::path& session) {
  const std::filesystem::path path = session / kManifestName;
  std::ifstream in(path, std::ios::binary);
  if (!in) ThrowIo("open", path, errno);
  std::string text;
  std::array<char, 65536> part{};
  while (in.read(part.data(), part.size()) || in.gcount() > 0) {
    text.append(part.data(), static_cast<std::size_t>(in.gcount()));
    if (text.size() > kMostText) {
      throw Error(ErrorCode::kCorrupt, "'" + path.string() + "' is too large for a manifest");
    }
  }
  if (in.bad()) ThrowIo("read", path, EIO);
  return ParseManifest(text, path);
}

void WriteManifest(const std::filesystem::path& session, const Manifest& manifest) {
  // The files' names must be durable before a manifest that uses them.
  if (Files().SyncFolder(session.string()) != 0) ThrowIo("make durable", session, errno);
  const std::string replacement = session / kReplacement;
  WriteDurably(replacement, ManifestText(manifest));
  if (Files().Rename(replacement, session / kManifestName) != 0) {
    const int error = errno;
    static_cast<void>(Files().Unlink(replacement));
    ThrowIo("replace", session / kManifestName, error);
  }
  if (Files().SyncFolder(session.string()) != 0) ThrowIo("make durable", session, errno);
}

void RemoveUnnamed(const std::filesystem::path& session, const Manifest& manifest) noexcept {
  try {
    std::set<std::string> named = {kManifestName, "lock"};
    for (const ArchivedFile& file : manifest.files) named.insert(file.name());
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(session, error)) {
      if (named.count(entry.path().filename().string()) != 0) continue;
      static_cast<void>(Files().Unlink(entry.path().string()));
    }
  } catch (const std::exception&) {  // out of memory, or the folder is gone
  }
}

}  // namespace fathom
