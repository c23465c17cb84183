// Loads, stores and transposes for the CPU kernels, with conversion between the element type in memory (float, double,
// c10::Half, c10::BFloat16) and the type T computed in (float or double). Compiled once per instruction set.
#pragma once
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>

#include "common/dtype.h"

namespace myvision::CPU_CAPABILITY {

template <typename T>
using Vec = at::vec::Vectorized<T>;

#if defined(CPU_CAPABILITY_AVX512)
// Half of a vector of floats, for rows of up to 8 numbers: whole vectors would reach into the next rows, and a load
// that spans two recent stores waits for both.
struct HalfVec {
  __m256 lanes;
  HalfVec(__m256 v) : lanes(v) {}
  explicit HalfVec(float value) : lanes(_mm256_set1_ps(value)) {}
  static constexpr int size() { return 8; }
  static HalfVec loadu(const float* from) { return _mm256_loadu_ps(from); }
  void store(float* to) const { _mm256_storeu_ps(to, lanes); }
  void store(float* to, int n) const { _mm256_mask_storeu_ps(to, (1 << n) - 1, lanes); }
  friend HalfVec operator+(HalfVec a, HalfVec b) { return _mm256_add_ps(a.lanes, b.lanes); }
  friend HalfVec operator*(HalfVec a, HalfVec b) { return _mm256_mul_ps(a.lanes, b.lanes); }
  friend HalfVec operator&(HalfVec a, HalfVec b) { return _mm256_and_ps(a.lanes, b.lanes); }
  friend HalfVec fmadd(HalfVec a, HalfVec b, HalfVec c) { return _mm256_fmadd_ps(a.lanes, b.lanes, c.lanes); }
};
#endif

// The type computed in: half types in float.
template <typename In>
using Compute = std::conditional_t<std::is_same_v<In, double>, double, float>;

// Calls f with a null pointer to the floating element type.
template <typename F>
inline void with_type(Dtype dtype, const F& f) {
  switch (dtype) {
    case Dtype::Float64:
      return f(static_cast<double*>(nullptr));
    case Dtype::Float16:
      return f(static_cast<c10::Half*>(nullptr));
    case Dtype::BFloat16:
      return f(static_cast<c10::BFloat16*>(nullptr));
    default:
      return f(static_cast<float*>(nullptr));
  }
}

template <typename T, typename In>
inline Vec<T> load(const In* from) {
  Vec<T> result;
  if constexpr (std::is_same_v<T, In>)
    result = Vec<T>::loadu(from);
  else if constexpr (std::is_same_v<In, c10::Half>)
    at::vec::load_fp32_from_fp16(from, result);
  else
    at::vec::load_fp32_from_bf16(from, result);
  return result;
}

// So many bytes, fewer than 2 * PIECE: without a call.
template <int PIECE>
inline void copy_few(const char* from, int64_t bytes, char* to) {
  if (bytes & PIECE) {
    std::memcpy(to, from, PIECE);
    from += PIECE;
    to += PIECE;
  }
  if constexpr (PIECE > 2) copy_few<PIECE / 2>(from, bytes, to);
}
// n elements, fewer than a vector of floats has.
template <typename In>
inline void copy_few(const In* from, int64_t n, In* to) {
  copy_few<Vec<float>::size() * sizeof(In) / 2>(reinterpret_cast<const char*>(from), n * sizeof(In),
                                                reinterpret_cast<char*>(to));
}

// The first n elements, zeros after them.
template <typename T, typename In>
inline Vec<T> load(const In* from, int64_t n) {
  if (n >= Vec<T>::size()) return load<T>(from);
  if constexpr (std::is_same_v<T, In>) {
    return Vec<T>::loadu(from, n);
  } else {
    alignas(64) In padded[Vec<T>::size()] = {};
    copy_few(from, n, padded);
    return load<T>(padded);
  }
}

// A vector of floats as half a vector of a half type.
template <typename Out>
inline void store_half(const Vec<float>& value, Out* to) {
#if defined(CPU_CAPABILITY_AVX512)
  const __m256i half = std::is_same_v<Out, c10::Half> ? at::vec::cvtfp32_fp16(value) : at::vec::cvtfp32_bf16(value);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), half);
#elif defined(CPU_CAPABILITY_AVX2)
  const __m128i half = std::is_same_v<Out, c10::Half> ? at::vec::cvtfp32_fp16(value) : at::vec::cvtfp32_bf16(value);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), half);
