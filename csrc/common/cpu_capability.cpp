#include "common/cpu_capability.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

#if defined(_MSC_VER)
#include <intrin.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#endif

namespace myvision {
namespace {

bool has_bits(int word, int bits) { return (word & bits) == bits; }

// eax, ebx, ecx, edx
struct CpuidWords {
  int word[4];
};

#if defined(_MSC_VER) && defined(_M_X64)

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

CpuidWords cpuid(int leaf, int subleaf) {
  int words[4];
  __cpuidex(words, leaf, subleaf);
  return {{words[0], words[1], words[2], words[3]}};
}

int registers_that_the_system_saves() { return static_cast<int>(_xgetbv(0)); }

#elif defined(__x86_64__)

CpuCapability of_this_cpu() {
  __builtin_cpu_init();  // this may run before the compiler's own initialisation
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return avx512 ? CpuCapability::AVX512 : avx2 ? CpuCapability::AVX2 : CpuCapability::Default;
}

CpuidWords cpuid(int leaf, int subleaf) {
  unsigned a = 0, b = 0, c = 0, d = 0;
  __get_cpuid_count(leaf, subleaf, &a, &b, &c, &d);
  return {{int(a), int(b), int(c), int(d)}};
}

int registers_that_the_system_saves() {
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<int>(low);
}

#else

CpuCapability of_this_cpu() { return CpuCapability::Default; }
CpuidWords cpuid(int, int) { return {}; }
int registers_that_the_system_saves() { return 0; }

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

bool has_amx_for(CpuFeature feature) {
  constexpr int kTiles = 1 << 17 | 1 << 18;
  if (!has_bits(registers_that_the_system_saves(), kTiles)) return false;
  const CpuidWords first = cpuid(7, 0);
  if (feature == CpuFeature::AmxBFloat16) return has_bits(first.word[3], 1 << 22);
  return first.word[0] >= 1 && has_bits(cpuid(7, 1).word[0], 1 << 21);
}

// The first leaf spells "GenuineIntel".
bool is_intel() {
  const CpuidWords maker = cpuid(0, 0);
  return maker.word[1] == 0x756e6547 && maker.word[3] == 0x49656e69 && maker.word[2] == 0x6c65746e;
}

}  // namespace

CpuCapability cpu_capability() {
  static const CpuCapability chosen = std::min({of_this_cpu(), best_built(), allowed()});
  return chosen;
}

bool cpu_has(CpuFeature feature) {
  // Only a CPU with AVX512 is asked: it has the instruction that reads what the system saves.
  if (cpu_capability() != CpuCapability::AVX512) return false;
  return feature == CpuFeature::Intel ? is_intel() : has_amx_for(feature);
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
