// SPDX-License-Identifier: MIT
#include "bench_machine.h"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <set>
#include <string>
#include <utility>

#include "common.h"
#include "fathom/error.h"
#include "fathom/machine.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fathom::cli {
namespace {

constexpr std::int64_t kDefaultCache = std::int64_t{32} << 20;
constexpr std::int64_t kLeastBuffer = std::int64_t{256} << 20;
constexpr int kCacheFactor = 4;
constexpr int kReadPasses = 5;
constexpr int kFmaPasses = 5;

// --- caches ---

std::string FirstLine(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// "32768K" or "32M"; 0 for anything else.
std::int64_t SizeOf(const std::string& text) {
  std::int64_t value = 0;
  std::size_t i = 0;
  for (; i < text.size() && text[i] >= '0' && text[i] <= '9' && value < (1 << 30); ++i) {
    value = value * 10 + (text[i] - '0');
  }
  if (i + 1 != text.size()) return 0;
  if (text[i] == 'K') return value << 10;
  return text[i] == 'M' ? value << 20 : 0;
}

struct Cache {
  int level = 0;
  std::int64_t bytes = 0;
  std::string processors;  // that share it
};

Cache LastLevelOf(int processor) {
  Cache last;
  const std::string base =
      "/sys/devices/system/cpu/cpu" + std::to_string(processor) + "/cache/index";
  for (int i = 0; i < 16; ++i) {
    const std::string index = base + std::to_string(i) + "/";
    const std::string level = FirstLine(index + "level");
    if (level.size() != 1 || level[0] < '0' || level[0] > '9') break;
    if (FirstLine(index + "type") == "Instruction" || level[0] - '0' < last.level) continue;
    last = {level[0] - '0', SizeOf(FirstLine(index + "size")),
            FirstLine(index + "shared_cpu_list")};
  }
  return last;
}

// --- reading ---

// Loads of 16 bytes, which every target has, reach the memory's speed as well as wider ones.
using Words = std::uint64_t __attribute__((vector_size(16)));
constexpr std::size_t kLineWords = 4;  // of a cache line

// Sums n Words in Streams interleaved parts, prefetching Ahead lines ahead in each. Four lines
// are read per step, into eight sums.
template <std::size_t Streams, std::size_t Ahead>
std::uint64_t SumWords(const Words* data, std::size_t n) {
  constexpr std::size_t kStep = 4 / Streams * kLineWords;  // of a stream
  const std::size_t part = n / Streams;
  Words sums[8] = {};
  for (std::size_t i = 0; i + kStep <= part; i += kStep) {
    for (std::size_t s = 0; s < Streams; ++s) {
      const Words* at = data + s * part + i;
      for (std::size_t u = 0; u < kStep; ++u) {
        if (Ahead > 0 && u % kLineWords == 0) __builtin_prefetch(at + u + Ahead * kLineWords);
        sums[(s * kStep + u) % 8] += at[u];
      }
    }
  }
  std::uint64_t total = 0;
  for (const Words& sum : sums) total += sum[0] + sum[1];
  return total;
}

using SumFn = std::uint64_t (*)(const Words*, std::size_t);
constexpr SumFn kReaders[] = {SumWords<1, 0>, SumWords<1, 32>, SumWords<4, 0>};

double ReadSpeed(const PageBuffer& buffer, int threads) {
  const auto* words = reinterpret_cast<const Words*>(buffer.data());
  const std::size_t part = buffer.size() / sizeof(Words) / static_cast<std::size_t>(threads);
  double best = 0;
  std::uint64_t sum = 0;
  for (int pass = 0; pass < kReadPasses; ++pass) {
    for (const SumFn reader : kReaders) {
      const double start = Now();
#pragma omp parallel for schedule(static, 1) num_threads(threads) reduction(+ : sum)
      for (int t = 0; t < threads; ++t)
        sum += reader(words + static_cast<std::size_t>(t) * part, part);
      const double seconds = Now() - start;
      const double bytes = static_cast<double>(part) * threads * sizeof(Words);
      best = std::max(best, bytes / seconds / 1e9);
    }
  }
  volatile std::uint64_t keep = sum;
  static_cast<void>(keep);
  return best;
}

// --- arithmetic ---

constexpr std::int64_t kFmaRounds = 2'000'000;

// Returns operations; *sink keeps the compiler from leaving them out.
using FmaFn = double (*)(float* sink);

double FmaPlain(float* sink) {
  constexpr int kLanes = 32;
  float x[kLanes] = {};
  constexpr std::int64_t kRounds = kFmaRounds / 4;
  for (std::int64_t i = 0; i < kRounds; ++i) {
    for (float& v : x) v = v * 0.5F + 1.0F;
  }
  for (const float v : x) *sink += v;
  return 2.0 * kLanes * static_cast<double>(kRounds);
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) double FmaAvx2(float* sink) {
  constexpr int kRegisters = 12;
  const __m256 half = _mm256_set1_ps(0.5F);
  const __m256 one = _mm256_set1_ps(1.0F);
  __m256 x[kRegisters];
  for (__m256& v : x) v = one;
  for (std::int64_t i = 0; i < kFmaRounds; ++i) {
    for (__m256& v : x) v = _mm256_fmadd_ps(v, half, one);
  }
  for (const __m256& v : x) *sink += _mm256_cvtss_f32(v);
  return 2.0 * 8 * kRegisters * static_cast<double>(kFmaRounds);
}

__attribute__((target("avx512f"))) double FmaAvx512(float* sink) {
  constexpr int kRegisters = 24;
  const __m512 half = _mm512_set1_ps(0.5F);
  const __m512 one = _mm512_set1_ps(1.0F);
  __m512 x[kRegisters];
  for (__m512& v : x) v = one;
  for (std::int64_t i = 0; i < kFmaRounds; ++i) {
    for (__m512& v : x) v = _mm512_fmadd_ps(v, half, one);
  }
  for (const __m512& v : x) *sink += _mm512_cvtss_f32(v);
  return 2.0 * 16 * kRegisters * static_cast<double>(kFmaRounds);
}
#endif

FmaFn WidestFma() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return FmaAvx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return FmaAvx2;
#endif
  return FmaPlain;
}

double FmaSpeed(int threads) {
  const FmaFn fma = WidestFma();
  double best = 0;
  float sum = 0;
  for (int pass = 0; pass < kFmaPasses; ++pass) {
    double operations = 0;
    const double start = Now();
#pragma omp parallel for schedule(static, 1) num_threads(threads) reduction(+ : operations, sum)
    for (int t = 0; t < threads; ++t) {
      float mine = 0;
      operations += fma(&mine);
      sum += mine;
    }
    best = std::max(best, operations / (Now() - start) / 1e9);
  }
  volatile float keep = sum;
  static_cast<void>(keep);
  return best;
}

}  // namespace

