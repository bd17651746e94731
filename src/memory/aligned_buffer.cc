// SPDX-License-Identifier: MIT
#include "memory/aligned_buffer.h"

#include <cstring>
#include <string>

#include "fathom/error.h"

namespace fathom {

AlignedBuffer::AlignedBuffer(std::size_t bytes) : size_(bytes) {
  if (bytes == 0) return;
  constexpr std::size_t kAddressSpace =
      std::size_t{1} << 47;  // of a process; also keeps the sum below from wrapping
  if (bytes < kAddressSpace) {
    const std::size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    data_.reset(static_cast<std::byte*>(std::aligned_alloc(kAlignment, rounded)));
    if (data_ != nullptr) {
      std::memset(data_.get(), 0, rounded);
      return;
    }
  }
  throw Error(ErrorCode::kNoMemory, "cannot allocate " + std::to_string(bytes) +
                                        " bytes; use a shorter context or free memory");
}

}  // namespace fathom
