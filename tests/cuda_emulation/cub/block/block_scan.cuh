// SPDX-License-Identifier: MIT
// What src/backend/cuda uses of cub::BlockScan, for blocks of exactly kThreads threads.
#pragma once

#include <cstddef>

#include "cuda_emulation/emulator.h"

namespace cub {

template <typename T, int kThreads>
class BlockScan {
 public:
  struct TempStorage {
    T value[kThreads];
  };
  explicit BlockScan(TempStorage& storage) : storage_(storage) {}

  void ExclusiveSum(T in, T& out, T& total) {
    storage_.value[threadIdx.x] = in;
    __syncthreads();
    T before{}, all{};
    for (unsigned i = 0; i < kThreads; ++i) {
      if (i < threadIdx.x) before += storage_.value[i];
      all += storage_.value[i];
    }
    __syncthreads();
    // The storage may be used for something else only after a barrier of the caller: until then,
    // cub's own may still hold or read anything.
    storage_.value[threadIdx.x] = static_cast<T>(-12345);
    out = before;
    total = all;
  }

  template <int kItems>
  void ExclusiveSum(T (&in)[kItems], T (&out)[kItems], T& total) {
    T own{}, at{};
    for (const T item : in) own += item;
    ExclusiveSum(own, at, total);
    for (int i = 0; i < kItems; ++i) {
      const T item = in[i];  // `in` and `out` may be the same
      out[i] = at;
      at += item;
    }
  }

 private:
  TempStorage& storage_;
};

}  // namespace cub
