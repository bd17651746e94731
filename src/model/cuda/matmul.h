// SPDX-License-Identifier: MIT
// Products with weight matrices: bf16 times bf16, accumulated and returned in fp32. By cuBLASLt,
// but for the few rows of a decode step by a kernel of ours, which does nothing but read the
// weights.
#pragma once

#include <cublasLt.h>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>

#include "backend/cuda/buffer.h"
#include "model/cuda/dense_kernels.h"

namespace fathom::cuda {

// y = x w^T for row-major x [n][in], w [out][in], y [n][out].
struct MatmulSize {
  std::int32_t out = 0;
  std::int32_t n = 0;
  std::int32_t in = 0;  // a multiple of 8
  auto operator<=>(const MatmulSize&) const = default;
};

// One workspace: all products must be on one stream, or on streams that wait for each other. Not
// thread-safe.
class Matmul {
 public:
  // Throws Error as Check does.
  Matmul();
  ~Matmul();
  Matmul(const Matmul&) = delete;
  Matmul& operator=(const Matmul&) = delete;

  // Chooses the algorithm for a size, once, by cuBLASLt's heuristics. Throws Error(kUnsupported)
  // when it has none.
  void Prepare(const MatmulSize& size);
  // w and x aligned to 256 bytes, y to 16. Calls Prepare. Allocates nothing on the device and waits
  // for nothing. cuBLASLt may load a kernel when a size runs for the first time: run a step once
  // before it is captured.
  void Run(const MatmulSize& size, const Bf16* w, const Bf16* x, float* y, cudaStream_t stream);

  static constexpr std::size_t kWorkspaceBytes = std::size_t{32} << 20;
  static constexpr std::int32_t kGemvRows = kMostGemvRows;  // up to here cuBLASLt is not asked

 private:
  struct Plan {
    cublasLtMatmulDescOpaque_t product{};
    cublasLtMatrixLayoutOpaque_t w{};
    cublasLtMatrixLayoutOpaque_t x{};
    cublasLtMatrixLayoutOpaque_t y{};
    cublasLtMatmulAlgo_t algorithm{};
  };
  Plan& PlanFor(const MatmulSize& size);
  Plan MakePlan(const MatmulSize& size) const;

  cublasLtHandle_t handle_ = nullptr;
  DeviceBuffer<std::byte> workspace_;
  std::map<MatmulSize, Plan> plans_;
};

}  // namespace fathom::cuda
