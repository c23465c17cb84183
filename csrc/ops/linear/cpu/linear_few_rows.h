// The product of linear for few rows of input, such as a decoder's: each number of the weight is needed few times, so
// that it is read where it lies, once and at the speed of memory. Compiled once per instruction set.
#pragma once
#include "common/parallel.h"
#include "common/product.h"
#include "common/vec_io.h"
#include "ops/linear/linear.h"

namespace myvision::CPU_CAPABILITY::linear {

// Sums in registers: of rows of the input, and of the weight.
#if defined(CPU_CAPABILITY_AVX512)
inline constexpr int kInputRows = 6, kWeightRows = 4;
#else
inline constexpr int kInputRows = 2, kWeightRows = 4;
#endif

// sums[i * pitch + j] = row i of the input * row j of the weight.
template <int ROWS, typename S, typename T = Compute<S>>
inline void dot(const T* input, int64_t input_row, const S* weight, int64_t weight_row, int64_t n, T* sums,
                int64_t pitch) {
  constexpr int64_t kSize = Vec<T>::size();
  Vec<T> sum[ROWS][kWeightRows];
#pragma GCC unroll 6
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kWeightRows; ++j) sum[i][j] = Vec<T>(T(0));
  const auto step = [&](int64_t k, auto&& load_at) __attribute__((always_inline)) {
    Vec<T> w[kWeightRows];
#pragma GCC unroll 4
    for (int j = 0; j < kWeightRows; ++j) w[j] = load_at(weight + j * weight_row + k);
#pragma GCC unroll 6
    for (int i = 0; i < ROWS; ++i) {
      const Vec<T> x = load_at(input + i * input_row + k);
#pragma GCC unroll 4
      for (int j = 0; j < kWeightRows; ++j) sum[i][j] = at::vec::fmadd(x, w[j], sum[i][j]);
    }
  };
  int64_t k = 0;
  for (; k + kSize <= n; k += kSize) step(k, [](const auto* from) { return load<T>(from); });
  if (k < n) step(k, [&](const auto* from) { return load<T>(from, n - k); });
#pragma GCC unroll 6
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kWeightRows; ++j) sums[i * pitch + j] = sum_lanes(sum[i][j]);
}

// The same of any number of rows.
template <int ROWS, typename S, typename T = Compute<S>>
inline void dot_rows(const T* input, int64_t input_row, int64_t rows, const S* weight, int64_t weight_row, int64_t n,
                     T* sums, int64_t pitch) {
  for (; rows >= ROWS; rows -= ROWS, input += ROWS * input_row, sums += ROWS * pitch)
    dot<ROWS>(input, input_row, weight, weight_row, n, sums, pitch);
  if constexpr (ROWS > 1)
    if (rows > 0) dot_rows<ROWS - 1>(input, input_row, rows, weight, weight_row, n, sums, pitch);
}

// Calls finish as a Product does.
template <typename S, typename T = Compute<S>>
void multiply_few_rows(const ProductSize& size, const T* input, int64_t input_row, const S* weight, int64_t weight_row,
                       const typename Product<T>::Finish& finish) {
  constexpr int64_t kCols = Product<T>::kCols;
  const int64_t panels = (size.columns + kCols - 1) / kCols;
  const int64_t grain = std::max<int64_t>(65536 / std::max<int64_t>(size.rows * size.depth * kCols, 1), 1);
  parallel_for(0, panels, grain, [&](int64_t first, int64_t last) {
    alignas(64) T sums[kFewRows * kCols];
    for (int64_t column = first * kCols; column < std::min(last * kCols, size.columns); column += kCols) {
      const int64_t count = std::min(kCols, size.columns - column);
      for (int64_t j = 0; j < count; j += kWeightRows) {
        // The last ones may be looked at twice.
        const int64_t at = std::max<int64_t>(std::min(j, count - kWeightRows), 0);
        const S* const rows = weight + (column + at) * weight_row;
        if (count >= kWeightRows) {
          dot_rows<kInputRows>(input, input_row, size.rows, rows, weight_row, size.depth, sums + at, kCols);
        } else {  // one after the other, each as all four
          T four[kFewRows * kWeightRows];
          for (int64_t one = 0; one < count; ++one) {
            dot_rows<kInputRows>(input, input_row, size.rows, rows + one * weight_row, 0, size.depth, four,
                                 kWeightRows);
            for (int64_t i = 0; i < size.rows; ++i) sums[i * kCols + one] = four[i * kWeightRows];
          }
        }
      }
      finish(0, size.rows, column, count, sums);
    }
  });
}

}  // namespace myvision::CPU_CAPABILITY::linear