#else
  alignas(64) Out converted[2 * Vec<float>::size()];
  if constexpr (std::is_same_v<Out, c10::Half>)
    at::vec::convert_float_half(value, value).store(converted);
  else
    at::vec::convert_float_bfloat16(value, value).store(converted);
  std::memcpy(to, converted, Vec<float>::size() * sizeof(Out));
#endif
}

template <typename T, typename Out>
inline void store(const Vec<T>& value, Out* to, int64_t n = Vec<T>::size()) {
  if constexpr (std::is_same_v<T, Out>) {
    if (n >= Vec<T>::size()) return value.store(to);
    value.store(to, static_cast<int>(n));
  } else {
    if (n >= Vec<T>::size()) return store_half(value, to);
    alignas(64) Out converted[Vec<T>::size()];
    store_half(value, converted);
    copy_few(converted, n, to);
  }
}

// Two vectors side by side: half types fill one vector then, and are stored in one go.
template <typename T, typename Out>
inline void store_pair(const Vec<T>& first, const Vec<T>& second, Out* to) {
  if constexpr (std::is_same_v<T, Out>) {
    first.store(to);
    second.store(to + Vec<T>::size());
  } else if constexpr (std::is_same_v<Out, c10::Half>) {
    at::vec::convert_float_half(first, second).store(to);
  } else {
    at::vec::convert_float_bfloat16(first, second).store(to);
  }
}

// The same past the caches, into whole lines of theirs that nobody reads soon: these need not be fetched first. To be
// followed by end_of_stream before another thread reads.
template <typename T, typename Out>
inline void stream_pair(const Vec<T>& first, const Vec<T>& second, Out* to) {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  alignas(64) Out line[2 * Vec<T>::size()];
  store_pair(first, second, line);
  for (std::size_t i = 0; i < sizeof(line); i += sizeof(__m256i))
    _mm256_stream_si256(reinterpret_cast<__m256i*>(reinterpret_cast<char*>(to) + i),
                        _mm256_load_si256(reinterpret_cast<const __m256i*>(reinterpret_cast<const char*>(line) + i)));
#else
  store_pair(first, second, to);
#endif
}
inline void end_of_stream() {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  _mm_sfence();
#endif
}

// The first n lanes, zeros after them.
template <typename T>
inline Vec<T> keep(const Vec<T>& value, int64_t n) {
  return n >= Vec<T>::size() ? value : Vec<T>::set(Vec<T>(T(0)), value, n);
}

