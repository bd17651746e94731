// SPDX-License-Identifier: MIT
#include "fathom/machine.h"

#include "base/cpu_features.h"
#include "memory/system_memory.h"

namespace fathom {

MachineInfo DescribeMachine() {
  const CpuFeatures& cpu = GetCpuFeatures();
  MachineInfo machine;
  machine.processor = cpu.brand;
  const auto add = [&](bool has, const char* name) {
    if (has) machine.features += (machine.features.empty() ? "" : " ") + std::string(name);
  };
  add(cpu.avx2, "avx2");
  add(cpu.fma, "fma");
  add(cpu.f16c, "f16c");
  add(cpu.avx512f, "avx512f");
  add(cpu.avx512bw, "avx512bw");
  add(cpu.avx512dq, "avx512dq");
  add(cpu.avx512vl, "avx512vl");
  add(cpu.avx512vbmi, "avx512vbmi");
  add(cpu.avx512vbmi2, "avx512vbmi2");
  add(cpu.avx512vnni, "avx512vnni");
  add(cpu.avx512bf16, "avx512bf16");
  add(cpu.gfni, "gfni");
  add(cpu.amx_tile, "amx_tile");
  add(cpu.amx_bf16, "amx_bf16");
  add(cpu.amx_int8, "amx_int8");
  machine.n_processors = UsableProcessors();
  machine.total_bytes = TotalMemoryBytes();
  machine.available_bytes = AvailableMemoryBytes();
  return machine;
}

}  // namespace fathom
