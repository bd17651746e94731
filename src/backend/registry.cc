// SPDX-License-Identifier: MIT
#include "backend/registry.h"

#include <array>

#include "backend/cpu/cpu_backend.h"
#ifdef FATHOM_CUDA
#include "backend/cuda/cuda_backend.h"
#endif
#include "backend/ref/ref_backend.h"
#include "base/cpu_features.h"
#include "fathom/error.h"

namespace fathom {
namespace {

std::string AlwaysAvailable() { return {}; }

constexpr std::array kTable = {
#ifdef FATHOM_CUDA
    BackendEntry{"cuda", "CUDA kernels on copies of the arguments, compute capability 8.0 and up",
                 ProbeCuda, MakeCudaBackend},
#endif
    BackendEntry{"ref", "scalar double precision, one thread: the executable specification",
                 AlwaysAvailable, MakeRefBackend},
    BackendEntry{"cpu/portable", "CPU kernels in standard C++, any processor", AlwaysAvailable,
                 MakeCpuPortable},
    BackendEntry{"cpu/avx2-masked", "as cpu/avx2, but scans by masked adds: to compare with",
                 ProbeCpuAvx2, MakeCpuAvx2Masked},
    BackendEntry{"cpu/avx512-masked", "as cpu/avx512, but scans by masked adds: to compare with",
                 ProbeCpuAvx512, MakeCpuAvx512Masked},
    BackendEntry{"cpu/avx2", "CPU kernels for AVX2, FMA and F16C", ProbeCpuAvx2, MakeCpuAvx2},
    BackendEntry{"cpu/avx512", "CPU kernels for AVX-512 F, BW, DQ and VL", ProbeCpuAvx512,
                 MakeCpuAvx512},
    BackendEntry{"cpu/avx512vbmi", "CPU kernels for AVX-512 with VBMI, VBMI2, VNNI and GFNI",
                 ProbeCpuAvx512Vbmi, MakeCpuAvx512Vbmi},
    BackendEntry{"cpu/amx", "CPU kernels for AVX-512, prefill in AMX tiles of bf16", ProbeCpuAmx,
                 MakeCpuAmx},
};

bool IsCpu(std::string_view name) { return name.substr(0, 4) == "cpu/"; }

const BackendEntry* Find(std::string_view name) {
  const BackendEntry* found = nullptr;
  for (const BackendEntry& entry : kTable) {
    if (name == entry.name) return &entry;
    const bool best_cpu = name.empty() || name == "cpu";
    if (best_cpu && IsCpu(entry.name) && entry.probe().empty()) found = &entry;
  }
  return found;
}

std::string ValidNames() {
  std::string names = "cpu";
  for (const BackendEntry& entry : kTable) names += std::string(", ") + entry.name;
  return names;
}

}  // namespace

std::span<const BackendEntry> BackendTable() { return kTable; }

std::vector<BackendInfo> ListBackends() {
  std::vector<BackendInfo> list;
  for (const BackendEntry& entry : kTable) {
    const std::string reason = entry.probe();
    list.push_back({entry.name, entry.description, reason.empty(), reason});
  }
  return list;
}

std::unique_ptr<Backend> MakeBackend(std::string_view name, int n_threads) {
  const BackendEntry* entry = Find(name);
  if (entry == nullptr) {
    throw Error(ErrorCode::kUsage,
                "unknown backend '" + std::string(name) + "'; valid names: " + ValidNames());
  }
  const std::string reason = entry->probe();
  if (!reason.empty()) {
    throw Error(ErrorCode::kUnsupported, "backend '" + std::string(name) +
                                             "' cannot run on this machine: " + reason +
                                             "; use 'cpu' for the best one that can");
  }
  return entry->make(n_threads > 0 ? n_threads : UsableProcessors());
}

}  // namespace fathom
