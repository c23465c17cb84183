// One row of layer_norm, forward and backward, in memory of type S: half types are computed in float. A row is read
// several times, after the first from L1 or L2. Compiled once per instruction set.
#pragma once
#include <algorithm>

#include "common/activation_vec.h"
#include "common/moments.h"
#include "common/philox_vec.h"
#include "ops/layer_norm/layer_norm.h"

namespace myvision::CPU_CAPABILITY {

inline constexpr int kStreams = 4;              // vectors that are worked on side by side
inline constexpr int64_t kDropoutChunk = 1024;  // elements whose dropout is drawn at a time
inline constexpr int64_t kSumChunk = 4096;      // elements that are added up in T before they are in double

// What dropout multiplies elements with: 0, or 1 / (1 - p).
template <typename T>
class Dropout {
 public:
  explicit Dropout(const LayerNormParams& p)
      : is_on_(p.dropout_p > 0),
        seed_(is_on_ ? static_cast<uint64_t>(*p.seed) : 0),
        threshold_(static_cast<uint32_t>(dropout_threshold(p.dropout_p))),
        scale_(p.dropout_p < 1 ? static_cast<T>(1 / (1 - p.dropout_p)) : T(0)) {}

  bool is_on() const { return is_on_; }

  // Of n elements from the first on, n <= kDropoutChunk; until the next call.
  const T* factors(int64_t first, int64_t n) {
    const int64_t skipped = first % 4;
    philox(seed_, static_cast<uint64_t>(first) / 4, (skipped + n + 3) / 4, words_);
    for (int64_t i = 0; i < n; ++i) factors_[i] = words_[skipped + i] < threshold_ ? T(0) : scale_;
    return factors_;
  }

 private:
  bool is_on_;
  uint64_t seed_;
  uint32_t threshold_;
  T scale_;
  uint32_t words_[kDropoutChunk + 4 + 4 * kPhiloxCounters];
  T factors_[kDropoutChunk];
};

// A vector of an array that may be absent.
template <typename T, typename S>
inline Vec<T> load_or(const S* from, int64_t i, int64_t count, T otherwise) {
  return from ? load<T>(from + i, count) : Vec<T>(otherwise);
}

template <typename T>
inline void store_statistics(const LayerNormParams& p, int64_t row, const Statistics<T>& statistics) {
  if (!p.statistics) return;
  T* to = static_cast<T*>(p.statistics) + row;
  if (!p.centered) {
    *to = statistics.rstd;
    return;
  }
  const int64_t rows = number_of_rows(p);
  to[0] = statistics.mean;
  to[rows] = statistics.rest;
  to[2 * rows] = statistics.rstd;
}

template <typename T>
inline Statistics<T> load_statistics(const LayerNormParams& p, int64_t row) {
  const T* from = static_cast<const T*>(p.statistics) + row;
  if (!p.centered) return {T(0), T(0), *from};
  const int64_t rows = number_of_rows(p);
  return {from[0], from[rows], from[2 * rows]};
}

// (x - mean) * rstd, without cancellation.
template <typename T>
class Normalizer {
 public:
  explicit Normalizer(const Statistics<T>& s) : mean_(s.mean), rstd_(s.rstd), shift_(-s.rest * s.rstd) {}
  Vec<T> operator()(const Vec<T>& x) const { return at::vec::fmadd(x - mean_, rstd_, shift_); }

