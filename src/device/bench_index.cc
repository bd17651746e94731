// SPDX-License-Identifier: MIT
#include "device/bench_index.h"

#include "device/bench_packer.h"

namespace fathom::cuda {

Packer::Packer(const BenchParts& parts)
    : keys_(parts.keys), n_tokens_(parts.place.n_tokens), stream_(parts.stream) {
  const std::int64_t heads = parts.place.sizes.n_heads();
  const std::int64_t head = kChunkBlocks * kBlockTokens * 2 * parts.place.sizes.heads.head_dim;
  rows_.Reserve(Size(heads * head));
  pointers_ = Pointers(rows_.data(), heads, head);
}

void Packer::Pack(std::int32_t layer, PackBlocks base) {
  base.rows = pointers_.data();
  ForChunks(layer, [&](std::int64_t first, std::int64_t n) {
    base.first_block = static_cast<std::int32_t>(first);
    base.n_blocks = static_cast<std::int32_t>(n);
    cuda::Pack(base, stream_);
  });
}

std::unique_ptr<BenchIndex> MakeBenchIndex(const BenchMethod& method, const BenchPlace& place,
                                           BenchKeys* keys, const Lengths* lengths,
                                           HostArena* arena, cudaStream_t stream,
                                           const BenchProgress& progress) {
  const BenchParts parts{place, keys, lengths, arena, stream, progress};
  switch (method.kind) {
    case BenchMethod::Kind::kDense:
      return nullptr;
    case BenchMethod::Kind::kMean:
      return MakeMeanBench(method, parts);
    case BenchMethod::Kind::kPaper:
      return MakePaperBench(method, parts);
    case BenchMethod::Kind::kLabels:
      return MakeLabelBench(method, parts);
    case BenchMethod::Kind::kKeys:
      return MakeKeyBench(method, parts);
  }
  return nullptr;
}

}  // namespace fathom::cuda
