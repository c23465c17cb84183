// The steps of layer_norm on a row, forward and backward, in memory of type S: half types are computed in float. A row
// is read in several steps, after the first from L1 or L2. Compiled once per instruction set.
#pragma once
#include <algorithm>

#include "common/activation_vec.h"
#include "common/dropout_vec.h"
#include "common/moments.h"
#include "ops/layer_norm/layer_norm.h"

namespace myvision::CPU_CAPABILITY::layer_norm {

inline constexpr int kStreams = 4;  // vectors that are worked on side by side; those behind activations one by one
inline constexpr int64_t kSumChunk = 4096;  // elements that are added up in T before they are in double

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
  const Vec<T>& rstd() const { return rstd_; }

 private:
  Vec<T> mean_, rstd_, shift_;
};

// All rows have these in common.
template <typename T>
struct RowConstants {
  int64_t n;
  const T *weight, *bias;
  T negative_slope;
};

// ------------------------------------------------------------------------------------------------ forward
// sum = input * factors + addend
template <bool DROPS, typename S, typename T = Compute<S>>
[[gnu::flatten]] inline void add(const S* input, const T* factors, const S* addend, int64_t n, S* sum) {
  for_each_vector<T, kStreams>(n, [&](int, int64_t i, int64_t count) {
    const Vec<T> x = load<T>(input + i, count), y = load<T>(addend + i, count);
    store(DROPS ? at::vec::fmadd(x, load<T>(factors + i, count), y) : x + y, sum + i, count);
  });
}

template <typename Half>
[[gnu::flatten]] void round_row(float* x, int64_t n) {
  for_each_vector<float, 1>(n, [&](int, int64_t i, int64_t count) {
    Half rounded[Vec<float>::size()];
    store(load<float>(x + i, count), rounded, count);
    store(load<float>(rounded, count), x + i, count);
  });
}

// sum = dropout(input) + addend, of a row whose first element has this number; as the sum's own type holds it, in a
// buffer too.
template <typename S, typename T = Compute<S>>
void add_row(Dtype dtype, const S* input, const S* addend, int64_t first, int64_t n, S* sum, Dropout<T>& dropout) {
  if (!dropout.is_on()) {
    add<false>(input, static_cast<const T*>(nullptr), addend, n, sum);
  } else {
    for (int64_t i = 0; i < n; i += Dropout<T>::kChunk) {
      const int64_t count = std::min(Dropout<T>::kChunk, n - i);
      add<true>(input + i, dropout.factors(first + i, count), addend + i, count, sum + i);
    }
  }
  if constexpr (std::is_same_v<S, float>) {
    if (dtype == Dtype::Float16) round_row<c10::Half>(sum, n);
    if (dtype == Dtype::BFloat16) round_row<c10::BFloat16>(sum, n);
  }
}

// output = activation(normalized(x) * weight + bias + residual); residual may be null.
template <ActivationKind KIND, typename S, typename T = Compute<S>>
[[gnu::flatten]] void finish_row(const RowConstants<T> row, const Statistics<T> statistics, const S* x,
                                 const S* residual, S* output) {
  const Normalizer<T> normalize(statistics);
  for_each_vector<T, KIND == ActivationKind::None ? kStreams : 1>(row.n, [&](int, int64_t i, int64_t count) {
    Vec<T> z =
        at::vec::fmadd(normalize(load<T>(x + i, count)), load<T>(row.weight + i, count), load<T>(row.bias + i, count));
    if (residual) z = z + load<T>(residual + i, count);
    store(activate<KIND>(z, row.negative_slope), output + i, count);
  });
}

// ------------------------------------------------------------------------------------------------ backward
// g, the gradient before the activation, which is given the same as in finish_row.
template <ActivationKind KIND, typename S, typename T = Compute<S>>
[[gnu::flatten]] void undo_activation(const RowConstants<T> row, const Statistics<T> statistics, const S* x,
                                      const S* residual, const S* grad_output, T* g) {
  const Normalizer<T> normalize(statistics);
  for_each_vector<T, 1>(row.n, [&](int, int64_t i, int64_t count) {
    Vec<T> z =
        at::vec::fmadd(normalize(load<T>(x + i, count)), load<T>(row.weight + i, count), load<T>(row.bias + i, count));
    if (residual) z = z + load<T>(residual + i, count);
    store(activate_backward<KIND>(load<T>(grad_output + i, count), z, row.negative_slope), g + i, count);
  });
}

// The means over a row of g * weight, and of that times the normalised row.
template <typename T>
struct GradientMeans {
  T g, g_normalized;
};

template <typename G, typename S, typename T = Compute<S>>
[[gnu::flatten]] GradientMeans<T> gradient_means(const RowConstants<T> row, bool centered,
                                                 const Statistics<T> statistics, const S* x, const G* g) {
  const Normalizer<T> normalize(statistics);
  double sum = 0, sum_normalized = 0;
  for (int64_t first = 0; first < row.n; first += kSumChunk) {
    VectorSum<T> sums, sums_normalized;
    for_each_vector<T, kStreams>(std::min(kSumChunk, row.n - first), [&](int stream, int64_t at, int64_t count) {
      const int64_t i = first + at;
      const Vec<T> gradient = load<T>(g + i, count) * load<T>(row.weight + i, count);
      sums[stream] = sums[stream] + gradient;
      sums_normalized[stream] = at::vec::fmadd(gradient, normalize(load<T>(x + i, count)), sums_normalized[stream]);
    });
    sum += static_cast<double>(sums.total());
    sum_normalized += static_cast<double>(sums_normalized.total());
  }
  const double n = static_cast<double>(row.n);
  return {centered ? static_cast<T>(sum / n) : T(0), static_cast<T>(sum_normalized / n)};
}

