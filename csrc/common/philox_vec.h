// Philox for many counters in a row. Compiled once per instruction set.
#pragma once
#include <ATen/cpu/vec/vec.h>

#include <cstddef>
#include <cstdint>

#include "common/philox.h"

namespace myvision::CPU_CAPABILITY {

#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
// Unsigned numbers of 32 bits that are multiplied to 64: one in the lower half of each lane, anything in the upper.
#if defined(CPU_CAPABILITY_AVX512)
struct WideLanes {
  static constexpr int kSize = 8;
  __m512i lanes;
  explicit WideLanes(uint64_t value) : lanes(_mm512_set1_epi64(static_cast<int64_t>(value))) {}
  WideLanes(__m512i value) : lanes(value) {}
  // So that store_words leaves them in order.
  static WideLanes counters() { return _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7); }
  friend WideLanes operator+(WideLanes a, WideLanes b) { return _mm512_add_epi64(a.lanes, b.lanes); }
  friend WideLanes operator*(WideLanes a, WideLanes b) { return _mm512_mul_epu32(a.lanes, b.lanes); }
  friend WideLanes operator^(WideLanes a, WideLanes b) { return _mm512_xor_si512(a.lanes, b.lanes); }
  WideLanes upper() const { return _mm512_srli_epi64(lanes, 32); }
  static WideLanes pair(WideLanes low, WideLanes high) {
    return _mm512_mask_blend_epi32(0xAAAA, low.lanes, _mm512_slli_epi64(high.lanes, 32));
  }
  static void store_words(WideLanes first, WideLanes second, uint32_t* to) {
    _mm512_storeu_si512(to, _mm512_unpacklo_epi64(first.lanes, second.lanes));
    _mm512_storeu_si512(to + 16, _mm512_unpackhi_epi64(first.lanes, second.lanes));
  }
  static WideLanes load(const uint64_t* from) { return _mm512_loadu_si512(from); }
  // The lower halves.
  static void store_narrow(WideLanes first, WideLanes second, uint32_t* to) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    _mm512_storeu_si512(to, _mm512_permutex2var_epi32(first.lanes, even, second.lanes));
  }
};
#else
struct WideLanes {
  static constexpr int kSize = 4;
  __m256i lanes;
  explicit WideLanes(uint64_t value) : lanes(_mm256_set1_epi64x(static_cast<int64_t>(value))) {}
  WideLanes(__m256i value) : lanes(value) {}
  // So that store_words leaves them in order.
  static WideLanes counters() { return _mm256_setr_epi64x(0, 2, 1, 3); }
  friend WideLanes operator+(WideLanes a, WideLanes b) { return _mm256_add_epi64(a.lanes, b.lanes); }
  friend WideLanes operator*(WideLanes a, WideLanes b) { return _mm256_mul_epu32(a.lanes, b.lanes); }
  friend WideLanes operator^(WideLanes a, WideLanes b) { return _mm256_xor_si256(a.lanes, b.lanes); }
  WideLanes upper() const { return _mm256_srli_epi64(lanes, 32); }
  static WideLanes pair(WideLanes low, WideLanes high) {
    return _mm256_blend_epi32(low.lanes, _mm256_slli_epi64(high.lanes, 32), 0xAA);
  }
  static void store_words(WideLanes first, WideLanes second, uint32_t* to) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_unpacklo_epi64(first.lanes, second.lanes));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 8), _mm256_unpackhi_epi64(first.lanes, second.lanes));
  }
  static WideLanes load(const uint64_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
  // The lower halves.
  static void store_narrow(WideLanes first, WideLanes second, uint32_t* to) {
    const __m256 mixed = _mm256_shuffle_ps(_mm256_castsi256_ps(first.lanes), _mm256_castsi256_ps(second.lanes), 0x88);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(_mm256_castps_si256(mixed), 0xD8));
  }
};
#endif

inline constexpr int64_t kPhiloxCounters = WideLanes::kSize;

struct PhiloxLanes {
  WideLanes c0, c1, c2, c3;

  explicit PhiloxLanes(WideLanes counters) : c0(counters), c1(counters.upper()), c2(0), c3(0) {}

  void mix(uint32_t k0, uint32_t k1) {
    const WideLanes from_c0 = WideLanes(0xD2511F53) * c0, from_c2 = WideLanes(0xCD9E8D57) * c2;
    c0 = from_c2.upper() ^ c1 ^ WideLanes(k0);
    c1 = from_c2;
    c2 = from_c0.upper() ^ c3 ^ WideLanes(k1);
    c3 = from_c0;
  }
};

// Several at a time, as each round waits for the one before it.
template <std::size_t STREAMS>
[[gnu::always_inline]] inline void mix_philox(uint64_t key, PhiloxLanes (&streams)[STREAMS]) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
#pragma GCC unroll 2
    for (PhiloxLanes& lanes : streams) lanes.mix(k0, k1);
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
}

inline void philox_lanes(uint64_t key, uint64_t counter, uint32_t* to) {
  PhiloxLanes lanes[] = {PhiloxLanes(WideLanes(counter) + WideLanes::counters())};
  mix_philox(key, lanes);
  WideLanes::store_words(WideLanes::pair(lanes[0].c0, lanes[0].c1), WideLanes::pair(lanes[0].c2, lanes[0].c3), to);
}

// to[(4 * k + j) * LANES + i] is word j of counter first[i] + k, for n counters from each first one on.
template <int LANES>
inline void philox_columns(uint64_t key, const uint64_t* first, int64_t n, uint32_t* to) {
  constexpr int kSize = WideLanes::kSize;
  for (int i = 0; i < LANES; i += 2 * kSize)
    for (int64_t k = 0; k < n; ++k) {
      PhiloxLanes lanes[] = {PhiloxLanes(WideLanes::load(first + i) + WideLanes(k)),
                             PhiloxLanes(WideLanes::load(first + i + kSize) + WideLanes(k))};
      uint32_t* const row = to + 4 * k * LANES + i;
      mix_philox(key, lanes);
      WideLanes::store_narrow(lanes[0].c0, lanes[1].c0, row);
      WideLanes::store_narrow(lanes[0].c1, lanes[1].c1, row + LANES);
      WideLanes::store_narrow(lanes[0].c2, lanes[1].c2, row + 2 * LANES);
      WideLanes::store_narrow(lanes[0].c3, lanes[1].c3, row + 3 * LANES);
    }
}
#else
inline constexpr int64_t kPhiloxCounters = 1;

inline void philox_lanes(uint64_t key, uint64_t counter, uint32_t* to) {
  const PhiloxWords words = philox(key, counter);
  for (int j = 0; j < 4; ++j) to[j] = words.word[j];
}

// to[(4 * k + j) * LANES + i] is word j of counter first[i] + k, for n counters from each first one on.
template <int LANES>
inline void philox_columns(uint64_t key, const uint64_t* first, int64_t n, uint32_t* to) {
  for (int i = 0; i < LANES; ++i)
    for (int64_t k = 0; k < n; ++k) {
      const PhiloxWords words = philox(key, first[i] + k);
      for (int j = 0; j < 4; ++j) to[(4 * k + j) * LANES + i] = words.word[j];
    }
}
#endif

// to[4 * i + j] is word j of counter first + i, for n counters and up to the next multiple of kPhiloxCounters.
inline void philox(uint64_t key, uint64_t first, int64_t n, uint32_t* to) {
  for (int64_t i = 0; i < n; i += kPhiloxCounters) philox_lanes(key, first + i, to + 4 * i);
}

}  // namespace myvision::CPU_CAPABILITY
