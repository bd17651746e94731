// SPDX-License-Identifier: MIT
// Files of the control groups this process is in (Linux, versions 1 and 2).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fathom {

struct CgroupDir {
  std::string path;
  bool v2 = false;
};

// Folders of the group this process is in and of all its ancestors, whose limits hold too, for the
// controller "cpu" or "memory". Some may not exist: inside a container the group's path is often
// the host's, while the container sees its own group at the mount point. root: prefix of /proc and
// /sys, "" for this machine.
std::vector<CgroupDir> CgroupDirs(const std::string& root, std::string_view controller);

// The whole file; nothing when it cannot be read.
std::optional<std::string> ReadSmallFile(const std::string& path);

// A file that holds one number first; nothing when it cannot be read or holds no number ("max").
std::optional<std::int64_t> ReadNumber(const std::string& path);

}  // namespace fathom
