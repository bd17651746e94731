// SPDX-License-Identifier: MIT
// Feeds what a stored session is read from with bytes of any kind: nothing but Error(kCorrupt) and
// Error(kUnsupported) may come of it. The first byte says what the rest is.
//   0: a manifest    1: a manifest whose checksum is put right first    2: the header of a file
//   3: sampled queries    4: an index of the mean codec    5: of the paper codec
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <span>
#include <string>

#include "archive/archive_file.h"
#include "archive/manifest.h"
#include "fathom/error.h"
#include "fathom/stats.h"
#include "fathom/store.h"
#include "memory/aligned_buffer.h"
#include "memory/state_stream.h"

namespace {

using namespace fathom;

// With the checksum that belongs to the rest, so that what lies behind it is reached.
std::string PutRight(const std::string& text) {
  nlohmann::json body = nlohmann::json::parse(text, nullptr, false);
  if (!body.is_object()) return text;
  body.erase("checksum");
  const std::string bare = body.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  char hex[17];
  std::snprintf(hex, sizeof hex, "%016llx",
                static_cast<unsigned long long>(
                    Checksum(std::as_bytes(std::span(bare.data(), bare.size())))));
  body["checksum"] = hex;
  return body.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

void ReadAsManifest(const std::string& text) {
  const Manifest manifest = ParseManifest(text, "manifest.json");
  // What is accepted survives being written and read again.
  const std::string written = ManifestText(manifest);
  if (ManifestText(ParseManifest(written, "manifest.json")) != written) std::abort();
}

void ReadAsFile(std::span<const std::uint8_t> bytes) {
  static const std::string path =
      (std::filesystem::temp_directory_path() / ("fathom-fuzz-" + std::to_string(getpid())))
          .string();
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
  const ArchiveMapping mapping(path, ArchiveKind::kState, static_cast<std::int64_t>(bytes.size()));
  if (mapping.data().size() + kArchivePage != bytes.size()) std::abort();
}

void ReadAsState(int what, std::span<const std::uint8_t> bytes) {
  AlignedBuffer copy(bytes.size() + 1);
  std::memcpy(copy.data(), bytes.data(), bytes.size());
  StateReader in({copy.data(), bytes.size()}, nullptr, "input");
  if (what == 3) {
    QuerySamples samples(2, 16);
    samples.Load(&in);
  } else {
    IndexShape shape;
    shape.codec = what == 4 ? Codec::kMean : Codec::kPaper;
    shape.head_dim = 16;
    shape.segment_blocks = 2;
    IndexRules rules;
    rules.distortions = true;
    HeadIndex index(shape, RawBasis(16, {}), rules);
    index.Load(&in);
    if (index.n_blocks() > 0) static_cast<void>(index.Distortions());
  }
  in.Finish();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::span<const std::uint8_t> rest(data + 1, size - 1);
  const std::string text(reinterpret_cast<const char*>(rest.data()), rest.size());
  try {
    switch (data[0] % 6) {
      case 0:
        ReadAsManifest(text);
        break;
      case 1:
        ReadAsManifest(PutRight(text));
        break;
      case 2:
        ReadAsFile(rest);
        break;
      default:
        ReadAsState(data[0] % 6, rest);
    }
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kCorrupt && error.code() != ErrorCode::kUnsupported) throw;
  }
  return 0;
}
