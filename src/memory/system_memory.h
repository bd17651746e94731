// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <string>

namespace fathom {

// Bytes that can be taken without swapping: MemAvailable of the system, or what is left below the
// limit of a control group where that is less (files that the kernel can drop count as free, as
// they do in MemAvailable). 0 when unknown.
std::int64_t AvailableMemoryBytes();

// Bytes of memory of the machine, or the control group's limit where that is less. 0 when unknown.
std::int64_t TotalMemoryBytes();

namespace internal {

// The same from the files under `root`, a prefix of /proc and /sys; "" is this machine.
std::int64_t AvailableMemoryBytes(const std::string& root);
std::int64_t TotalMemoryBytes(const std::string& root);

}  // namespace internal
}  // namespace fathom
