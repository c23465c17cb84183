// What the CPU kernels of batch_norm compute on a few lines in L1. Along: a line belongs to one channel. Across: a line
// has one number of each channel.
#pragma once
#include "common/activation_vec.h"
#include "common/lines.h"
#include "common/moments.h"

namespace myvision::CPU_CAPABILITY {

// Of each channel: out = (x - mean) * scale + shift + other * factor
template <typename T>
struct Affine {
  const T *mean, *scale, *shift, *factor;
  Affine operator+(int64_t channel) const {
    return {mean + channel, scale + channel, shift + channel, factor + channel};
  }
};

// A constant of each line, or of each number of a line.
template <bool ALONG, typename T>
class Constant {
 public:
  Constant(const T* of_channel, int64_t line) : of_channel_(of_channel), of_line_(ALONG ? of_channel[line] : T(0)) {}
  Vec<T> at(int64_t i, int64_t count) const {
    if constexpr (ALONG) return of_line_;
    return load<T>(of_channel_ + i, count);
  }

 private:
  const T* of_channel_;
  Vec<T> of_line_;
};

template <bool ALONG, bool X, bool OTHER, typename T>
inline void affine_lines(Lines<const T> x, Lines<const T> other, const Affine<T>& channel, Lines<T> out, int64_t lines,
                         int64_t n) {
  for (int64_t line = 0; line < lines; ++line) {
    const Constant<ALONG, T> mean(channel.mean, line), scale(channel.scale, line), shift(channel.shift, line),
        factor(channel.factor, line);
    const T *x_line = x[line], *other_line = other[line];
    T* out_line = out[line];
    for_each_vector<T, 4>(n, [&](int, int64_t i, int64_t count) {
      Vec<T> result = shift.at(i, count);
      if constexpr (X)
        result = at::vec::fmadd(load<T>(x_line + i, count) - mean.at(i, count), scale.at(i, count), result);
      if constexpr (OTHER) result = at::vec::fmadd(load<T>(other_line + i, count), factor.at(i, count), result);
      store(result, out_line + i, count);
    });
  }
}

template <typename T>
inline void affine(bool along, Lines<const T> x, Lines<const T> other, const Affine<T>& channel, Lines<T> out,
                   int64_t lines, int64_t n) {
  const auto run = [&]<bool ALONG>() {
    if (x.data == nullptr) return affine_lines<ALONG, false, true>(x, other, channel, out, lines, n);
    if (other.data == nullptr) return affine_lines<ALONG, true, false>(x, other, channel, out, lines, n);
    affine_lines<ALONG, true, true>(x, other, channel, out, lines, n);
  };
  along ? run.template operator()<true>() : run.template operator()<false>();
}

// z = activation(z)
template <typename T>
inline void activate_lines(const Activation& activation, Lines<T> z, int64_t lines, int64_t n) {
  if (activation.kind == ActivationKind::None) return;
  const T negative_slope = static_cast<T>(activation.negative_slope);
  with_activation(activation.kind, [&](auto kind) {
    for (int64_t line = 0; line < lines; ++line) {
      T* at = z[line];
      for_each_vector<T, 4>(n, [&](int, int64_t i, int64_t count) {
        store(activate<kind()>(load<T>(at + i, count), negative_slope), at + i, count);
      });
    }
  });
}

// out = gradient * activation'(z)
template <typename T>
inline void activate_lines_backward(const Activation& activation, Lines<const T> gradient, Lines<const T> z,
                                    Lines<T> out, int64_t lines, int64_t n) {
  const T negative_slope = static_cast<T>(activation.negative_slope);
  with_activation(activation.kind, [&](auto kind) {
    for (int64_t line = 0; line < lines; ++line) {
      const T *gradient_line = gradient[line], *z_line = z[line];
      T* out_line = out[line];
      for_each_vector<T, 4>(n, [&](int, int64_t i, int64_t count) {
        const Vec<T> before = load<T>(gradient_line + i, count);
        store(activate_backward<kind()>(before, load<T>(z_line + i, count), negative_slope), out_line + i, count);
      });
    }
  });
}

// Of a channel: of the gradient, and of gradient * (x - mean).
struct Sums {
  double gradient = 0, product = 0;
  void add(const Sums& other) {
    gradient += other.gradient;
    product += other.product;
  }
};

template <typename T>
inline Sums sums_along(const T* gradient, const T* x, T mean, int64_t n) {
  VectorSum<T> gradients, products;
  for_each_vector<T, VectorSum<T>::kStreams>(n, [&](int stream, int64_t i, int64_t count) {
    const Vec<T> g = load<T>(gradient + i, count);
    gradients[stream] = gradients[stream] + g;
    const Vec<T> distance = keep(load<T>(x + i, count) - Vec<T>(mean), count);
    products[stream] = at::vec::fmadd(g, distance, products[stream]);
  });
  return {static_cast<double>(gradients.total()), static_cast<double>(products.total())};
}

// The same of columns.
template <typename T>
class ColumnSums {
 public:
  static constexpr int64_t kColumns = ColumnMoments<T>::kColumns;  // at most

  ColumnSums(const T* mean, int64_t columns, Sums* sums) : mean_(mean), columns_(columns), sums_(sums) { clear(); }

  void add(Lines<const T> gradient, Lines<const T> x, int64_t lines) {
    int64_t line = 0;
    for (; line + 4 <= lines; line += 4) add_lines<4>(gradient[line], gradient.pitch, x[line], x.pitch);
    for (; line < lines; ++line) add_lines<1>(gradient[line], gradient.pitch, x[line], x.pitch);
    pending_ += lines;
    if (pending_ >= kMostLines) finish();
  }

  void finish() {
    for (int64_t i = 0; i < columns_; ++i)
      sums_[i].add({static_cast<double>(gradients_[i]), static_cast<double>(products_[i])});
    clear();
  }

 private:
  static constexpr int64_t kMostLines = 64;  // summed up in T

  void clear() {
    for (int64_t i = 0; i < columns_; ++i) gradients_[i] = products_[i] = 0;
    pending_ = 0;
  }

  template <int LINES>
  void add_lines(const T* gradient, int64_t gradient_pitch, const T* x, int64_t x_pitch) {
    for_each_vector<T, 1>(columns_, [&](int, int64_t i, int64_t count) {
      const Vec<T> mean = load<T>(mean_ + i, count);
      Vec<T> gradients = load<T>(gradients_ + i, count), products = load<T>(products_ + i, count);
#pragma GCC unroll 4
      for (int line = 0; line < LINES; ++line) {
        const Vec<T> g = load<T>(gradient + line * gradient_pitch + i, count);
        gradients = gradients + g;
        products = at::vec::fmadd(g, load<T>(x + line * x_pitch + i, count) - mean, products);
      }
      store(gradients, gradients_ + i, count);
      store(products, products_ + i, count);
    });
  }

  const T* mean_;
  int64_t columns_, pending_ = 0;
  Sums* sums_;
  alignas(64) T gradients_[kColumns];
  alignas(64) T products_[kColumns];
};

}  // namespace myvision::CPU_CAPABILITY
