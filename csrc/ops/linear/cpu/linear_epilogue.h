// What stands around linear's products: activation, dropout and residual behind the one of forward, and their
// derivatives before those of backward. Compiled once per instruction set.
#pragma once
#include "common/activation_vec.h"
#include "common/dropout_vec.h"
#include "ops/linear/linear.h"

namespace myvision::CPU_CAPABILITY::linear {

// Numbers of a part of a row, at most Dropout<T>::kChunk.
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

// output = dropout(activation(product + bias)) + residual.
template <ActivationKind KIND, typename S, typename T = Compute<S>>
class Epilogue {
 public:
  explicit Epilogue(const LinearParams& p) : p_(p), dropout_(p.dropout_p, p.seed) {}

  // Product has numbers of type P.
  template <typename P>
  void operator()(const Span& span, const P* product) {
    const int64_t element = span.row * p_.outputs + span.column;
    const S* const bias = p_.bias ? static_cast<const S*>(p_.bias) + span.column : nullptr;
    const S* const residual = p_.residual.data ? read<S>(p_.residual, span, buffer_) : nullptr;
    const T* const factors = dropout_.is_on() ? dropout_.factors(element, span.count) : nullptr;
    S* const preactivation = p_.preactivation ? static_cast<S*>(p_.preactivation) + element : nullptr;
    finish(product, span.count, bias, residual, factors, preactivation, static_cast<S*>(p_.output) + element,
           static_cast<T>(p_.activation.negative_slope));
  }

 private:
  template <typename P>
  static void finish(const P* product, int64_t count, const S* bias, const S* residual, const T* factors,
                     S* preactivation, S* output, T negative_slope) {
    for (int64_t i = 0; i < count; i += Vec<T>::size()) {
      const int64_t n = count - i;
      Vec<T> z = load<T>(product + i, n);
      if (bias) z = z + load<T>(bias + i, n);
      if (preactivation) store(z, preactivation + i, n);
      Vec<T> y = activate<KIND>(z, negative_slope);
      if (factors) y = y * load<T>(factors + i, n);
      if (residual) y = y + load<T>(residual + i, n);
      store(y, output + i, n);
    }
  }

  const LinearParams& p_;
  Dropout<T> dropout_;
  S buffer_[Dropout<T>::kChunk];
};

// The gradient of the preactivation, from that of the output.
template <ActivationKind KIND, typename S, typename T = Compute<S>>
class EpilogueBackward {
 public:
  EpilogueBackward(const LinearParams& p, const Matrix& output)
      : p_(p), output_(output), dropout_(p.dropout_p, p.seed) {}

  template <typename To>
  void operator()(const Span& span, To* to) {
    const int64_t element = span.row * p_.outputs + span.column;
    const S* const gradient = read<S>(output_, span, buffer_);
    const T* const factors = dropout_.is_on() ? dropout_.factors(element, span.count) : nullptr;
    undo(gradient, span.count, static_cast<const S*>(p_.preactivation) + element, factors, to,
         static_cast<T>(p_.activation.negative_slope));
  }

 private:
  template <typename To>
  static void undo(const S* gradient, int64_t count, const S* preactivation, const T* factors, To* to,
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
  S buffer_[Dropout<T>::kChunk];
};

}  // namespace myvision::CPU_CAPABILITY::linear
