// SPDX-License-Identifier: MIT
#include "model/fingerprint.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <vector>

namespace fathom {
namespace {

constexpr std::size_t kPiece = 4096;
constexpr std::size_t kPieces = 64;  // of a large tensor; other weights differ everywhere

// Names, authors and links say nothing about what a model computes.
bool Matters(const std::string& key) {
  return !key.starts_with("general.") || key == "general.architecture";
}

void FeedTensor(const GgufTensor& tensor, XXH3_state_t* hash) {
  XXH3_128bits_update(hash, tensor.name.c_str(), tensor.name.size() + 1);
  const auto type = static_cast<std::int32_t>(tensor.type);
  XXH3_128bits_update(hash, &type, sizeof type);
  XXH3_128bits_update(hash, tensor.shape.data(), sizeof tensor.shape);
  if (tensor.bytes <= kPiece * kPieces) {
    XXH3_128bits_update(hash, tensor.data, tensor.bytes);
    return;
  }
  for (std::size_t i = 0; i < kPieces; ++i) {
    const std::size_t at = (tensor.bytes - kPiece) / (kPieces - 1) * i;
    XXH3_128bits_update(hash, tensor.data + at, kPiece);
  }
}

}  // namespace

std::string FileFingerprint(const GgufFile& file) {
  XXH3_state_t hash;
  XXH3_128bits_reset(&hash);
  std::vector<std::string> keys = file.Keys();
  std::ranges::sort(keys);
  for (const std::string& key : keys) {
    if (!Matters(key)) continue;
    XXH3_128bits_update(&hash, key.c_str(), key.size() + 1);
    file.FeedValue(key, [&hash](const void* data, std::size_t size) {
      XXH3_128bits_update(&hash, data, size);
    });
  }
  for (const GgufTensor& tensor : file.tensors()) FeedTensor(tensor, &hash);
  const XXH128_hash_t digest = XXH3_128bits_digest(&hash);
  std::array<char, 33> text{};
  std::snprintf(text.data(), text.size(), "%016llx%016llx",
                static_cast<unsigned long long>(digest.high64),
                static_cast<unsigned long long>(digest.low64));
  return text.data();
}

}  // namespace fathom