std::int64_t CacheBytes() {
  cpu_set_t usable;
  CPU_ZERO(&usable);
  if (sched_getaffinity(0, sizeof(usable), &usable) != 0) return kDefaultCache;
  std::set<std::string> seen;
  std::int64_t bytes = 0;
  for (int processor = 0; processor < CPU_SETSIZE; ++processor) {
    if (!CPU_ISSET(processor, &usable)) continue;
    const Cache cache = LastLevelOf(processor);
    if (cache.bytes > 0 && seen.insert(cache.processors).second) bytes += cache.bytes;
  }
  return bytes > 0 ? bytes : kDefaultCache;
}

PageBuffer::PageBuffer(std::size_t bytes) : size_(bytes) {
  void* const p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) {
    throw Error(ErrorCode::kNoMemory, "cannot take " + std::to_string(bytes) +
                                          " bytes of memory; choose fewer --tokens or --layers");
  }
  data_ = static_cast<std::byte*>(p);
  static_cast<void>(madvise(p, bytes, MADV_HUGEPAGE));  // ordinary pages do as well
}

PageBuffer::~PageBuffer() {
  if (data_ != nullptr) munmap(data_, size_);
}

PageBuffer::PageBuffer(PageBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

std::vector<MachineSpeed> MeasureMachine(const std::vector<int>& threads) {
  const std::int64_t wanted = std::max(kLeastBuffer, kCacheFactor * CacheBytes());
  const std::int64_t room = DescribeMachine().available_bytes / 4;
  const PageBuffer buffer(static_cast<std::size_t>(room > 0 ? std::min(wanted, room) : wanted));
  std::memset(buffer.data(), 1, buffer.size());
  std::vector<MachineSpeed> speeds;
  speeds.reserve(threads.size());
  for (const int n : threads) speeds.push_back({n, ReadSpeed(buffer, n), FmaSpeed(n)});
  return speeds;
}

}  // namespace fathom::cli
