// What the CPU kernels of batch_norm compute of a few lines at a time. ALONG: a line belongs to one channel. Otherwise
// it has one number of each channel. S is the type in memory, T the one computed in.
//
// Each loop reads all the tensors that it needs side by side: memory answers several streams at once much faster than
// one after the other. The activations that cost next to nothing are part of these loops, the others work on a buffer.
// Whether there is a residual is asked in the loops, which memory keeps waiting anyway: each way of its own would be
// compiled for every type, instruction set and direction.
#pragma once
#include "common/activation_vec.h"
#include "common/lines.h"
#include "common/moments.h"

namespace myvision::CPU_CAPABILITY::batch_norm {

// Each channel has these for result = (x - mean) * scale + shift + ...
template <typename T>
struct Affine {
  const T *mean, *scale, *shift;
  Affine operator+(int64_t channel) const { return {mean + channel, scale + channel, shift + channel}; }
};

// Gives the vector at number i of a line the numbers of its channels.
template <bool ALONG, typename T>
class OfChannels {
 public:
  OfChannels(const T* of_channel, int64_t line) : of_channel_(of_channel), of_line_(ALONG ? of_channel[line] : T(0)) {}
  Vec<T> at(int64_t i, int64_t count) const {
    if constexpr (ALONG) return of_line_;
    return load<T>(of_channel_ + i, count);
  }

 private:
  const T* of_channel_;
  Vec<T> of_line_;
};

// (x - mean) * scale + shift of a line
template <bool ALONG, typename S, typename T = Compute<S>>
class AffineLine {
 public:
  AffineLine(const S* x, const Affine<T>& channels, int64_t line)
      : x_(x), mean_(channels.mean, line), scale_(channels.scale, line), shift_(channels.shift, line) {}
  Vec<T> at(int64_t i, int64_t count) const {
    const Vec<T> distance = load<T>(x_ + i, count) - mean_.at(i, count);
    return at::vec::fmadd(distance, scale_.at(i, count), shift_.at(i, count));
  }

 private:
  const S* x_;
  OfChannels<ALONG, T> mean_, scale_, shift_;
};

// A line of what goes into the activation.
template <bool ALONG, typename S, typename T = Compute<S>>
class PreactivationLine {
 public:
  PreactivationLine(Lines<const S> x, Lines<const S> residual, const Affine<T>& channels, int64_t line)
      : normalised_(x[line], channels, line), residual_(residual[line]) {}
  Vec<T> at(int64_t i, int64_t count) const {
    const Vec<T> normalised = normalised_.at(i, count);
    return residual_ ? normalised + load<T>(residual_ + i, count) : normalised;
  }

