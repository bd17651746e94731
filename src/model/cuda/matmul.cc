// SPDX-License-Identifier: MIT
#include "model/cuda/matmul.h"

#include <string>

#include "fathom/error.h"

namespace fathom::cuda {
namespace {

void CheckBlas(cublasStatus_t status, const char* call, const MatmulSize& size = {}) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  ErrorCode code = ErrorCode::kInternal;
  if (status == CUBLAS_STATUS_ALLOC_FAILED) code = ErrorCode::kNoMemory;
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_ARCH_MISMATCH) {
    code = ErrorCode::kUnsupported;
  }
  std::string text = std::string("CUDA: ") + call + " failed: " + cublasLtGetStatusString(status);
  if (size.n > 0) {
    text += " for " + std::to_string(size.n) + " rows of " + std::to_string(size.in) + " to " +
            std::to_string(size.out);
  }
  throw Error(code, text);
}

// The preferences of one search.
class Preference {
 public:
  Preference() {
    CheckBlas(cublasLtMatmulPreferenceCreate(&preference_), "cublasLtMatmulPreferenceCreate");
  }
  ~Preference() { cublasLtMatmulPreferenceDestroy(preference_); }
  Preference(const Preference&) = delete;
  Preference& operator=(const Preference&) = delete;

  template <typename T>
  void Set(cublasLtMatmulPreferenceAttributes_t attribute, T value) {
    CheckBlas(cublasLtMatmulPreferenceSetAttribute(preference_, attribute, &value, sizeof(value)),
              "cublasLtMatmulPreferenceSetAttribute");
  }
  cublasLtMatmulPreference_t get() const { return preference_; }

 private:
  cublasLtMatmulPreference_t preference_ = nullptr;
};

}  // namespace

Matmul::Matmul() : workspace_(kWorkspaceBytes) {
  CheckBlas(cublasLtCreate(&handle_), "cublasLtCreate");
}

Matmul::~Matmul() { cublasLtDestroy(handle_); }

// cuBLASLt counts columns first: to it w is [in x out], taken transposed, x is [in x n] and y is
// [out x n].
Matmul::Plan Matmul::MakePlan(const MatmulSize& size) const {
  Plan plan;
  CheckBlas(cublasLtMatmulDescInit(&plan.product, CUBLAS_COMPUTE_32F, CUDA_R_32F),
            "cublasLtMatmulDescInit");
  const cublasOperation_t transposed = CUBLAS_OP_T;
  CheckBlas(cublasLtMatmulDescSetAttribute(&plan.product, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                           sizeof(transposed)),
            "cublasLtMatmulDescSetAttribute");
  const auto layout = [&](cublasLtMatrixLayoutOpaque_t& to, cudaDataType type, std::int32_t rows,
                          std::int32_t columns) {
    CheckBlas(cublasLtMatrixLayoutInit(&to, type, static_cast<std::uint64_t>(rows),
                                       static_cast<std::uint64_t>(columns), rows),
              "cublasLtMatrixLayoutInit");
  };
  layout(plan.w, CUDA_R_16BF, size.in, size.out);
  layout(plan.x, CUDA_R_16BF, size.in, size.n);
  layout(plan.y, CUDA_R_32F, size.out, size.n);
  Preference preference;
  preference.Set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::uint64_t{kWorkspaceBytes});
  preference.Set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, std::uint32_t{16});
  preference.Set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, std::uint32_t{16});
  cublasLtMatmulHeuristicResult_t found{};
  int n_found = 0;
  CheckBlas(cublasLtMatmulAlgoGetHeuristic(handle_, &plan.product, &plan.w, &plan.x, &plan.y,
                                           &plan.y, preference.get(), 1, &found, &n_found),
            "cublasLtMatmulAlgoGetHeuristic", size);
  if (n_found == 0) CheckBlas(CUBLAS_STATUS_NOT_SUPPORTED, "cublasLtMatmulAlgoGetHeuristic", size);
  CheckBlas(found.state, "cublasLtMatmulAlgoGetHeuristic", size);
  plan.algorithm = found.algo;
  return plan;
}

Matmul::Plan& Matmul::PlanFor(const MatmulSize& size) {
  const auto at = plans_.find(size);
  return at != plans_.end() ? at->second : plans_.emplace(size, MakePlan(size)).first->second;
}

void Matmul::Prepare(const MatmulSize& size) {
  if (size.n > kGemvRows) PlanFor(size);
}

void Matmul::Run(const MatmulSize& size, const Bf16* w, const Bf16* x, float* y,
                 cudaStream_t stream) {
  if (size.n <= kGemvRows) return LaunchGemv({w, x, y, size.n, size.out, size.in}, stream);
  Plan& plan = PlanFor(size);
  const float one = 1;
  const float zero = 0;
  CheckBlas(
      cublasLtMatmul(handle_, &plan.product, &one, w, &plan.w, x, &plan.x, &zero, y, &plan.y, y,
                     &plan.y, &plan.algorithm, workspace_.data(), workspace_.size(), stream),
      "cublasLtMatmul", size);
}

}  // namespace fathom::cuda
