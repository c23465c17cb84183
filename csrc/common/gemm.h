// Register-blocked matrix product for one instruction set, the heart of deform_conv2d and attention. Compiled once per
// set.
//
// A tile of C, kRows x kCols, stays in registers while a depth of A and B streams past: per step one row of B is
// loaded, each element of a column of A is broadcast, and kRows * kCols multiply-adds are done. B rows come from a
// packed panel (kCols wide) or straight from a matrix; A is addressed by two strides, so that it may be transposed.
#pragma once
#include <ATen/cpu/vec/vec.h>

#include <cstdint>
#include <utility>

namespace myvision::CPU_CAPABILITY {

template <typename T>
struct GemmTile {
  using Vec = at::vec::Vectorized<T>;
#if defined(CPU_CAPABILITY_AVX512)
  static constexpr int kRows = 12;  // 24 accumulators of 32 registers
#elif defined(CPU_CAPABILITY_AVX2)
  static constexpr int kRows = 6;  // 12 of 16
#elif defined(__aarch64__)
  static constexpr int kRows = 12;  // 24 of 32
#else
  static constexpr int kRows = 3;  // a vector is two SSE registers here: 12 of 16
#endif
  static constexpr int kCols = 2 * Vec::size();
};

// element (i, k) stands at data[i * row + k * step]
template <typename T>
struct GemmLeft {
  const T* data;
  int64_t row, step;
};

// row k of the kCols wide panel stands at data[k * step]
template <typename T>
struct GemmRight {
  const T* data;
  int64_t step;
};

// c[ROWS][kCols] (+)= a * b, with rows of c ldc apart. Where FETCH, every step brings a line of `ahead` near, of which
// these are as far apart as rows of b.
template <typename T, int ROWS, bool FETCH = false>
inline void gemm_tile(GemmLeft<T> a, GemmRight<T> b, int64_t depth, T* c, int64_t ldc, bool accumulate,
                      const T* ahead = nullptr) {
  using Vec = typename GemmTile<T>::Vec;
  Vec sum[ROWS][2];
#pragma GCC unroll 12
  for (int i = 0; i < ROWS; ++i) sum[i][0] = sum[i][1] = Vec(T(0));
  for (int64_t k = 0; k < depth; ++k) {
    const Vec b0 = Vec::loadu(b.data), b1 = Vec::loadu(b.data + Vec::size());
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; ++i) {
      const Vec left(a.data[i * a.row]);
      sum[i][0] = at::vec::fmadd(left, b0, sum[i][0]);
      sum[i][1] = at::vec::fmadd(left, b1, sum[i][1]);
    }
    a.data += a.step;
    b.data += b.step;
    if constexpr (FETCH) {
      __builtin_prefetch(ahead, 0, 2);
      ahead += b.step;
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < ROWS; ++i) {
    for (int j = 0; j < 2; ++j) {
      T* out = c + i * ldc + j * Vec::size();
      (accumulate ? sum[i][j] + Vec::loadu(out) : sum[i][j]).store(out);
    }
  }
}

#if defined(CPU_CAPABILITY_AVX2) && defined(__GNUC__) && defined(__x86_64__)
// The full 6 x 16 tile of floats by hand. With 16 registers nothing is left over, and compilers spill or re-address the
// left operand, which costs up to a third on some CPUs. Three rows of A share a base register. Four steps a turn: the
// end of a loop of few turns is foreseen, and the next tile begins while this one ends. Which it only does inlined.
// clang-format off
#define MYVISION_TILE_THREE(base, r0, r1, r2, r3, r4, r5)  \
  "vbroadcastss (%[" base "]), %%ymm14\n"                  \
  "vbroadcastss (%[" base "], %[row]), %%ymm15\n"          \
  "vfmadd231ps %%ymm14, %%ymm12, %%ymm" r0 "\n"            \
  "vfmadd231ps %%ymm14, %%ymm13, %%ymm" r1 "\n"            \
  "vbroadcastss (%[" base "], %[row], 2), %%ymm14\n"       \
  "vfmadd231ps %%ymm15, %%ymm12, %%ymm" r2 "\n"            \
  "vfmadd231ps %%ymm15, %%ymm13, %%ymm" r3 "\n"            \
  "vfmadd231ps %%ymm14, %%ymm12, %%ymm" r4 "\n"            \
  "vfmadd231ps %%ymm14, %%ymm13, %%ymm" r5 "\n"            \
  "add %[a_step], %[" base "]\n"
#define MYVISION_TILE_STEP                                                           \
  "vmovups (%[b]), %%ymm12\n vmovups 32(%[b]), %%ymm13\n add %[b_step], %[b]\n"      \
  MYVISION_TILE_THREE("top", "0", "1", "2", "3", "4", "5")                           \
  MYVISION_TILE_THREE("bottom", "6", "7", "8", "9", "10", "11")
#define MYVISION_TILE_ADD(base, r0, r1, r2, r3, r4, r5)                 \
  "vaddps (%[" base "]), %%ymm" r0 ", %%ymm" r0 "\n"                    \
  "vaddps 32(%[" base "]), %%ymm" r1 ", %%ymm" r1 "\n"                  \
  "vaddps (%[" base "], %[row]), %%ymm" r2 ", %%ymm" r2 "\n"            \
  "vaddps 32(%[" base "], %[row]), %%ymm" r3 ", %%ymm" r3 "\n"          \
  "vaddps (%[" base "], %[row], 2), %%ymm" r4 ", %%ymm" r4 "\n"         \
  "vaddps 32(%[" base "], %[row], 2), %%ymm" r5 ", %%ymm" r5 "\n"
#define MYVISION_TILE_STORE(base, r0, r1, r2, r3, r4, r5)  \
  "vmovups %%ymm" r0 ", (%[" base "])\n"                   \
  "vmovups %%ymm" r1 ", 32(%[" base "])\n"                 \
  "vmovups %%ymm" r2 ", (%[" base "], %[row])\n"           \
  "vmovups %%ymm" r3 ", 32(%[" base "], %[row])\n"         \
  "vmovups %%ymm" r4 ", (%[" base "], %[row], 2)\n"        \
  "vmovups %%ymm" r5 ", 32(%[" base "], %[row], 2)\n"
// clang-format on
#define MYVISION_TILE_ZERO(r) "vxorps %%xmm" r ", %%xmm" r ", %%xmm" r "\n"
template <>
[[gnu::always_inline]] inline void gemm_tile<float, 6>(GemmLeft<float> a, GemmRight<float> b, int64_t depth, float* c,
                                                       int64_t ldc, bool accumulate, const float*) {
  const float *top = a.data, *bottom = top + 3 * a.row;
  int64_t row = a.row * sizeof(float);
  asm volatile(
      MYVISION_TILE_ZERO("0") MYVISION_TILE_ZERO("1") MYVISION_TILE_ZERO("2") MYVISION_TILE_ZERO("3")
      MYVISION_TILE_ZERO("4") MYVISION_TILE_ZERO("5") MYVISION_TILE_ZERO("6") MYVISION_TILE_ZERO("7")
      MYVISION_TILE_ZERO("8") MYVISION_TILE_ZERO("9") MYVISION_TILE_ZERO("10") MYVISION_TILE_ZERO("11")
      "sub $4, %[depth]\n jl 2f\n"
      ".p2align 5\n"
      "1:\n"
      MYVISION_TILE_STEP MYVISION_TILE_STEP MYVISION_TILE_STEP MYVISION_TILE_STEP
      "sub $4, %[depth]\n jge 1b\n"
      "2:\n"
      "add $4, %[depth]\n jle 4f\n"
      "3:\n"
      MYVISION_TILE_STEP
      "dec %[depth]\n jnz 3b\n"
      "4:\n"
      "mov %[ldc], %[row]\n lea (%[row], %[row], 2), %[bottom]\n"
      "mov %[c], %[top]\n add %[c], %[bottom]\n"
      "test %[accumulate], %[accumulate]\n jz 5f\n"
      MYVISION_TILE_ADD("top", "0", "1", "2", "3", "4", "5")
      MYVISION_TILE_ADD("bottom", "6", "7", "8", "9", "10", "11")
      "5:\n"
      MYVISION_TILE_STORE("top", "0", "1", "2", "3", "4", "5")
      MYVISION_TILE_STORE("bottom", "6", "7", "8", "9", "10", "11")
      : [top] "+r"(top), [bottom] "+r"(bottom), [b] "+r"(b.data), [depth] "+r"(depth), [row] "+r"(row)
      : [a_step] "r"(a.step * sizeof(float)), [b_step] "r"(b.step * sizeof(float)), [c] "r"(c),
        [ldc] "r"(ldc * sizeof(float)), [accumulate] "r"(static_cast<int>(accumulate))
      : "cc", "memory", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",
        "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");
}
#undef MYVISION_TILE_THREE
#undef MYVISION_TILE_STEP
#undef MYVISION_TILE_ADD
#undef MYVISION_TILE_STORE
#undef MYVISION_TILE_ZERO
#endif

namespace detail {

template <typename T>
using TileFunction = void (*)(GemmLeft<T>, GemmRight<T>, int64_t, T*, int64_t, bool, const T*);

// gemm_tile of 1 ... sizeof...(I) rows
template <typename T, int... I>
inline TileFunction<T> tile_of_rows(int64_t rows, std::integer_sequence<int, I...>) {
  static constexpr TileFunction<T> tiles[] = {gemm_tile<T, I + 1>...};
  return tiles[rows - 1];
}

}  // namespace detail

// c[rows][kCols] (+)= a * b: strips of kRows rows, the rest cut so that no strip is needlessly thin.
// Meanwhile `ahead`, of `depth` rows as far apart as b's, is fetched into the cache: the panel that comes next. Null
// where that is there already.
template <typename T>
inline void gemm_panel(GemmLeft<T> a, GemmRight<T> b, int64_t rows, int64_t depth, T* c, int64_t ldc, bool accumulate,
                       const T* ahead = nullptr) {
  constexpr int64_t kRows = GemmTile<T>::kRows, kLine = 64 / sizeof(T);
  const int64_t fetch_per_row = ahead ? (depth + rows - 1) / rows : 0;
  for (int64_t done = 0; done < rows;) {
    const int64_t left = rows - done;
    const int64_t strip = left >= 2 * kRows ? kRows : left > kRows ? (left + 1) / 2 : left;
    for (int64_t i = 0; i < fetch_per_row * strip; ++i, ahead += b.step)
      for (int64_t line = 0; line < GemmTile<T>::kCols; line += kLine) __builtin_prefetch(ahead + line, 0, 2);
    if (strip == kRows)
      gemm_tile<T, kRows>(a, b, depth, c, ldc, accumulate);
    else
      detail::tile_of_rows<T>(strip, std::make_integer_sequence<int, kRows - 1>())(a, b, depth, c, ldc, accumulate,
                                                                                   nullptr);
    a.data += strip * a.row;
    c += strip * ldc;
    done += strip;
  }
}

}  // namespace myvision::CPU_CAPABILITY