 private:
  AffineLine<ALONG, S> normalised_;
  const S* residual_;  // or null
};

// out[i] = f(i, count) for every vector; two at a time, and both before either is stored.
template <typename T, typename Out, typename F>
[[gnu::always_inline]] inline void write_line(Out* out, int64_t n, const F& f) {
  constexpr int64_t kSize = Vec<T>::size();
  int64_t i = 0;
  for (; i + 2 * kSize <= n; i += 2 * kSize) {
    const Vec<T> first = f(i, kSize), second = f(i + kSize, kSize);
    store_pair(first, second, out + i);
  }
  for (; i < n; i += kSize) store(f(i, std::min(kSize, n - i)), out + i, n - i);
}

// A few lines of what normalisation reads: x, and the residual where there is one.
template <typename S, typename T = Compute<S>>
struct NormLines {
  Lines<const S> x, residual;
  Affine<T> channels;
  int64_t lines, n;
};

constexpr bool is_in_loops(ActivationKind kind) { return kind == ActivationKind::None || kind == ActivationKind::Relu; }

template <bool ALONG, bool RELU, typename S, typename Out>
[[gnu::flatten]] inline void write_preactivation(const NormLines<S>& from, Lines<Out> out) {
  using T = Compute<S>;
  constexpr ActivationKind kKind = RELU ? ActivationKind::Relu : ActivationKind::None;
  for (int64_t line = 0; line < from.lines; ++line) {
    const PreactivationLine<ALONG, S> z(from.x, from.residual, from.channels, line);
    write_line<T>(out[line], from.n, [&](int64_t i, int64_t count) { return activate<kKind>(z.at(i, count), T(0)); });
  }
}

// output = activation(z), for all activations but those that are part of other loops.
template <typename T, typename S>
void write_activated(const Activation& activation, Lines<const T> z, int64_t lines, int64_t n, Lines<S> output) {
  with_activation(activation.kind, [&](auto kind) {
    if constexpr (!is_in_loops(kind())) {
      for (int64_t line = 0; line < lines; ++line)
        write_line<T>(output[line], n, [&](int64_t i, int64_t count) {
          return activate<kind()>(load<T>(z[line] + i, count), static_cast<T>(activation.negative_slope));
        });
    }
  });
}

// `buffer` holds lines * n numbers.
template <bool ALONG, typename S, typename T = Compute<S>>
inline void write_output(const NormLines<S>& from, const Activation& activation, Lines<S> output, T* buffer) {
  if (activation.kind == ActivationKind::None) return write_preactivation<ALONG, false>(from, output);
  if (activation.kind == ActivationKind::Relu) return write_preactivation<ALONG, true>(from, output);
  const Lines<T> z{buffer, from.n};
  write_preactivation<ALONG, false>(from, z);
  write_activated(activation, as_const(z), from.lines, from.n, output);
}

// ------------------------------------------------------------------------------------------------ backward
// Gradients before the activation, line by line: where they are at hand, or from those after relu.
template <typename S>
struct GivenGradients {
  struct Line {
    const S* gradient;
    Vec<Compute<S>> at(int64_t i, int64_t count) const { return load<Compute<S>>(gradient + i, count); }
  };
  Lines<const S> gradient;
  Line operator()(int64_t line) const { return {gradient[line]}; }
};

template <bool ALONG, typename S, typename T = Compute<S>>
struct ReluGradients {
  struct Line {
    const S* after;
    PreactivationLine<ALONG, S> z;
    Vec<T> at(int64_t i, int64_t count) const {
      return activate_backward<ActivationKind::Relu>(load<T>(after + i, count), z.at(i, count), T(0));
    }
  };
  const NormLines<S>& from;
  Lines<const S> after;
  Line operator()(int64_t line) const { return {after[line], {from.x, from.residual, from.channels, line}}; }
};

// Turns z into the gradient before the activation, as write_activated has it.
template <typename T, typename S>
void undo_activation(const Activation& activation, Lines<const S> after, int64_t lines, int64_t n, Lines<T> z) {
  with_activation(activation.kind, [&](auto kind) {
    if constexpr (!is_in_loops(kind())) {
      for (int64_t line = 0; line < lines; ++line)
        write_line<T>(z[line], n, [&](int64_t i, int64_t count) {
          return activate_backward<kind()>(load<T>(after[line] + i, count), load<T>(z[line] + i, count),
                                           static_cast<T>(activation.negative_slope));
        });
    }
  });
}

// Calls body(gradients), which are one of the above. `buffer` holds lines * n numbers.
template <bool ALONG, typename S, typename Body, typename T = Compute<S>>
inline void with_gradient(const NormLines<S>& from, const Activation& activation, Lines<const S> after, T* buffer,
                          const Body& body) {
  if (activation.kind == ActivationKind::None) return body(GivenGradients<S>{after});
  if (activation.kind == ActivationKind::Relu) return body(ReluGradients<ALONG, S>{from, after});
  const Lines<T> z{buffer, from.n};
  write_preactivation<ALONG, false>(from, z);
  undo_activation(activation, after, from.lines, from.n, z);
  body(GivenGradients<T>{as_const(z)});
}

// A channel's sums of the gradient before the activation, and of gradient * (x - mean).
struct Sums {
  double gradient = 0, product = 0;
  void add(const Sums& other) {
    gradient += other.gradient;
    product += other.product;
  }
};

// Returns the sums of a line of one channel. Here and below the gradient is also written to `copy`, unless that is
// null.
template <typename Gradient, typename S, typename T = Compute<S>>
[[gnu::flatten]] inline Sums sums_along(const Gradient& gradient, const S* x, T mean, int64_t n, S* copy) {
  VectorSum<T> gradients, products;
  for_each_vector<T, VectorSum<T>::kStreams>(n, [&](int stream, int64_t i, int64_t count) {
    const Vec<T> g = gradient.at(i, count);
    if (copy != nullptr) store(g, copy + i, count);
    gradients[stream] = gradients[stream] + g;
    products[stream] = at::vec::fmadd(g, load<T>(x + i, count) - Vec<T>(mean), products[stream]);
  });
  return {static_cast<double>(gradients.total()), static_cast<double>(products.total())};
}

// Adds up the same sums of columns, from lines that have a number of each.
template <typename T>
class ColumnSums {
 public:
  static constexpr int64_t kColumns = ColumnMoments<T>::kColumns;  // at most

