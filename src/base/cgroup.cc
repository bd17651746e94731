// SPDX-License-Identifier: MIT
#include "base/cgroup.h"

#include <charconv>
#include <fstream>
#include <sstream>

namespace fathom {
namespace {

// Whether a comma-separated list such as "cpu,cpuacct" has the word.
bool ListHas(std::string_view list, std::string_view word) {
  while (!list.empty()) {
    const std::size_t comma = list.find(',');
    if (list.substr(0, comma) == word) return true;
    if (comma == std::string_view::npos) return false;
    list.remove_prefix(comma + 1);
  }
  return false;
}

// mount + path, and every ancestor down to the mount point itself.
void AddWithAncestors(const std::string& mount, std::string path, bool v2,
                      std::vector<CgroupDir>* dirs) {
  while (!path.empty() && path != "/") {
    dirs->push_back({mount + path, v2});
    const std::size_t slash = path.rfind('/');
    if (slash == std::string::npos) break;
    path.resize(slash);
  }
  dirs->push_back({mount, v2});
}

}  // namespace

std::optional<std::string> ReadSmallFile(const std::string& path) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  std::ostringstream text;
  text << file.rdbuf();
  if (file.bad()) return std::nullopt;
  return text.str();
}

std::optional<std::int64_t> ReadNumber(const std::string& path) {
  const std::optional<std::string> text = ReadSmallFile(path);
  if (!text) return std::nullopt;
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
  if (error != std::errc() || end == text->data()) return std::nullopt;
  return value;
}

std::vector<CgroupDir> CgroupDirs(const std::string& root, std::string_view controller) {
  std::vector<CgroupDir> dirs;
  const std::string mount = root + "/sys/fs/cgroup";
  std::istringstream lines(ReadSmallFile(root + "/proc/self/cgroup").value_or(""));
  for (std::string line; std::getline(lines, line);) {
    // Each line is id:controllers:path; version 2 has id 0 and no controllers.
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (controllers.empty()) {
      AddWithAncestors(mount, path, true, &dirs);
      AddWithAncestors(mount + "/unified", path, true, &dirs);
    } else if (ListHas(controllers, controller)) {
      AddWithAncestors(mount + "/" + controllers, path, false, &dirs);
      if (controllers != controller) {
        AddWithAncestors(mount + "/" + std::string(controller), path, false, &dirs);
      }
    }
  }
  return dirs;
}

}  // namespace fathom
