// Means and variances without cancellation: a chunk that stays in L1 is read twice, the second time as distances from
// its mean, whose own sum corrects for the rounding of that mean; chunks are merged in double. Compiled once per
// instruction set.
#pragma once
#include <algorithm>
#include <cmath>

#include "common/vec_io.h"

namespace myvision::CPU_CAPABILITY {

// `count` numbers are summed up by their mean and the sum of the squares of their distances from it.
struct Moments {
  double count = 0, mean = 0, squares = 0;
};

// Returns the moments of two sets together, not both empty (Chan, Golub and LeVeque).
inline Moments merge(const Moments& a, const Moments& b) {
  const double count = a.count + b.count, share = b.count / count, step = b.mean - a.mean;
  return {count, a.mean + step * share, a.squares + b.squares + step * step * a.count * share};
}

// A kernel normalises by (x - mean) * rstd - rest * rstd.
template <typename T>
struct Statistics {
  T mean;
  T rest;  // what rounding took from the mean
  T rstd;  // 1 / sqrt(variance + eps)
};

template <typename T>
inline Statistics<T> statistics_of(const Moments& moments, double eps) {
  const T mean = static_cast<T>(moments.mean);
  return {mean, static_cast<T>(moments.mean - mean),
          static_cast<T>(1 / std::sqrt(moments.squares / moments.count + eps))};
}

// ---- along: numbers lie one after the other

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
[[gnu::flatten]] inline Moments chunk_moments(const In* x, int64_t n) {
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

// Returns the moments of numbers whose mean is taken to be 0.
template <typename In, typename T = Compute<In>>
[[gnu::flatten]] inline Moments moments_about_zero(const In* x, int64_t n) {
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

// ---- across: every line that arrives has one number of each column

// Distances are from the mean of the lines before, which is as good as a column's own: where it is far off, the
// columns' spread is as large. They are summed over a few lines at a time, at first thrice as many as came before.
template <typename T>
class ColumnMoments {
 public:
  static constexpr int64_t kColumns = 4096 / sizeof(T);  // at most

  explicit ColumnMoments(int64_t columns) : columns_(columns) {}

  template <typename S>
  void add(const S* x, int64_t pitch, int64_t lines) {
    if (lines > 0 && count_ == 0 && pending_ == 0) start(x);
    while (lines > 0) {
      const int64_t wanted = std::clamp(3 * count_, kFewestLines, kMostLines) - pending_;
      const int64_t taken = std::min(lines, wanted);
      add_distances(x, pitch, taken);
      if (taken == wanted) merge_pending();
      x += taken * pitch;
      lines -= taken;
    }
  }

  // Merges each column with what `all` has of it.
  void merge_into(Moments* all) {
    if (pending_ > 0) merge_pending();
    if (count_ == 0) return;
    for (int64_t i = 0; i < columns_; ++i) all[i] = merge(all[i], {static_cast<double>(count_), mean_[i], squares_[i]});
  }

 private:
  static constexpr int64_t kFewestLines = 4, kMostLines = 64;

  template <typename S>
  void start(const S* x) {
    for (int64_t i = 0; i < columns_; ++i) {
      center_[i] = static_cast<T>(x[i]);
      pending_distances_[i] = pending_squares_[i] = 0;
      mean_[i] = squares_[i] = 0;
    }
  }

  template <typename S>
  void add_distances(const S* x, int64_t pitch, int64_t lines) {
    int64_t line = 0;
    for (; line + 4 <= lines; line += 4) add_lines<4>(x + line * pitch, pitch);
    for (; line < lines; ++line) add_lines<1>(x + line * pitch, pitch);
    pending_ += lines;
  }

  template <int LINES, typename S>
  void add_lines(const S* x, int64_t pitch) {
    for_each_vector<T, 1>(columns_, [&](int, int64_t i, int64_t count) {
      const Vec<T> center = load<T>(center_ + i, count);
      Vec<T> distances = load<T>(pending_distances_ + i, count), squares = load<T>(pending_squares_ + i, count);
#pragma GCC unroll 4
      for (int line = 0; line < LINES; ++line) {
        const Vec<T> distance = load<T>(x + line * pitch + i, count) - center;
        distances = distances + distance;
        squares = at::vec::fmadd(distance, distance, squares);
      }
      store(distances, pending_distances_ + i, count);
      store(squares, pending_squares_ + i, count);
    });
  }

  void merge_pending() {
    const double lines = static_cast<double>(pending_), share = lines / static_cast<double>(count_ + pending_);
    const double line = 1 / lines;  // a division for each column would take longer than its numbers
    for (int64_t i = 0; i < columns_; ++i) {
      const double rest = static_cast<double>(pending_distances_[i]) * line;
      const double squares = static_cast<double>(pending_squares_[i]) - lines * rest * rest;
      const double step = static_cast<double>(center_[i]) + rest - mean_[i];
      mean_[i] += step * share;
      squares_[i] += (squares < 0 ? 0 : squares) + step * step * share * static_cast<double>(count_);
      center_[i] = static_cast<T>(mean_[i]);
      pending_distances_[i] = pending_squares_[i] = 0;
    }
    count_ += pending_;
    pending_ = 0;
  }

  int64_t columns_, count_ = 0, pending_ = 0;
  alignas(64) T center_[kColumns];
  alignas(64) T pending_distances_[kColumns];
  alignas(64) T pending_squares_[kColumns];
  alignas(64) double mean_[kColumns];
  alignas(64) double squares_[kColumns];
};

}  // namespace myvision::CPU_CAPABILITY