  ColumnSums(const T* mean, int64_t columns, Sums* sums) : mean_(mean), columns_(columns), sums_(sums) { clear(); }

  template <typename Gradients, typename S>
  void add(const Gradients& gradients, Lines<const S> x, Lines<S> copy, int64_t lines) {
    int64_t line = 0;
    for (; line + 4 <= lines; line += 4) add_lines<4>(gradients, x, copy, line);
    for (; line < lines; ++line) add_lines<1>(gradients, x, copy, line);
  }

  void finish() {
    for (int64_t i = 0; i < columns_; ++i)
      sums_[i].add({static_cast<double>(gradients_[i]), static_cast<double>(products_[i])});
    clear();
  }

 private:
  static constexpr int64_t kMostLines = 64;  // summed up in T

  // All lines are loaded before any is stored: what they have in common then stays in registers.
  template <int LINES, typename Gradients, typename S>
  [[gnu::flatten]] void add_lines(const Gradients& gradients, Lines<const S> x, Lines<S> copy, int64_t first) {
    for_each_vector<T, 1>(columns_, [&](int, int64_t i, int64_t count) {
      const Vec<T> mean = load<T>(mean_ + i, count);
      Vec<T> sum = load<T>(gradients_ + i), products = load<T>(products_ + i), g[LINES];
#pragma GCC unroll 4
      for (int line = 0; line < LINES; ++line) {
        g[line] = gradients(first + line).at(i, count);
        sum = sum + g[line];
        products = at::vec::fmadd(g[line], load<T>(x[first + line] + i, count) - mean, products);
      }
      store(sum, gradients_ + i);
      store(products, products_ + i);
      if (copy.data == nullptr) return;
#pragma GCC unroll 4
      for (int line = 0; line < LINES; ++line) store(g[line], copy[first + line] + i, count);
    });
    pending_ += LINES;
    if (pending_ >= kMostLines) finish();
  }

  void clear() {
    for (int64_t i = 0; i < columns_; i += Vec<T>::size()) {
      store(Vec<T>(T(0)), gradients_ + i);
      store(Vec<T>(T(0)), products_ + i);
    }
    pending_ = 0;
  }

  const T* mean_;
  int64_t columns_, pending_ = 0;
  Sums* sums_;
  // Whole vectors: what stands after the last column is never read.
  alignas(64) T gradients_[kColumns];
  alignas(64) T products_[kColumns];
};

// out = (x - mean) * scale + shift + gradient * factor; without x only the last term
template <bool ALONG, typename Gradients, typename S, typename T = Compute<S>>
[[gnu::flatten]] inline void write_input_gradient(const Gradients& gradients, Lines<const S> x,
                                                  const Affine<T>& channels, const T* factor, Lines<S> out,
                                                  int64_t lines, int64_t n) {
  const bool has_x = x.data != nullptr;
  for (int64_t line = 0; line < lines; ++line) {
    const auto gradient = gradients(line);
    const AffineLine<ALONG, S> normalised(x[line], channels, line);
    const OfChannels<ALONG, T> factors(factor, line);
    write_line<T>(out[line], n, [&](int64_t i, int64_t count) {
      const Vec<T> g = gradient.at(i, count), f = factors.at(i, count);
      return has_x ? at::vec::fmadd(g, f, normalised.at(i, count)) : g * f;
    });
  }
}

}  // namespace myvision::CPU_CAPABILITY::batch_norm
