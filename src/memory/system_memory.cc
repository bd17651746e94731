// SPDX-License-Identifier: MIT
#include "memory/system_memory.h"

#include <algorithm>
#include <optional>
#include <sstream>
#include <string_view>

#include "base/cgroup.h"

namespace fathom {
namespace {

// Value of a "name value [unit]" line of /proc/meminfo or memory.stat; 0 when there is none.
std::int64_t Field(const std::string& text, std::string_view name) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string key;
    std::int64_t value = 0;
    if (words >> key >> value && key == name) return value;
  }
  return 0;
}

std::int64_t MemInfoBytes(const std::string& root, std::string_view name) {
  return Field(ReadSmallFile(root + "/proc/meminfo").value_or(""), name) * 1024;
}

std::optional<std::int64_t> Limit(const CgroupDir& dir) {
  return ReadNumber(dir.path + (dir.v2 ? "/memory.max" : "/memory.limit_in_bytes"));
}

// Bytes of the group that the kernel cannot simply drop.
std::int64_t UsedBytes(const CgroupDir& dir) {
  const std::int64_t usage =
      ReadNumber(dir.path + (dir.v2 ? "/memory.current" : "/memory.usage_in_bytes")).value_or(0);
  const std::string stat = ReadSmallFile(dir.path + "/memory.stat").value_or("");
  const std::int64_t droppable = Field(stat, dir.v2 ? "inactive_file" : "total_inactive_file");
  return std::max<std::int64_t>(usage - droppable, 0);
}

}  // namespace

std::int64_t internal::AvailableMemoryBytes(const std::string& root) {
  std::int64_t available = MemInfoBytes(root, "MemAvailable:");
  for (const CgroupDir& dir : CgroupDirs(root, "memory")) {
    const std::optional<std::int64_t> limit = Limit(dir);
    if (!limit) continue;
    available = std::min(available, std::max<std::int64_t>(*limit - UsedBytes(dir), 0));
  }
  return available;
}

std::int64_t internal::TotalMemoryBytes(const std::string& root) {
  std::int64_t total = MemInfoBytes(root, "MemTotal:");
  for (const CgroupDir& dir : CgroupDirs(root, "memory")) {
    total = std::min(total, Limit(dir).value_or(total));
  }
  return total;
}

std::int64_t AvailableMemoryBytes() { return internal::AvailableMemoryBytes(""); }

std::int64_t TotalMemoryBytes() { return internal::TotalMemoryBytes(""); }

}  // namespace fathom
