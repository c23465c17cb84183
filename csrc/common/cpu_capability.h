// Which instruction set the CPU kernels use.
#pragma once

namespace myvision {

enum class CpuCapability { Default, AVX2, AVX512 };
constexpr int kCpuCapabilities = 3;

// The best set this CPU has among those built; ATEN_CPU_CAPABILITY (default, avx2, avx512) may only lower it.
CpuCapability cpu_capability();
const char* name_of(CpuCapability capability);

}  // namespace myvision
