// SPDX-License-Identifier: MIT
#include "memory/aligned_buffer.h"

#include <sys/mman.h>

#include <cstring>
#include <string>

#include "fathom/error.h"

namespace fathom {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kHugePage = std::size_t{2} << 20;

}  // namespace

AlignedBuffer::AlignedBuffer(std::size_t bytes) : size_(bytes) {
  if (bytes == 0) return;
  constexpr std::size_t kAddressSpace =
      std::size_t{1} << 47;  // of a process; also keeps the sum below from wrapping
  if (bytes < kAddressSpace) {
    const bool huge = bytes >= kHugePage;
    const std::size_t alignment = huge ? kHugePage : bytes >= 16 * kPage ? kPage : kAlignment;
    const std::size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    void* p = nullptr;
    if (posix_memalign(&p, alignment, rounded) == 0) {
      data_.reset(static_cast<std::byte*>(p));
      // Whole ones only, so that nothing is wasted. A kernel without them refuses; ordinary pages
      // do as well.
      if (huge) static_cast<void>(madvise(p, rounded / kHugePage * kHugePage, MADV_HUGEPAGE));
      std::memset(data_.get(), 0, rounded);
      return;
    }
  }
  throw Error(ErrorCode::kNoMemory, "cannot allocate " + std::to_string(bytes) +
                                        " bytes; use a shorter context or free memory");
}

}  // namespace fathom
