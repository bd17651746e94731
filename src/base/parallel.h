// SPDX-License-Identifier: MIT
// A parallel loop that lets exceptions out safely. Users link OpenMP.
#pragma once

#include <cstdint>
#include <exception>

namespace fathom {

// Calls fn(i) for i in [0, n) on up to n_threads threads, in any order. The first exception of a
// body is rethrown here after all bodies have ended; bodies not yet started are skipped then.
template <typename Fn>
void ParallelFor(std::int64_t n, int n_threads, const Fn& fn) {
  std::exception_ptr failure;
  bool failed = false;
#pragma omp parallel for schedule(dynamic) num_threads(n_threads) if (n > 1 && n_threads > 1)
  for (std::int64_t i = 0; i < n; ++i) {
    bool skip = false;
#pragma omp atomic read
    skip = failed;
    if (skip) continue;
    try {
      fn(i);
    } catch (...) {
#pragma omp critical(fathom_parallel_failure)
      if (!failure) failure = std::current_exception();
#pragma omp atomic write
      failed = true;
    }
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace fathom
