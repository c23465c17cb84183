// Means and variances without cancellation: a chunk that stays in L1 is read twice, the second time as distances from
// its mean, whose own sum corrects for the rounding of that mean; chunks are merged in double. Compiled once per
// instruction set.
#pragma once
#include <cmath>

#include "common/vec_io.h"

namespace myvision::CPU_CAPABILITY {

// Of `count` numbers: their mean and the sum of the squares of their distances from it.
struct Moments {
  double count = 0, mean = 0, squares = 0;
};

// Of two sets together, not both empty (Chan, Golub and LeVeque).
inline Moments merge(const Moments& a, const Moments& b) {
  const double count = a.count + b.count, share = b.count / count, step = b.mean - a.mean;
  return {count, a.mean + step * share, a.squares + b.squares + step * step * a.count * share};
}

// What a kernel normalises with: (x - mean) * rstd - rest * rstd.
template <typename T>
struct Statistics {
  T mean;
  T rest;  // of the mean, which rounding took from it
  T rstd;  // 1 / sqrt(variance + eps)
};

template <typename T>
inline Statistics<T> statistics_of(const Moments& moments, double eps) {
  const T mean = static_cast<T>(moments.mean);
  return {mean, static_cast<T>(moments.mean - mean),
          static_cast<T>(1 / std::sqrt(moments.squares / moments.count + eps))};
}

// ---- along: of numbers that lie one after the other

template <typename T>
inline constexpr int64_t kMomentsChunk = 16384 / sizeof(T);

// Several sums of vectors, so that an addition need not wait for the one before.
template <typename T>
class VectorSum {
 public:
  static constexpr int kStreams = 4;
  Vec<T>& operator[](int stream) { return streams_[stream]; }
  T total() const { return sum_lanes((streams_[0] + streams_[1]) + (streams_[2] + streams_[3])); }

 private:
  Vec<T> streams_[kStreams] = {Vec<T>(T(0)), Vec<T>(T(0)), Vec<T>(T(0)), Vec<T>(T(0))};
};

template <typename In, typename T = Compute<In>>
inline Moments chunk_moments(const In* x, int64_t n) {
  VectorSum<T> sum;
  for_each_vector<T, VectorSum<T>::kStreams>(
      n, [&](int stream, int64_t i, int64_t count) { sum[stream] = sum[stream] + load<T>(x + i, count); });
  const T center = sum.total() / static_cast<T>(n);
  VectorSum<T> distances, squares;
  for_each_vector<T, VectorSum<T>::kStreams>(n, [&](int stream, int64_t i, int64_t count) {
    const Vec<T> distance = keep(load<T>(x + i, count) - Vec<T>(center), count);
    distances[stream] = distances[stream] + distance;
    squares[stream] = at::vec::fmadd(distance, distance, squares[stream]);
  });
  // Exactly, mean and squares are center + rest and the sum of squares - n * rest^2; that is never below zero.
  const double rest = static_cast<double>(distances.total()) / static_cast<double>(n);
  const double sum_of_squares = static_cast<double>(squares.total()) - static_cast<double>(n) * rest * rest;
  return {static_cast<double>(n), center + rest, sum_of_squares < 0 ? 0 : sum_of_squares};
}

template <typename In>
inline Moments moments(const In* x, int64_t n) {
  constexpr int64_t kChunk = kMomentsChunk<Compute<In>>;
  Moments all = chunk_moments(x, n < kChunk ? n : kChunk);
  for (int64_t i = kChunk; i < n; i += kChunk) all = merge(all, chunk_moments(x + i, n - i < kChunk ? n - i : kChunk));
  return all;
}

// The same of numbers whose mean is taken to be 0.
template <typename In, typename T = Compute<In>>
inline Moments moments_about_zero(const In* x, int64_t n) {
  double squares = 0;
  for (int64_t i = 0; i < n; i += kMomentsChunk<T>) {
    VectorSum<T> sum;
    for_each_vector<T, VectorSum<T>::kStreams>(n - i < kMomentsChunk<T> ? n - i : kMomentsChunk<T>,
                                               [&](int stream, int64_t j, int64_t count) {
                                                 const Vec<T> value = load<T>(x + i + j, count);
                                                 sum[stream] = at::vec::fmadd(value, value, sum[stream]);
                                               });
    squares += static_cast<double>(sum.total());
  }
  return {static_cast<double>(n), 0, squares};
}

}  // namespace myvision::CPU_CAPABILITY
