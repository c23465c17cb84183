// Functions of vectors, for the CPU kernels: of floats in vectors, of doubles lane by lane. Compiled once per
// instruction set.
#pragma once
#include <cmath>
#include <cstdint>

#include "common/vec_io.h"

namespace myvision::CPU_CAPABILITY {

// The polynomial coefficients[0] + x * coefficients[1] + ...
template <int N>
inline Vec<float> polynomial(const Vec<float>& x, const float (&coefficients)[N]) {
  Vec<float> sum(coefficients[N - 1]);
#pragma GCC unroll 16
  for (int i = N - 2; i >= 0; --i) sum = at::vec::fmadd(sum, x, Vec<float>(coefficients[i]));
  return sum;
}

// e^x to 1 ulp; below 2^-125 it is 0.
inline Vec<float> exp(const Vec<float>& x) {
  using at::vec::fmadd;
  // e^x = 2^(n - 1) * 2 e^r. Adding 1.5 * 2^23 + 126 rounds to a whole n and leaves n + 126, the exponent of 2^(n - 1),
  // in the lowest bits. The clamped x reach 0 and infinity.
  const Vec<float> shift(12582912.0f + 126.0f);
  const Vec<float> clamped = at::vec::clamp(x, Vec<float>(-87.5f), Vec<float>(89.0f));
  const Vec<float> shifted = fmadd(clamped, Vec<float>(1.44269504f), shift);
  const Vec<float> n = shifted - shift;
  const Vec<float> scale = at::vec::cast<float>(at::vec::cast<int32_t>(shifted) << Vec<int32_t>(23));
  // r = x - n * log(2), the logarithm in two parts, of which the first has few bits: its product is exact.
  const Vec<float> r = fmadd(n, Vec<float>(2.12194440e-4f), fmadd(n, Vec<float>(-0.693359375f), clamped));
  // 2 e^r, |r| <= log(2) / 2: minimax of the relative error, 3e-9.
  static constexpr float kExp[] = {2,
                                   2,
                                   2 * 0.499999934123f,
                                   2 * 0.166665201082f,
                                   2 * 0.0416683942625f,
                                   2 * 0.00836878038195f,
                                   2 * 0.00138144639022f};
  return polynomial(r, kExp) * scale;
}

// e^x for x that are not large, from 2^-126 down 0, to 1 ulp and |x| ulp of the argument times log2(e): as exact as
// sums of such numbers with a greatest of 1 need, and a third faster.
inline Vec<float> exp_of_negative(const Vec<float>& x) {
  using at::vec::fmadd;
  // As above, with 2^n in the exponent: none of it for n = -127, to which all x from -88.03 down are clamped.
  const Vec<float> shift(12582912.0f + 127.0f), log2e(1.44269504f);
  const Vec<float> clamped = at::vec::clamp_min(x, Vec<float>(-88.03f));
  const Vec<float> shifted = fmadd(clamped, log2e, shift);
  const Vec<float> scale = at::vec::cast<float>(at::vec::cast<int32_t>(shifted) << Vec<int32_t>(23));
  const Vec<float> r = fmadd(clamped, log2e, shift - shifted);
  // 2^r, |r| <= 1 / 2: minimax of the relative error with 1 at 0, 9e-8.
  static constexpr float kExp2[] = {
      1, 0.693146977598f, 0.240222420836f, 0.0555073374414f, 0.00967151275605f, 0.00132647272713f};
  return polynomial(r, kExp2) * scale;
}

template <typename F>
inline Vec<double> lane_by_lane(const Vec<double>& x, const F& f) {
  alignas(64) double lanes[Vec<double>::size()];
  x.store(lanes);
  for (double& lane : lanes) lane = f(lane);
  return Vec<double>::loadu(lanes);
}

inline Vec<double> exp(const Vec<double>& x) {
  return lane_by_lane(x, [](double lane) { return std::exp(lane); });
}

inline Vec<double> exp_of_negative(const Vec<double>& x) { return exp(x); }

inline Vec<float> tanh(const Vec<float>& x) {
  const Vec<float> one(1.0f), size = x.abs(), e = exp(size * Vec<float>(-2.0f));
  // Near 0, where 1 - e cancels: x + x^3 * p(x^2), minimax to 5e-9.
  static constexpr float kTanh[] = {-0.333332819418f, 0.13331442191f, -0.053739714448f, 0.0206390850571f,
                                    -0.00570498443956f};
  const Vec<float> square = x * x, small = at::vec::fmadd(x * square, polynomial(square, kTanh), x);
  const Vec<float> large = ((one - e) / (one + e)) | (x & Vec<float>(-0.0f));
  return Vec<float>::blendv(large, small, size < Vec<float>(0.625f));
}

inline Vec<double> tanh(const Vec<double>& x) {
  return lane_by_lane(x, [](double lane) { return std::tanh(lane); });
}

// 1 / (1 + e^-x), and what it lacks to 1.
template <typename T>
struct Sigmoid {
  Vec<T> value, complement;
};

template <typename T>
inline Sigmoid<T> sigmoid(const Vec<T>& x) {
  const Vec<T> zero(T(0)), one(T(1)), e = exp(x.abs().neg()), large = one / (one + e), small = e * large;
  const Vec<T> negative = x < zero;
  return {Vec<T>::blendv(large, small, negative), Vec<T>::blendv(small, large, negative)};
}

// The normal distribution.
template <typename T>
struct Normal {
  Vec<T> density, cumulative;
};

inline Normal<float> normal(const Vec<float>& x) {
  const Vec<float> one(1.0f), bell = exp(x * x * Vec<float>(-0.5f));
  // The tail beyond |x| over e^(-x^2 / 2) in powers of v / (1 + v), v = |x| / 4: a minimax fit to 6e-9, more where the
  // tail is small.
  static constexpr float kTail[] = {0.499999997083f,  -1.59576841144f,  2.4042012904f,
                                    -2.1060542096f,   0.867949912648f,  0.123304423847f,
                                    -0.255950328452f, 0.0390962449626f, 0.0243095729598f};
  const Vec<float> v = at::vec::clamp_max(x.abs(), Vec<float>(16.0f)) * Vec<float>(0.25f);
  const Vec<float> tail = bell * polynomial(v / (one + v), kTail);
  return {bell * Vec<float>(0.398942280f), Vec<float>::blendv(tail, one - tail, x > Vec<float>(0.0f))};
}

inline Normal<double> normal(const Vec<double>& x) {
  const auto density = [](double lane) { return 0.39894228040143267794 * std::exp(-0.5 * lane * lane); };
  const auto cumulative = [](double lane) { return 0.5 * std::erfc(-0.70710678118654752440 * lane); };
  return {lane_by_lane(x, density), lane_by_lane(x, cumulative)};
}

}  // namespace myvision::CPU_CAPABILITY
