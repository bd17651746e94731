// SPDX-License-Identifier: MIT
// The part of cuBLASLt that src/model/cuda uses: products of bf16 matrices, the first transposed,
// summed and returned in single precision. What it does not know is refused with the status that
// the library gives, and operands that are no device memory end the process, as a kernel's do.
#include <cublasLt.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cuda_emulation/emulator.h"

struct cublasLtContext {};

namespace fathom::emulation {
namespace {

constexpr std::uint64_t kMade = 0xFA7D0E5C;  // the mark of a descriptor that was initialized
constexpr std::uint64_t kWorkspace = 4096;   // what a product scribbles over

// What the opaque descriptors hold, behind the mark.
struct Product {
  cublasComputeType_t compute;
  cudaDataType scale;
  cublasOperation_t of_a, of_b;
};
struct Layout {  // column by column
  cudaDataType type;
  std::uint64_t rows, columns;
  std::int64_t ld;
};
struct Preference {
  std::uint64_t workspace;
  std::uint32_t alignment[4];  // of a, b, c, d
};
// Good for the size and the alignments that it was asked for.
struct Algorithm {
  std::uint64_t m, n, k, workspace;
  std::uint32_t alignment[4];
};

template <typename Opaque, typename T>
void Put(Opaque* to, const T& from) {
  static_assert(sizeof(kMade) + sizeof(T) <= sizeof(Opaque));
  std::memcpy(to->data, &kMade, sizeof(kMade));
  std::memcpy(to->data + 1, &from, sizeof(T));
}
// False if nobody made it.
template <typename T, typename Opaque>
bool Get(const Opaque* from, T* to) {
  if (from == nullptr || from->data[0] != kMade) return false;
  std::memcpy(to, from->data + 1, sizeof(T));
  return true;
}
template <typename T>
bool GetValue(const void* from, std::size_t bytes, T* to) {
  if (from == nullptr || bytes != sizeof(T)) return false;
  std::memcpy(to, from, sizeof(T));
  return true;
}

struct Problem {
  Product product;
  Layout a, b, c, d;
};

cublasStatus_t GetProblem(cublasLtMatmulDesc_t product, cublasLtMatrixLayout_t a,
                          cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                          cublasLtMatrixLayout_t d, Problem* p) {
  const bool all =
      Get(product, &p->product) && Get(a, &p->a) && Get(b, &p->b) && Get(c, &p->c) && Get(d, &p->d);
  if (!all) return CUBLAS_STATUS_INVALID_VALUE;
  const bool known = p->product.compute == CUBLAS_COMPUTE_32F && p->product.scale == CUDA_R_32F &&
                     p->product.of_a == CUBLAS_OP_T && p->product.of_b == CUBLAS_OP_N &&
                     p->a.type == CUDA_R_16BF && p->b.type == CUDA_R_16BF &&
                     p->c.type == CUDA_R_32F && p->d.type == CUDA_R_32F;
  if (!known) return CUBLAS_STATUS_NOT_SUPPORTED;
  for (const Layout* layout : {&p->a, &p->b, &p->c, &p->d}) {
    const bool fits = layout->rows > 0 && layout->columns > 0 && layout->ld > 0 &&
                      static_cast<std::uint64_t>(layout->ld) >= layout->rows;
    if (!fits) return CUBLAS_STATUS_INVALID_VALUE;
  }
  const bool agree = p->a.rows == p->b.rows && p->a.columns == p->d.rows &&
                     p->b.columns == p->d.columns && p->c.rows == p->d.rows &&
                     p->c.columns == p->d.columns;
  return agree ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

void CheckOperand(const char* name, const void* p, const Layout& layout, std::uint32_t alignment) {
  const std::size_t element = layout.type == CUDA_R_16BF ? 2 : 4;
  const std::size_t elements =
      (layout.columns - 1) * static_cast<std::size_t>(layout.ld) + layout.rows;
  if (!IsDeviceMemory(p, elements * element)) {
    Fail("matrix %s of cublasLtMatmul, %zu bytes at %p, is not the device's", name,
         elements * element, p);
  }
  if (reinterpret_cast<std::uintptr_t>(p) % alignment != 0) {
    Fail("matrix %s of cublasLtMatmul is not aligned to %u bytes", name, alignment);
  }
}

std::vector<float> Singles(const std::uint16_t* from, std::size_t n) {
  std::vector<float> to(n);
  for (std::size_t i = 0; i < n; ++i) to[i] = std::bit_cast<float>(std::uint32_t{from[i]} << 16);
  return to;
}

// Eight sums side by side, which the compiler puts into a vector: the same bits on any processor.
__attribute__((target_clones("avx2", "default"))) float Dot(const float* x, const float* y,
                                                            std::size_t n) {
  float sum[8] = {};
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (std::size_t j = 0; j < 8; ++j) sum[j] += x[i + j] * y[i + j];
  }
  for (; i < n; ++i) sum[0] += x[i] * y[i];
  return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

void Multiply(const Problem& p, float alpha, const std::uint16_t* a, const std::uint16_t* b,
              float beta, const float* c, float* d) {
  const auto at = [](const Layout& layout, std::size_t column) {
    return column * static_cast<std::size_t>(layout.ld);
  };
  std::vector<std::vector<float>> columns;
  for (std::size_t j = 0; j < p.b.columns; ++j) {
    columns.push_back(Singles(b + at(p.b, j), p.b.rows));
  }
  for (std::size_t i = 0; i < p.a.columns; ++i) {
    const std::vector<float> row = Singles(a + at(p.a, i), p.a.rows);
    for (std::size_t j = 0; j < columns.size(); ++j) {
      const float product = alpha * Dot(row.data(), columns[j].data(), row.size());
      d[at(p.d, j) + i] = beta == 0 ? product : product + beta * c[at(p.c, j) + i];
    }
  }
}

}  // namespace
}  // namespace fathom::emulation

using fathom::emulation::Algorithm;
using fathom::emulation::GetValue;
using fathom::emulation::Layout;
using fathom::emulation::Preference;
using fathom::emulation::Problem;
using fathom::emulation::Product;

extern "C" {

const char* cublasLtGetStatusString(cublasStatus_t status) {
  return status == CUBLAS_STATUS_SUCCESS ? "CUBLAS_STATUS_SUCCESS"
                                         : "an error of the emulated cuBLASLt";
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = new cublasLtContext;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t product, std::size_t size,
                                               cublasComputeType_t compute, cudaDataType scale) {
  if (product == nullptr || size < sizeof(*product)) return CUBLAS_STATUS_INVALID_VALUE;
  fathom::emulation::Put(product, Product{compute, scale, CUBLAS_OP_N, CUBLAS_OP_N});
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t product,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, std::size_t bytes) {
  Product made;
  if (!fathom::emulation::Get(product, &made)) return CUBLAS_STATUS_INVALID_VALUE;
  const bool is_a = attribute == CUBLASLT_MATMUL_DESC_TRANSA;
  if (!is_a && attribute != CUBLASLT_MATMUL_DESC_TRANSB) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (!GetValue(value, bytes, is_a ? &made.of_a : &made.of_b)) return CUBLAS_STATUS_INVALID_VALUE;
  fathom::emulation::Put(product, made);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t layout, std::size_t size,
                                                 cudaDataType type, std::uint64_t rows,
                                                 std::uint64_t columns, std::int64_t ld) {
  if (layout == nullptr || size < sizeof(*layout)) return CUBLAS_STATUS_INVALID_VALUE;
  fathom::emulation::Put(layout, Layout{type, rows, columns, ld});
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  *preference = new cublasLtMatmulPreferenceOpaque_t;
  fathom::emulation::Put(*preference, Preference{0, {256, 256, 256, 256}});
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete preference;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, std::size_t bytes) {
  Preference made;
  if (!fathom::emulation::Get(preference, &made)) return CUBLAS_STATUS_INVALID_VALUE;
  bool taken = false;
  switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
      taken = GetValue(value, bytes, &made.workspace);
      break;
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
      taken = GetValue(value, bytes, &made.alignment[0]);
      break;
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
      taken = GetValue(value, bytes, &made.alignment[1]);
      break;
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
      taken = GetValue(value, bytes, &made.alignment[2]);
      break;
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
      taken = GetValue(value, bytes, &made.alignment[3]);
      break;
    default:
      return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  if (!taken) return CUBLAS_STATUS_INVALID_VALUE;
  fathom::emulation::Put(preference, made);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t product,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t* results,
                                              int* n_results) {
  *n_results = 0;
  Problem p;
  const cublasStatus_t status = fathom::emulation::GetProblem(product, a, b, c, d, &p);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  Preference wishes;
  if (handle == nullptr || wanted < 1 || !fathom::emulation::Get(preference, &wishes)) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  Algorithm made{p.d.rows, p.d.columns, p.a.rows, 0, {}};
  made.workspace = std::min(wishes.workspace, fathom::emulation::kWorkspace);
  std::memcpy(made.alignment, wishes.alignment, sizeof(made.alignment));
  results[0] = {};
  results[0].state = CUBLAS_STATUS_SUCCESS;
  results[0].workspaceSize = made.workspace;
  fathom::emulation::Put(&results[0].algo, made);
  *n_results = 1;
  return CUBLAS_STATUS_SUCCESS;
}

// With alpha and beta on the host.
cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t product,
                              const void* alpha, const void* a, cublasLtMatrixLayout_t a_layout,
                              const void* b, cublasLtMatrixLayout_t b_layout, const void* beta,
                              const void* c, cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algo,
                              void* workspace, std::size_t workspace_bytes, cudaStream_t stream) {
  Problem p;
  const cublasStatus_t status =
      fathom::emulation::GetProblem(product, a_layout, b_layout, c_layout, d_layout, &p);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  Algorithm chosen;
  float factor = 0, of_c = 0;
  const bool given = handle != nullptr && a != nullptr && b != nullptr && c != nullptr &&
                     d != nullptr && GetValue(alpha, sizeof(factor), &factor) &&
                     GetValue(beta, sizeof(of_c), &of_c) && fathom::emulation::Get(algo, &chosen);
  if (!given || chosen.m != p.d.rows || chosen.n != p.d.columns || chosen.k != p.a.rows ||
      workspace_bytes < chosen.workspace) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  fathom::emulation::CheckOperand("a", a, p.a, chosen.alignment[0]);
  fathom::emulation::CheckOperand("b", b, p.b, chosen.alignment[1]);
  fathom::emulation::CheckOperand("c", c, p.c, chosen.alignment[2]);
  fathom::emulation::CheckOperand("d", d, p.d, chosen.alignment[3]);
  if (!fathom::emulation::IsDeviceMemory(workspace, workspace_bytes)) {
    fathom::emulation::Fail("the workspace of cublasLtMatmul is not the device's");
  }
  fathom::emulation::Enqueue(stream, [=] {
    std::memset(workspace, 0xEB, chosen.workspace);
    fathom::emulation::Multiply(p, factor, static_cast<const std::uint16_t*>(a),
                                static_cast<const std::uint16_t*>(b), of_c,
                                static_cast<const float*>(c), static_cast<float*>(d));
  });
  return CUBLAS_STATUS_SUCCESS;
}

}  // extern "C"
