#include "common/cpu_capability.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

#if defined(_MSC_VER)
#include <intrin.h>
#endif

namespace myvision {
namespace {

#if defined(_MSC_VER) && defined(_M_X64)

bool has_bits(int word, int bits) { return (word & bits) == bits; }

CpuCapability of_this_cpu() {
  int leaf1[4], leaf7[4];
  __cpuid(leaf1, 1);
  __cpuidex(leaf7, 7, 0);
  const bool system_saves_registers = has_bits(leaf1[2], 1 << 27);
  const int saved = system_saves_registers ? static_cast<int>(_xgetbv(0)) : 0;
  const bool avx2 = has_bits(saved, 0x6) && has_bits(leaf1[2], 1 << 12 | 1 << 29) && has_bits(leaf7[1], 1 << 5);
  const bool avx512 = avx2 && has_bits(saved, 0xe6) && has_bits(leaf7[1], 1 << 16 | 1 << 17 | 1 << 30 | 1 << 31);
  return avx512 ? CpuCapability::AVX512 : avx2 ? CpuCapability::AVX2 : CpuCapability::Default;
}

#elif defined(__x86_64__)

CpuCapability of_this_cpu() {
  __builtin_cpu_init();  // this may run before the compiler's own initialisation
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return avx512 ? CpuCapability::AVX512 : avx2 ? CpuCapability::AVX2 : CpuCapability::Default;
}

#else

CpuCapability of_this_cpu() { return CpuCapability::Default; }

#endif

constexpr CpuCapability best_built() {
#if defined(MYVISION_CPU_X86)
  return CpuCapability::AVX512;
#else
  return CpuCapability::Default;
#endif
}

// What ATEN_CPU_CAPABILITY allows; a value that torch does not know either allows everything.
CpuCapability allowed() {
  const char* variable = std::getenv("ATEN_CPU_CAPABILITY");
  const std::string_view value = variable == nullptr ? "" : variable;
  if (value == "default") return CpuCapability::Default;
  return value == "avx2" ? CpuCapability::AVX2 : CpuCapability::AVX512;
}

}  // namespace

CpuCapability cpu_capability() {
  static const CpuCapability chosen = std::min({of_this_cpu(), best_built(), allowed()});
  return chosen;
}

const char* name_of(CpuCapability capability) {
  switch (capability) {
    case CpuCapability::AVX512:
      return "AVX512";
    case CpuCapability::AVX2:
      return "AVX2";
    default:
      return "DEFAULT";
  }
}

}  // namespace myvision