// The gradient of x: rstd * (g * weight - mean - normalized * mean of normalized). Of the step between blocks there is
// more to it: grad_sum is added, where it is not null, and `dropped` gets the result times the factors of dropout,
// where these are not null; then grad_input may be null.
template <bool BETWEEN_BLOCKS, typename G, typename S, typename T = Compute<S>>
[[gnu::flatten]] void gradient_of_input(const RowConstants<T> row, const Statistics<T> statistics,
                                        const GradientMeans<T> means, const S* x, const G* g, const S* grad_sum,
                                        S* grad_input, const T* factors, S* dropped) {
  const Normalizer<T> normalize(statistics);
  const Vec<T> mean(means.g), slope(-means.g_normalized);
  for_each_vector<T, BETWEEN_BLOCKS ? 1 : kStreams>(row.n, [&](int, int64_t i, int64_t count) {
    const Vec<T> gradient = load<T>(g + i, count) * load<T>(row.weight + i, count);
    // In this order the product is rounded as it was when its mean was taken: a row of one number gets exactly 0.
    Vec<T> result = normalize.rstd() * (at::vec::fmadd(normalize(load<T>(x + i, count)), slope, gradient) - mean);
    if (BETWEEN_BLOCKS && grad_sum) result = result + load<T>(grad_sum + i, count);
    if (!BETWEEN_BLOCKS || grad_input) store(result, grad_input + i, count);
    if (BETWEEN_BLOCKS && factors) store(result * load<T>(factors + i, count), dropped + i, count);
  });
}

// Does so for a row whose first element has the number `first`; what is null is not there, or not wanted.
template <typename G, typename S, typename T = Compute<S>>
void gradients_of_input(const RowConstants<T>& row, const Statistics<T>& statistics, const GradientMeans<T>& means,
                        const S* x, const G* g, const S* grad_sum, S* grad_input, S* dropped, int64_t first,
                        Dropout<T>& dropout) {
  const T* const no_factors = nullptr;
  if (!dropped) {
    const auto call = grad_sum ? &gradient_of_input<true, G, S> : &gradient_of_input<false, G, S>;
    return call(row, statistics, means, x, g, grad_sum, grad_input, no_factors, dropped);
  }
  for (int64_t i = 0; i < row.n; i += Dropout<T>::kChunk) {
    const int64_t count = std::min(Dropout<T>::kChunk, row.n - i);
    gradient_of_input<true>({count, row.weight + i, row.bias + i, row.negative_slope}, statistics, means, x + i, g + i,
                            grad_sum ? grad_sum + i : nullptr, grad_input ? grad_input + i : nullptr,
                            dropout.factors(first + i, count), dropped + i);
  }
}

// Sums over some rows that make the gradients of weight and bias; null where not wanted.
template <typename T>
struct ParameterSums {
  T *weight, *bias;
};

// Adds what ROWS rows give to the sums.
template <int ROWS, bool WEIGHT, bool BIAS, typename G, typename S, typename T = Compute<S>>
[[gnu::flatten]] void add_to_sums(int64_t n, const Statistics<T>* statistics, const S* const* x, const G* const* g,
                                  const ParameterSums<T> sums) {
  // Copies, as far as the compiler knows stores may change the arguments.
  Statistics<T> row_statistics[ROWS];
  const S* row_x[ROWS];
  const G* row_g[ROWS];
  for (int row = 0; row < ROWS; ++row) {
    row_statistics[row] = statistics[row];
    row_x[row] = x[row];
    row_g[row] = g[row];
  }
  for_each_vector<T, 1>(n, [&](int, int64_t i, int64_t count) {
    Vec<T> weight(T(0)), bias(T(0));  // of these rows by themselves, which rounds less
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; ++row) {
      const Vec<T> gradient = load<T>(row_g[row] + i, count);
      if constexpr (WEIGHT) {
        const Normalizer<T> normalize(row_statistics[row]);
        weight = at::vec::fmadd(gradient, normalize(load<T>(row_x[row] + i, count)), weight);
      }
      if constexpr (BIAS) bias = bias + gradient;
    }
    if constexpr (WEIGHT) store(load<T>(sums.weight + i, count) + weight, sums.weight + i, count);
    if constexpr (BIAS) store(load<T>(sums.bias + i, count) + bias, sums.bias + i, count);
  });
}

template <int ROWS, typename G, typename S, typename T = Compute<S>>
inline void add_to_sums(int64_t n, const Statistics<T>* statistics, const S* const* x, const G* const* g,
                        const ParameterSums<T>& sums) {
  if (sums.weight && sums.bias) return add_to_sums<ROWS, true, true>(n, statistics, x, g, sums);
  if (sums.weight) return add_to_sums<ROWS, true, false>(n, statistics, x, g, sums);
  if (sums.bias) add_to_sums<ROWS, false, true>(n, statistics, x, g, sums);
}

}  // namespace myvision::CPU_CAPABILITY::layer_norm
