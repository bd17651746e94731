// SPDX-License-Identifier: MIT
#include "backend/cpu/cpu_backend.h"

#include <initializer_list>
#include <utility>

#include "base/cpu_features.h"

namespace fathom {
namespace {

#ifdef FATHOM_CPU_X86
std::string Missing(std::initializer_list<std::pair<bool, const char*>> needs) {
  std::string list;
  for (const auto& [present, feature] : needs) {
    if (!present) list += std::string(list.empty() ? "the processor lacks " : ", ") + feature;
  }
  return list;
}
#endif

}  // namespace

CpuBackend::CpuBackend(const cpu::KernelTable* kernels, int n_threads)
    : kernels_(kernels),
      name_(std::string("cpu/") + kernels->isa),
      n_threads_(n_threads),
      spins_(n_threads <= UsableProcessors()) {}

#ifdef FATHOM_CPU_X86

std::string ProbeCpuAvx2() {
  const CpuFeatures& f = GetCpuFeatures();
  return Missing({{f.avx2, "avx2"}, {f.fma, "fma"}, {f.f16c, "f16c"}});
}

std::string ProbeCpuAvx512() {
  const CpuFeatures& f = GetCpuFeatures();
  return Missing({{f.avx2, "avx2"},
                  {f.fma, "fma"},
                  {f.f16c, "f16c"},
                  {f.avx512f, "avx512f"},
                  {f.avx512bw, "avx512bw"},
                  {f.avx512dq, "avx512dq"},
                  {f.avx512vl, "avx512vl"}});
}

std::string ProbeCpuAvx512Vbmi() {
  std::string base = ProbeCpuAvx512();
  if (!base.empty()) return base;
  const CpuFeatures& f = GetCpuFeatures();
  return Missing({{f.avx512vbmi, "avx512vbmi"},
                  {f.avx512vbmi2, "avx512vbmi2"},
                  {f.avx512vnni, "avx512vnni"},
                  {f.gfni, "gfni"}});
}

std::string ProbeCpuAmx() {
  std::string avx512 = ProbeCpuAvx512Vbmi();
  if (!avx512.empty()) return avx512;
  const CpuFeatures& f = GetCpuFeatures();
  std::string missing =
      Missing({{f.avx512bf16, "avx512bf16"}, {f.amx_tile, "amx_tile"}, {f.amx_bf16, "amx_bf16"}});
  if (!missing.empty()) return missing;
  return AllowAmxTiles() ? "" : "the operating system does not allow the tile registers of AMX";
}

std::unique_ptr<Backend> MakeCpuAvx2(int n_threads) {
  return std::make_unique<CpuBackend>(cpu::Avx2Kernels(), n_threads);
}

std::unique_ptr<Backend> MakeCpuAvx512(int n_threads) {
  return std::make_unique<CpuBackend>(cpu::Avx512Kernels(), n_threads);
}

std::unique_ptr<Backend> MakeCpuAvx512Vbmi(int n_threads) {
  return std::make_unique<CpuBackend>(cpu::Avx512VbmiKernels(), n_threads);
}

std::unique_ptr<Backend> MakeCpuAvx2Masked(int n_threads) {
  return std::make_unique<CpuBackend>(cpu::Avx2MaskedKernels(), n_threads);
}

std::unique_ptr<Backend> MakeCpuAvx512Masked(int n_threads) {
  return std::make_unique<CpuBackend>(cpu::Avx512MaskedKernels(), n_threads);
}

std::unique_ptr<Backend> MakeCpuAmx(int n_threads) {
  return std::make_unique<CpuBackend>(cpu::AmxKernels(), n_threads);
}

#else

std::string ProbeCpuAvx2() { return "built for a processor that is not x86-64"; }
std::string ProbeCpuAvx512() { return ProbeCpuAvx2(); }
std::string ProbeCpuAvx512Vbmi() { return ProbeCpuAvx2(); }
std::unique_ptr<Backend> MakeCpuAvx2(int) { return nullptr; }
std::unique_ptr<Backend> MakeCpuAvx512(int) { return nullptr; }
std::unique_ptr<Backend> MakeCpuAvx512Vbmi(int) { return nullptr; }
std::unique_ptr<Backend> MakeCpuAvx2Masked(int) { return nullptr; }
std::unique_ptr<Backend> MakeCpuAvx512Masked(int) { return nullptr; }
std::string ProbeCpuAmx() { return ProbeCpuAvx2(); }
std::unique_ptr<Backend> MakeCpuAmx(int) { return nullptr; }

#endif

std::unique_ptr<Backend> MakeCpuPortable(int n_threads) {
  return std::make_unique<CpuBackend>(cpu::PortableKernels(), n_threads);
}

}  // namespace fathom
