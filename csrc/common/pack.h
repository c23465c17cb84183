// Brings matrices into the form in which product.h multiplies them. Compiled once per instruction set.
#pragma once
#include "common/product.h"
#include "common/vec_io.h"

namespace myvision::CPU_CAPABILITY {

// A matrix in memory, of any type; gemm.h finds the elements of its left operand in the same way.
template <typename S>
using PackSource = GemmLeft<S>;

// A strip of the left operand, of a matrix whose rows lie side by side.
template <typename T, typename S>
inline void pack_strip(const S* from, int64_t row, int64_t rows, int64_t depth, T* to) {
  constexpr int64_t kSize = Vec<T>::size(), kRows = Product<T>::kRows;
  constexpr int kSquares = (kRows + kSize - 1) / kSize;
  for (int64_t k = 0; k < depth; k += kSize) {
    const int64_t deep = std::min(kSize, depth - k);
    Vec<T> squares[kSquares][kSize];
#pragma GCC unroll 2
    for (int i = 0; i < kSquares; ++i) {
#pragma GCC unroll 16
      for (int r = 0; r < kSize; ++r) {
        const bool is_there = i * kSize + r < rows;
        squares[i][r] = is_there ? load<T>(from + (i * kSize + r) * row + k, deep) : Vec<T>(T(0));
      }
      transpose<T>(squares[i]);
    }
    // A whole vector each: what is too much is written over by the next, or lies behind the strip.
#pragma GCC unroll 16
    for (int c = 0; c < kSize; ++c)
      if (c < deep)
#pragma GCC unroll 2
        for (int i = 0; i < kSquares; ++i) squares[i][c].store(to + (k + c) * kRows + i * kSize);
  }
}

// The same of numbers of which those of a column lie side by side, for all strips of a block at once.
template <typename T, typename S>
inline void pack_columns(const S* from, int64_t step, int64_t rows, int64_t depth, T* to) {
  constexpr int64_t kSize = Vec<T>::size(), kRows = Product<T>::kRows;
  for (int64_t k = 0; k < depth; ++k, from += step, to += kRows)
    for (int64_t i = 0; i < rows; i += kRows)
#pragma GCC unroll 2
      for (int64_t j = 0; j < kRows; j += kSize)
        if (i + j < rows) load<T>(from + i + j, rows - i - j).store(to + i / kRows * Product<T>::kStrip + j);
}

// A block of the left operand: Product::PackLeft.
template <typename T, typename S>
inline void pack_left(const PackSource<S>& from, int64_t rows, int64_t depth, T* to) {
  using P = Product<T>;
  if (from.row == 1 && from.step != 1) return pack_columns<T>(from.data, from.step, rows, depth, to);
  for (int64_t i = 0; i < rows; i += P::kRows, to += P::kStrip) {
    const S* const strip = from.data + i * from.row;
    const int64_t count = std::min(P::kRows, rows - i);
    if (from.step == 1) {
      pack_strip<T>(strip, from.row, count, depth, to);
    } else {
      for (int64_t k = 0; k < depth; ++k)
        for (int64_t r = 0; r < count; ++r) to[k * P::kRows + r] = static_cast<T>(strip[r * from.row + k * from.step]);
    }
  }
}

// A panel of the right operand, Product::PackRight, of the transposed matrix: its rows are the panel's columns.
template <typename T, typename S>
inline void pack_right(const PackSource<S>& from, int64_t depth, int64_t columns, T* to) {
  constexpr int64_t kCols = Product<T>::kCols;
  if (columns < kCols) std::fill_n(to, depth * kCols, T(0));
  if (from.step == 1 && from.row != 1) return transpose<T>(from.data, from.row, columns, depth, to, kCols);
  for (int64_t k = 0; k < depth; ++k) copy_row<T>(from.data + k * from.step, from.row, columns, to + k * kCols, 1);
}

}  // namespace myvision::CPU_CAPABILITY