template <typename T>
inline T sum_lanes(const Vec<T>& value) {
#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
  return at::vec::vec_reduce_all<T>([](const Vec<T>& a, const Vec<T>& b) { return a + b; }, value);
#else
  alignas(64) T lanes[Vec<T>::size()];  // not passed by value, on which GCC has a note without AVX
  value.store(lanes);
  for (int half = Vec<T>::size() / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
#endif
}

// Calls f(stream, i, count) for every vector i of n numbers, in turn for STREAMS streams, which are to be independent:
// all vectors are whole, count == Vec<T>::size(), but the last. To be called by functions marked [[gnu::flatten]],
// which have f inlined.
template <typename T, int STREAMS, typename F>
[[gnu::always_inline]] inline void for_each_vector(int64_t n, const F& f) {
  constexpr int64_t kSize = Vec<T>::size();
  int64_t i = 0;
  for (; i + STREAMS * kSize <= n; i += STREAMS * kSize) {
#pragma GCC unroll 8
    for (int stream = 0; stream < STREAMS; ++stream) f(stream, i + stream * kSize, kSize);
  }
  if constexpr (STREAMS > 1) {
    for (; i + kSize <= n; i += kSize) f(0, i, kSize);
  }
  if (i < n) f(0, i, n - i);
}

// Transposes a square of Vec<T>::size() rows in registers.
template <typename T>
inline void transpose(Vec<T> (&rows)[Vec<T>::size()]) {
  constexpr int kSize = Vec<T>::size();
#if defined(CPU_CAPABILITY_AVX2)
  if constexpr (std::is_same_v<T, float>) {
    __m256 pair[8], quad[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 2) {
      pair[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
      pair[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 4; ++i) {
      const int at = i / 2 * 4 + i % 2;
      quad[i / 2 * 4 + i % 2 * 2] = _mm256_shuffle_ps(pair[at], pair[at + 2], 0x44);
      quad[i / 2 * 4 + i % 2 * 2 + 1] = _mm256_shuffle_ps(pair[at], pair[at + 2], 0xEE);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 4; ++i) {
      rows[i] = _mm256_permute2f128_ps(quad[i], quad[i + 4], 0x20);
      rows[i + 4] = _mm256_permute2f128_ps(quad[i], quad[i + 4], 0x31);
    }
    return;
  }
#endif
  // Interleaving row i with row i + kSize / 2 rotates the bits of (row, column); log2(kSize) turns swap the two.
#pragma GCC unroll 4
  for (int turn = 1; turn < kSize; turn *= 2) {
    Vec<T> next[kSize];
#pragma GCC unroll 16
    for (int i = 0; i < kSize / 2; ++i)
      std::tie(next[2 * i], next[2 * i + 1]) = at::vec::interleave2(rows[i], rows[i + kSize / 2]);
#pragma GCC unroll 16
    for (int i = 0; i < kSize; ++i) rows[i] = next[i];
  }
}

// One square of the transpose below: m rows, n columns of it, or all where WHOLE.
template <bool WHOLE, typename T, typename In, typename Out>
inline void transpose_square(const In* from, int64_t from_row, int64_t m, int64_t n, Out* to, int64_t to_row) {
  constexpr int kSize = Vec<T>::size();
  Vec<T> square[kSize];
#pragma GCC unroll 16
  for (int r = 0; r < kSize; ++r)
    square[r] = WHOLE ? load<T>(from + r * from_row) : r < m ? load<T>(from + r * from_row, n) : Vec<T>(T(0));
  transpose<T>(square);
#pragma GCC unroll 16
  for (int c = 0; c < kSize; ++c) {
    if constexpr (WHOLE)
      store(square[c], to + c * to_row);
    else if (c < n)
      store(square[c], to + c * to_row, m);
  }
}

// to[j * to_row + i] = from[i * from_row + j]. Meanwhile the rows that follow are brought near: so many at once the
// processor does not foresee.
template <typename T, typename In, typename Out>
inline void transpose(const In* from, int64_t from_row, int64_t rows, int64_t columns, Out* to, int64_t to_row) {
  constexpr int64_t kSize = Vec<T>::size(), kLine = 64 / sizeof(In);
  for (int64_t i = 0; i < rows; i += kSize)
    for (int64_t j = 0; j < columns; j += kSize) {
      const In* in = from + i * from_row + j;
      Out* out = to + j * to_row + i;
      if (j % kLine == 0)
        for (int64_t r = kSize; r < 2 * kSize; ++r) __builtin_prefetch(in + r * from_row);
      if (i + kSize <= rows && j + kSize <= columns)
        transpose_square<true, T>(in, from_row, kSize, kSize, out, to_row);
      else
        transpose_square<false, T>(in, from_row, std::min(kSize, rows - i), std::min(kSize, columns - j), out, to_row);
    }
}

// to[i] = from[i]
template <typename T, typename In, typename Out>
inline void copy_line(const In* from, int64_t n, Out* to) {
  constexpr int64_t kSize = Vec<T>::size();
  int64_t i = 0;
  for (; i <= n - 2 * kSize; i += 2 * kSize) store_pair(load<T>(from + i), load<T>(from + i + kSize), to + i);
  for (; i < n; i += kSize) store(load<T>(from + i, n - i), to + i, n - i);
}

// to[i * to_stride] = from[i * from_stride]
template <typename T, typename In, typename Out>
inline void copy_row(const In* from, int64_t from_stride, int64_t n, Out* to, int64_t to_stride) {
  if (from_stride == 1 && to_stride == 1) {
    copy_line<T>(from, n, to);
  } else {
    for (int64_t i = 0; i < n; ++i) to[i * to_stride] = static_cast<Out>(static_cast<T>(from[i * from_stride]));
  }
}

// A row of pixels of a tensor with any strides -> channels last, pixels `pitch` apart.
template <typename T, typename In>
inline void load_pixels(const In* from, int64_t channel_stride, int64_t pixel_stride, int64_t channels, int64_t pixels,
                        T* to, int64_t pitch) {
  if (pixel_stride == 1 && channel_stride != 1)
    transpose<T>(from, channel_stride, channels, pixels, to, pitch);
  else
    for (int64_t i = 0; i < pixels; ++i)
      copy_row<T>(from + i * pixel_stride, channel_stride, channels, to + i * pitch, 1);
}

// The way back.
template <typename T, typename Out>
inline void store_pixels(const T* from, int64_t pitch, int64_t channels, int64_t pixels, Out* to,
                         int64_t channel_stride, int64_t pixel_stride) {
  if (pixel_stride == 1 && channel_stride != 1)
    transpose<T>(from, pitch, pixels, channels, to, channel_stride);
  else
    for (int64_t i = 0; i < pixels; ++i)
      copy_row<T>(from + i * pitch, 1, channels, to + i * pixel_stride, channel_stride);
}

}  // namespace myvision::CPU_CAPABILITY
