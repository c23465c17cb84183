// What may follow a normalisation: the formulas and their derivatives, for one number, on host and device. At kinks and
// for NaN they are torch's.
#pragma once
#include <cmath>
#include <cstdint>

#include "common/host_device.h"

namespace myvision {

enum class ActivationKind : int8_t { None, Relu, LeakyRelu, Silu, Gelu, GeluTanh, Hardswish };

inline constexpr const char* kActivationNames[] = {"none", "relu",      "leaky_relu", "silu",
                                                   "gelu", "gelu_tanh", "hardswish"};

struct Activation {
  ActivationKind kind;
  double negative_slope;  // of LeakyRelu
};

inline constexpr double kSqrtHalf = 0.70710678118654752440;
inline constexpr double kSqrtTwoOverPi = 0.79788456080286535588;
inline constexpr double kGeluTanhCubic = 0.044715;

template <typename Real>
MYVISION_HOST_DEVICE Real sigmoid(Real z) {
  return 1 / (1 + std::exp(-z));
}

// The cumulative distribution of the standard normal, and its density.
template <typename Real>
MYVISION_HOST_DEVICE Real normal_cdf(Real z) {
  return Real(0.5) * (1 + std::erf(z * Real(kSqrtHalf)));
}

template <typename Real>
MYVISION_HOST_DEVICE Real normal_density(Real z) {
  return Real(0.5 * kSqrtTwoOverPi) * std::exp(Real(-0.5) * z * z);
}

// GeluTanh's approximation of 2 * normal_cdf(z) - 1.
template <typename Real>
MYVISION_HOST_DEVICE Real gelu_tanh_factor(Real z) {
  return std::tanh(Real(kSqrtTwoOverPi) * (z + Real(kGeluTanhCubic) * z * z * z));
}

template <typename Real>
MYVISION_HOST_DEVICE Real activate(const Activation& activation, Real z) {
  switch (activation.kind) {
    case ActivationKind::Relu:
      return z < 0 ? Real(0) : z;
    case ActivationKind::LeakyRelu:
      return z > 0 ? z : z * static_cast<Real>(activation.negative_slope);
    case ActivationKind::Silu:
      return z * sigmoid(z);
    case ActivationKind::Gelu:
      return z * normal_cdf(z);
    case ActivationKind::GeluTanh:
      return Real(0.5) * z * (1 + gelu_tanh_factor(z));
    case ActivationKind::Hardswish: {
      const Real shifted = z + 3;
      return z * (shifted < 0 ? Real(0) : shifted > 6 ? Real(6) : shifted) / 6;
    }
    default:
      return z;
  }
}

template <typename Real>
MYVISION_HOST_DEVICE Real activation_derivative(const Activation& activation, Real z) {
  switch (activation.kind) {
    case ActivationKind::Relu:
      return z <= 0 ? Real(0) : Real(1);
    case ActivationKind::LeakyRelu:
      return z > 0 ? Real(1) : static_cast<Real>(activation.negative_slope);
    case ActivationKind::Silu: {
      const Real s = sigmoid(z);
      return s * (1 + z * (1 - s));
    }
    case ActivationKind::Gelu:
      return normal_cdf(z) + z * normal_density(z);
    case ActivationKind::GeluTanh: {
      const Real t = gelu_tanh_factor(z);
      const Real inner = Real(kSqrtTwoOverPi) * (1 + 3 * Real(kGeluTanhCubic) * z * z);
      return Real(0.5) * (1 + t) + Real(0.5) * z * (1 - t * t) * inner;
    }
    case ActivationKind::Hardswish:
      return z <= -3 ? Real(0) : z < 3 ? z / 3 + Real(0.5) : Real(1);
    default:
      return 1;
  }
}

}  // namespace myvision