 private:
  Vec<T> mean_, rstd_, shift_;
};

// ------------------------------------------------------------------------------------------------ forward
template <typename S>
struct ForwardRow {
  int64_t index;
  const S *input, *addend, *residual;
  S *sum, *output;
};

template <typename Half>
void round_row(float* x, int64_t n) {
  for_each_vector<float, 1>(n, [&](int, int64_t i, int64_t count) {
    Half rounded[Vec<float>::size()];
    store(load<float>(x + i, count), rounded, count);
    store(load<float>(rounded, count), x + i, count);
  });
}

// sum = dropout(input) + addend, as the sum's own type holds it, in a buffer too
template <typename S, typename T = Compute<S>>
void add_row(const LayerNormParams& p, const ForwardRow<S>& row, Dropout<T>& dropout) {
  const int64_t n = p.channels;
  for (int64_t first = 0; first < n; first += kDropoutChunk) {
    const int64_t size = std::min(kDropoutChunk, n - first);
    const T* factors = dropout.is_on() ? dropout.factors(row.index * n + first, size) : nullptr;
    const S *input = row.input + first, *addend = row.addend + first;
    S* sum = row.sum + first;
    for_each_vector<T, kStreams>(size, [&](int, int64_t i, int64_t count) {
      store(at::vec::fmadd(load<T>(input + i, count), load_or(factors, i, count, T(1)), load<T>(addend + i, count)),
            sum + i, count);
    });
  }
  if constexpr (std::is_same_v<S, float>) {
    if (p.dtype == Dtype::Float16) round_row<c10::Half>(row.sum, n);
    if (p.dtype == Dtype::BFloat16) round_row<c10::BFloat16>(row.sum, n);
  }
}

template <ActivationKind KIND, typename S, typename T = Compute<S>>
void forward_row(const LayerNormParams& p, const ForwardRow<S>& row, Dropout<T>& dropout) {
  const int64_t n = p.channels;
  const S* x = row.input;
  if (row.addend) {
    add_row(p, row, dropout);
    x = row.sum;
  }
  const Statistics<T> statistics = statistics_of<T>(p.centered ? moments(x, n) : moments_about_zero(x, n), p.eps);
  store_statistics(p, row.index, statistics);
  const Normalizer<T> normalize(statistics);
  const T slope = static_cast<T>(p.activation.negative_slope);
  const T *weight = static_cast<const T*>(p.weight), *bias = static_cast<const T*>(p.bias);
  for_each_vector<T, kStreams>(n, [&](int, int64_t i, int64_t count) {
    Vec<T> z = at::vec::fmadd(normalize(load<T>(x + i, count)), load_or(weight, i, count, T(1)),
                              load_or(bias, i, count, T(0)));
    if (row.residual) z = z + load<T>(row.residual + i, count);
    store(activate<KIND>(z, slope), row.output + i, count);
  });
}

// ------------------------------------------------------------------------------------------------ backward
template <typename S>
struct BackwardRow {
  int64_t index;
  const S *grad_output, *grad_sum, *input, *residual;
  S *grad_input, *dropped, *grad_residual;
};

// Over the rows so far; null where not wanted.
template <typename T>
struct ParameterSums {
  T *weight, *bias;
};

template <typename T>
inline void add_to(T* sums, int64_t i, int64_t count, const Vec<T>& value) {
  if (sums) store(load<T>(sums + i, count) + value, sums + i, count);
}

// Of a row: g is the gradient before the activation, times the weight.
struct GradientMeans {
  double g = 0, g_normalized = 0;
};

// Behind an activation, the row's g stay in `scratch`.
template <ActivationKind KIND, typename S, typename T = Compute<S>>
GradientMeans reduce_row(const LayerNormParams& p, const BackwardRow<S>& row, const Normalizer<T>& normalize,
                         const ParameterSums<T>& sums, T* scratch) {
  const T slope = static_cast<T>(p.activation.negative_slope);
  const T *weight = static_cast<const T*>(p.weight), *bias = static_cast<const T*>(p.bias);
  GradientMeans means;
  for (int64_t first = 0; first < p.channels; first += kSumChunk) {
    VectorSum<T> sum, sum_normalized;
    for_each_vector<T, kStreams>(std::min(kSumChunk, p.channels - first), [&](int stream, int64_t at, int64_t count) {
      const int64_t i = first + at;
      const Vec<T> normalized = normalize(load<T>(row.input + i, count));
      const Vec<T> w = load_or(weight, i, count, T(1));
      Vec<T> g = load<T>(row.grad_output + i, count);
      if constexpr (KIND != ActivationKind::None) {
        Vec<T> z = at::vec::fmadd(normalized, w, load_or(bias, i, count, T(0)));
        if (row.residual) z = z + load<T>(row.residual + i, count);
        g = activate_backward<KIND>(g, z, slope);
        store(g * w, scratch + i, count);
      }
      if (row.grad_residual) store(g, row.grad_residual + i, count);
      add_to(sums.weight, i, count, g * normalized);
      add_to(sums.bias, i, count, g);
      g = keep(g * w, count);
      sum[stream] = sum[stream] + g;
      sum_normalized[stream] = at::vec::fmadd(g, normalized, sum_normalized[stream]);
    });
    means.g += static_cast<double>(sum.total());
    means.g_normalized += static_cast<double>(sum_normalized.total());
  }
  const double n = static_cast<double>(p.channels);
  return {p.centered ? means.g / n : 0, means.g_normalized / n};
}

template <ActivationKind KIND, typename S, typename T = Compute<S>>
void backward_row(const LayerNormParams& p, const BackwardRow<S>& row, const ParameterSums<T>& sums, T* scratch,
                  Dropout<T>& dropout) {
  const Statistics<T> statistics = load_statistics<T>(p, row.index);
  const Normalizer<T> normalize(statistics);
  const GradientMeans means = reduce_row<KIND>(p, row, normalize, sums, scratch);
  if (!row.grad_input && !row.dropped) return;
  const T* weight = static_cast<const T*>(p.weight);
  const Vec<T> mean(static_cast<T>(means.g)), slope(static_cast<T>(-means.g_normalized)), rstd(statistics.rstd);
  for (int64_t first = 0; first < p.channels; first += kDropoutChunk) {
    const int64_t size = std::min(kDropoutChunk, p.channels - first);
    const bool drops = row.dropped && dropout.is_on();
    const T* factors = drops ? dropout.factors(row.index * p.channels + first, size) : nullptr;
    for_each_vector<T, kStreams>(size, [&](int, int64_t at, int64_t count) {
      const int64_t i = first + at;
      const Vec<T> normalized = normalize(load<T>(row.input + i, count));
      const Vec<T> g = KIND == ActivationKind::None
                           ? load<T>(row.grad_output + i, count) * load_or(weight, i, count, T(1))
                           : load<T>(scratch + i, count);
      // In this order g is rounded as it was when its mean was taken: a row of one number gets exactly 0.
      Vec<T> gradient = rstd * (at::vec::fmadd(normalized, slope, g) - mean);
      if (row.grad_sum) gradient = gradient + load<T>(row.grad_sum + i, count);
      if (row.grad_input) store(gradient, row.grad_input + i, count);
      if (row.dropped) store(gradient * load_or(factors, at, count, T(1)), row.dropped + i, count);
    });
  }
}

}  // namespace myvision::CPU_CAPABILITY
