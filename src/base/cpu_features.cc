// SPDX-License-Identifier: MIT
#include "base/cpu_features.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <thread>

#include "base/cgroup.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fathom {
namespace {

#if defined(__x86_64__)
// Register state the operating system saves (XCR0), 0 when it does not say.
std::uint64_t SavedState() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & (1u << 27)) == 0) return 0;  // OSXSAVE
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<std::uint64_t>(high) << 32) | low;
}

void DetectAmx(CpuFeatures* f) {
  constexpr std::uint64_t kTileState = (1u << 17) | (1u << 18);  // XTILECFG, XTILEDATA
  if ((SavedState() & kTileState) != kTileState) return;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return;
  f->amx_tile = (d & (1u << 24)) != 0;
  f->amx_bf16 = f->amx_tile && (d & (1u << 22)) != 0;
  f->amx_int8 = f->amx_tile && (d & (1u << 25)) != 0;
}

// Asked directly: compilers differ in whether their built-in knows the name. The registers are
// AVX's.
bool HasF16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __builtin_cpu_supports("avx") != 0 && __get_cpuid(1, &a, &b, &c, &d) != 0 &&
         (c & (1u << 29)) != 0;
}

std::string BrandString() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(0x80000000u, &a, &b, &c, &d) == 0 || a < 0x80000004u) return {};
  char text[49] = {};
  for (unsigned leaf = 0; leaf < 3; ++leaf) {
    unsigned r[4] = {};
    __get_cpuid(0x80000002u + leaf, &r[0], &r[1], &r[2], &r[3]);
    std::memcpy(text + leaf * 16, r, 16);
  }
  std::string brand(text);
  brand.erase(0, std::min(brand.find_first_not_of(' '), brand.size()));
  brand.erase(brand.find_last_not_of(' ') + 1);
  return brand;
}

CpuFeatures Detect() {
  CpuFeatures f;
  __builtin_cpu_init();  // its flags already include the operating system's support
  f.avx2 = __builtin_cpu_supports("avx2") != 0;
  f.fma = __builtin_cpu_supports("fma") != 0;
  f.f16c = HasF16c();
  f.avx512f = __builtin_cpu_supports("avx512f") != 0;
  f.avx512bw = __builtin_cpu_supports("avx512bw") != 0;
  f.avx512dq = __builtin_cpu_supports("avx512dq") != 0;
  f.avx512vl = __builtin_cpu_supports("avx512vl") != 0;
  f.avx512vbmi = __builtin_cpu_supports("avx512vbmi") != 0;
  f.avx512vbmi2 = __builtin_cpu_supports("avx512vbmi2") != 0;
  f.avx512vnni = __builtin_cpu_supports("avx512vnni") != 0;
  f.avx512bf16 = __builtin_cpu_supports("avx512bf16") != 0;
  f.gfni = __builtin_cpu_supports("gfni") != 0;
  DetectAmx(&f);
  f.brand = BrandString();
  return f;
}
#else
CpuFeatures Detect() { return {}; }
#endif

bool RequestAmxTiles() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // its bit in XCR0
  return GetCpuFeatures().amx_tile && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

int AffinityProcessors() {
  for (int capacity = CPU_SETSIZE; capacity <= (1 << 20); capacity *= 4) {
    cpu_set_t* set = CPU_ALLOC(capacity);
    if (set == nullptr) break;
    const std::size_t bytes = CPU_ALLOC_SIZE(capacity);
    const int rc = sched_getaffinity(0, bytes, set);
    const int reason = errno;
    const int count = rc == 0 ? CPU_COUNT_S(bytes, set) : 0;
    CPU_FREE(set);
    if (rc == 0) return count;
    if (reason != EINVAL) break;  // EINVAL: the kernel's mask is larger than ours
  }
  return static_cast<int>(std::thread::hardware_concurrency());
}

// Quota / period of one group's folder; 0 when it has no limit.
double DirQuota(const CgroupDir& dir) {
  std::int64_t quota = 0, period = 0;
  if (dir.v2) {
    const std::string text = ReadSmallFile(dir.path + "/cpu.max").value_or("");  // "max 100000"
    const char* const end = text.data() + text.size();
    const auto first = std::from_chars(text.data(), end, quota);
    if (first.ec != std::errc() || first.ptr == end) return 0;
    if (std::from_chars(first.ptr + 1, end, period).ec != std::errc()) return 0;
  } else {
    quota = ReadNumber(dir.path + "/cpu.cfs_quota_us").value_or(0);  // -1: no limit
    period = ReadNumber(dir.path + "/cpu.cfs_period_us").value_or(0);
  }
  return quota > 0 && period > 0 ? static_cast<double>(quota) / static_cast<double>(period) : 0;
}

}  // namespace

const CpuFeatures& GetCpuFeatures() {
  static const CpuFeatures kFeatures = Detect();
  return kFeatures;
}

bool AllowAmxTiles() {
  static const bool kAllowed = RequestAmxTiles();
  return kAllowed;
}

double internal::CgroupCpuQuota(const std::string& root) {
  double least = 0;
  for (const CgroupDir& dir : CgroupDirs(root, "cpu")) {
    const double quota = DirQuota(dir);
    if (quota > 0) least = least > 0 ? std::min(least, quota) : quota;
  }
  return least;
}

int UsableProcessors() {
  int count = AffinityProcessors();
  const double quota = internal::CgroupCpuQuota("");
  if (quota > 0 && quota < count) count = static_cast<int>(std::ceil(quota));
  return std::max(count, 1);
}

}  // namespace fathom
