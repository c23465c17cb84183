// What stands around linear's products: activation, dropout and residual behind the one of forward, and their
// derivatives before those of backward. Compiled once per instruction set.
#pragma once
#include "common/activation_vec.h"
#include "common/dropout_vec.h"
#include "ops/linear/linear.h"

namespace myvision::CPU_CAPABILITY::linear {

inline constexpr int64_t kSpan = Dropout<float>::kChunk;

// Part of a row, of at most kSpan numbers.
struct Span {
  int64_t row, column, count;
};

template <typename S>
inline const S* row_of(const Matrix& matrix, const Span& span) {
  return static_cast<const S*>(matrix.data) + span.row * matrix.row + span.column * matrix.column;
}

// A span of a matrix, side by side, in the buffer unless it lies so.
template <typename S>
inline const S* read(const Matrix& matrix, const Span& span, S* buffer) {
  const S* const data = row_of<S>(matrix, span);
  if (matrix.column == 1) return data;
  for (int64_t i = 0; i < span.count; ++i) buffer[i] = data[i * matrix.column];
  return buffer;
}

// Whether a matrix of so many bytes, whose rows follow one another, is written past the caches a panel of a product at
// a time: one that does not stay in them, in whole lines.
template <typename S>
inline bool is_streamed(const void* data, int64_t rows, int64_t columns) {
  constexpr int64_t kLine = 64, kLeastBytes = int64_t(16) << 20;
  const int64_t pitch = columns * static_cast<int64_t>(sizeof(S));
  return 2 * Vec<Compute<S>>::size() * sizeof(S) % kLine == 0 && pitch % kLine == 0 && rows * pitch >= kLeastBytes &&
         reinterpret_cast<std::uintptr_t>(data) % kLine == 0;
}

// output = dropout(activation(product + bias)) + residual.
template <ActivationKind KIND, typename S, typename T = Compute<S>>
class Epilogue {
  static constexpr int64_t kPair = 2 * Vec<T>::size();

 public:
  explicit Epilogue(const LinearParams& p)
      : p_(p), dropout_(p.dropout_p, p.seed), streams_(is_streamed<S>(p.output, p.rows, p.outputs)) {}

  [[gnu::flatten]] void operator()(const Span& span, const T* product) {
    const int64_t element = span.row * p_.outputs + span.column;
    const Sources from{p_.bias ? static_cast<const S*>(p_.bias) + span.column : nullptr,
                       p_.residual.data ? read<S>(p_.residual, span, buffer_) : nullptr,
                       dropout_.is_on() ? dropout_.factors(element, span.count) : nullptr,
                       static_cast<T>(p_.activation.negative_slope)};
    S* const preactivation = p_.preactivation ? static_cast<S*>(p_.preactivation) + element : nullptr;
    S* const output = static_cast<S*>(p_.output) + element;
    if (span.count == kPair) return finish_pair(from, product, preactivation, output);
    for (int64_t i = 0; i < span.count; i += Vec<T>::size()) {
      const int64_t n = span.count - i;
      const Vec<T> z = from.argument(load<T>(product + i, n), i, n);
      if (preactivation) store(z, preactivation + i, n);
      store(from.result(z, i, n), output + i, n);
    }
  }

 private:
  // What stands beside a span of the product; null where there is none.
  struct Sources {
    const S *bias, *residual;
    const T* factors;
    T negative_slope;

    Vec<T> argument(const Vec<T>& product, int64_t i, int64_t n) const {
      return bias ? product + load<T>(bias + i, n) : product;
    }
    Vec<T> result(const Vec<T>& z, int64_t i, int64_t n) const {
      Vec<T> y = activate<KIND>(z, negative_slope);
      if (factors) y = y * load<T>(factors + i, n);
      return residual ? y + load<T>(residual + i, n) : y;
    }
  };

  void finish_pair(const Sources& from, const T* product, S* preactivation, S* output) const {
    constexpr int64_t kSize = Vec<T>::size();
    const Vec<T> z0 = from.argument(load<T>(product), 0, kSize),
                 z1 = from.argument(load<T>(product + kSize), kSize, kSize);
    if (preactivation) store_pair(z0, z1, preactivation);
    const Vec<T> y0 = from.result(z0, 0, kSize), y1 = from.result(z1, kSize, kSize);
    if (streams_)
      stream_pair(y0, y1, output);
    else
      store_pair(y0, y1, output);
  }

  const LinearParams& p_;
  Dropout<T> dropout_;
  bool streams_;
  S buffer_[kSpan];
};

// The gradient of the preactivation, from that of the output.
template <ActivationKind KIND, typename S, typename T = Compute<S>>
class EpilogueBackward {
 public:
  EpilogueBackward(const LinearParams& p, const Matrix& output)
      : p_(p), output_(output), dropout_(p.dropout_p, p.seed) {}

  void operator()(const Span& span, T* to) {
    const int64_t element = span.row * p_.outputs + span.column;
    const S* const gradient = read<S>(output_, span, buffer_);
    const T* const factors = dropout_.is_on() ? dropout_.factors(element, span.count) : nullptr;
    undo(gradient, span.count, static_cast<const S*>(p_.preactivation) + element, factors, to,
         static_cast<T>(p_.activation.negative_slope));
  }

 private:
  [[gnu::flatten]] static void undo(const S* gradient, int64_t count, const S* preactivation, const T* factors, T* to,
                                    T negative_slope) {
    for (int64_t i = 0; i < count; i += Vec<T>::size()) {
      const int64_t n = count - i;
      Vec<T> g = load<T>(gradient + i, n);
      if (factors) g = g * load<T>(factors + i, n);
      if constexpr (KIND != ActivationKind::None)
        g = activate_backward<KIND>(g, load<T>(preactivation + i, n), negative_slope);
      store(g, to + i, n);
    }
  }

  const LinearParams& p_;
  const Matrix& output_;
  Dropout<T> dropout_;
  S buffer_[kSpan];
};

}  // namespace myvision::CPU_CAPABILITY::linear
