// linear on the CPU.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "common/parallel.h"
#include "common/philox.h"
#include "common/vec_io.h"
#include "ops/linear/linear.h"

namespace myvision::CPU_CAPABILITY::linear {
namespace {

template <typename S, typename T = Compute<S>>
T at(const Matrix& m, int64_t i, int64_t j) {
  return static_cast<T>(static_cast<const S*>(m.data)[i * m.row + j * m.column]);
}

template <typename T>
T factor(const LinearParams& p, int64_t element) {
  if (p.dropout_p == 0) return T(1);
  const PhiloxWords words = philox(static_cast<uint64_t>(*p.seed), static_cast<uint64_t>(element) / 4);
  const bool drop = word_of(words, element) < dropout_threshold(p.dropout_p);
  return drop || p.dropout_p == 1 ? T(0) : static_cast<T>(1 / (1 - p.dropout_p));
}

template <typename S, typename T = Compute<S>>
void finish(const LinearParams& p, int64_t i, int64_t j, T z) {
  const int64_t e = i * p.outputs + j;
  if (p.bias) z += static_cast<T>(static_cast<const S*>(p.bias)[j]);
  if (p.preactivation) static_cast<S*>(p.preactivation)[e] = static_cast<S>(z);
  T y = activate(p.activation, z) * factor<T>(p, e);
  if (p.residual.data) y += at<S>(p.residual, i, j);
  static_cast<S*>(p.output)[e] = static_cast<S>(y);
}

template <typename S, typename T = Compute<S>>
T before(const LinearParams& p, const Matrix& output, int64_t i, int64_t j) {
  const int64_t e = i * p.outputs + j;
  const T g = at<S>(output, i, j) * factor<T>(p, e);
  return p.preactivation ? g * activation_derivative(p.activation, static_cast<T>(static_cast<const S*>(p.preactivation)[e])) : g;
}

}  // namespace

void forward(const LinearParams& p) {
  with_type(p.dtype, [&]<typename S>(const S*) {
    for (int64_t i = 0; i < p.rows; ++i)
      for (int64_t j = 0; j < p.outputs; ++j) {
        Compute<S> z = 0;
        for (int64_t k = 0; k < p.features; ++k) z += at<S>(p.input, i, k) * at<S>(p.weight, j, k);
        finish<S>(p, i, j, z);
      }
  });
}

void epilogue(const LinearParams& p, const Matrix& product) {
  with_type(p.dtype, [&]<typename S>(const S*) {
    for (int64_t i = 0; i < p.rows; ++i)
      for (int64_t j = 0; j < p.outputs; ++j) finish<S>(p, i, j, at<S>(product, i, j));
  });
}

void epilogue_backward(const LinearParams& p, const Matrix& output, void* const& gradient) {
  with_type(p.dtype, [&]<typename S>(const S*) {
    for (int64_t i = 0; i < p.rows; ++i)
      for (int64_t j = 0; j < p.outputs; ++j)
        static_cast<S*>(gradient)[i * p.outputs + j] = static_cast<S>(before<S>(p, output, i, j));
  });
}

void backward(const LinearParams& p, const LinearGradients& g) {
  with_type(p.dtype, [&]<typename S>(const S*) {
    using T = Compute<S>;
    for (int64_t i = 0; g.input && i < p.rows; ++i)
      for (int64_t k = 0; k < p.features; ++k) {
        T sum = 0;
        for (int64_t j = 0; j < p.outputs; ++j) sum += before<S>(p, g.output, i, j) * at<S>(p.weight, j, k);
        static_cast<S*>(g.input)[i * p.features + k] = static_cast<S>(sum);
      }
    for (int64_t j = 0; j < p.outputs; ++j) {
      T bias = 0;
      for (int64_t i = 0; i < p.rows; ++i) bias += before<S>(p, g.output, i, j);
      if (g.bias) static_cast<S*>(g.bias)[j] = static_cast<S>(bias);
      for (int64_t k = 0; g.weight && k < p.features; ++k) {
        T sum = 0;
        for (int64_t i = 0; i < p.rows; ++i) sum += before<S>(p, g.output, i, j) * at<S>(p.input, i, k);
        static_cast<S*>(g.weight)[j * p.features + k] = static_cast<S>(sum);
      }
    }
  });
}

}  // namespace myvision::CPU_CAPABILITY::linear
