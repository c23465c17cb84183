// Statistics of numbers so large that their sums or squares leave the range of the type that a kernel computes in: the
// same in doubles, of numbers that are scaled down where doubles would overflow too. Kernels come here only when the
// ordinary sums were not finite.
#pragma once
#include <cmath>
#include <limits>

#include "common/host_device.h"

namespace myvision {

// Numbers are scaled by a power of two, which is exact, so that any sum of their squares fits a double.
template <typename Real>
inline constexpr double kExtremeScale = sizeof(Real) == sizeof(double) ? 0x1p-530 : 1;

// These are of numbers times kExtremeScale.
struct ExtremeMoments {
  double count, mean, variance;
};

// visit_all(visit) calls visit(number) for the thread's share of `count` numbers, and sum adds up what threads found.
// Distances are from `first`, one of the numbers, so that those of a constant are exactly 0. Without `centered` the
// mean is taken to be 0.
template <typename Real, typename VisitAll, typename Sum>
MYVISION_HOST_DEVICE ExtremeMoments extreme_moments(double count, double first, bool centered,
                                                    const VisitAll& visit_all, const Sum& sum) {
  constexpr double kScale = kExtremeScale<Real>;
  double mean = 0, distances = 0, squares = 0;
  if (centered) {
    const double pivot = first * kScale;
    visit_all([&](double x) { distances += x * kScale - pivot; });
    mean = pivot + sum(distances) / count;
    distances = 0;
  }
  visit_all([&](double x) {
    const double distance = x * kScale - mean;
    distances += distance;
    squares += distance * distance;
  });
  squares = sum(squares);
  if (!centered) return {count, 0, squares / count};
  const double rest = sum(distances) / count, variance = squares / count - rest * rest;
  return {count, mean + rest, variance < 0 ? 0 : variance};
}

template <typename Real>
MYVISION_HOST_DEVICE double unscaled_mean(const ExtremeMoments& moments) {
  return moments.mean / kExtremeScale<Real>;
}

// The variance is infinite where it leaves the range of double.
template <typename Real>
MYVISION_HOST_DEVICE double unscaled_variance(const ExtremeMoments& moments) {
  return moments.variance / kExtremeScale<Real> / kExtremeScale<Real>;
}

// What normalises the numbers. Where a difference to the mean might overflow, the numbers spread as widely as they are
// large: then nothing is subtracted from them, and all of the mean counts as the rest.
template <typename Statistics, typename Real = decltype(Statistics::mean)>
MYVISION_HOST_DEVICE Statistics extreme_statistics(const ExtremeMoments& moments, double eps) {
  const double mean = unscaled_mean<Real>(moments), variance = unscaled_variance<Real>(moments);
  const double rstd =
      std::isinf(variance) ? kExtremeScale<Real> / std::sqrt(moments.variance) : 1 / std::sqrt(variance + eps);
  const double most = std::sqrt(moments.count * moments.variance);  // of the scaled distances
  const bool fits = most < static_cast<double>(std::numeric_limits<Real>::max()) * kExtremeScale<Real>;
  const Real rounded_mean = fits ? static_cast<Real>(mean) : Real(0);
  return {rounded_mean, static_cast<Real>(mean - rounded_mean), static_cast<Real>(rstd)};
}

}  // namespace myvision
