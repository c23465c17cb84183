// Which instruction set the CPU kernels use.
#pragma once

namespace myvision {

enum class CpuCapability { Default, AVX2, AVX512 };
constexpr int kCpuCapabilities = 3;

// The best set this CPU has among those built; ATEN_CPU_CAPABILITY (default, avx2, avx512) may only lower it.
CpuCapability cpu_capability();
const char* name_of(CpuCapability capability);

// What some CPUs have beside AVX512: matrix units, each for one element type, and a maker whose own library is at its
// best on them.
enum class CpuFeature { AmxFloat16, AmxBFloat16, Intel };

// Whether this CPU has it and the system lets programs use it; not where cpu_capability() is less than AVX512.
bool cpu_has(CpuFeature feature);

}  // namespace myvision
