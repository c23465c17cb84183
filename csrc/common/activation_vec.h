// The activations and their derivatives for vectors. Compiled once per instruction set.
#pragma once
#include <type_traits>

#include "common/activation.h"
#include "common/vec_math.h"

namespace myvision::CPU_CAPABILITY {

// u of gelu_tanh(z) = z * (1 + tanh(u)) / 2 = z * sigmoid(2 u): here 2 u, and its derivative.
template <typename T>
inline Vec<T> gelu_tanh_argument(const Vec<T>& z) {
  return z * at::vec::fmadd(z * z, Vec<T>(T(0.07135481627260026)), Vec<T>(T(1.5957691216057308)));
}
template <typename T>
inline Vec<T> gelu_tanh_argument_slope(const Vec<T>& z) {
  return at::vec::fmadd(z * z, Vec<T>(T(0.21406444881780078)), Vec<T>(T(1.5957691216057308)));
}

template <ActivationKind KIND, typename T>
inline Vec<T> activate(const Vec<T>& z, T negative_slope) {
  const Vec<T> zero(T(0));
  switch (KIND) {
    case ActivationKind::None:
      return z;
    case ActivationKind::Relu:
      return at::vec::clamp_min(z, zero);
    case ActivationKind::LeakyRelu:
      return Vec<T>::blendv(z * Vec<T>(negative_slope), z, z > zero);
    case ActivationKind::Silu:
      return z * sigmoid(z).value;
    case ActivationKind::Gelu:
      return z * normal(z).cumulative;
    case ActivationKind::GeluTanh:
      return z * sigmoid(gelu_tanh_argument(z)).value;
    case ActivationKind::Hardswish:
      return z * at::vec::clamp(z + Vec<T>(T(3)), zero, Vec<T>(T(6))) / Vec<T>(T(6));
  }
}

// The gradient before the activation, of which z is the argument, from the one after it.
template <ActivationKind KIND, typename T>
inline Vec<T> activate_backward(const Vec<T>& gradient, const Vec<T>& z, T negative_slope) {
  const Vec<T> zero(T(0)), one(T(1));
  switch (KIND) {
    case ActivationKind::None:
      return gradient;
    case ActivationKind::Relu:
      return Vec<T>::blendv(gradient, zero, z <= zero);
    case ActivationKind::LeakyRelu:
      return Vec<T>::blendv(gradient * Vec<T>(negative_slope), gradient, z > zero);
    case ActivationKind::Silu: {
      const Sigmoid<T> s = sigmoid(z);
      return gradient * s.value * at::vec::fmadd(z, s.complement, one);
    }
    case ActivationKind::Gelu: {
      const Normal<T> at_z = normal(z);
      return gradient * at::vec::fmadd(z, at_z.density, at_z.cumulative);
    }
    case ActivationKind::GeluTanh: {
      const Sigmoid<T> s = sigmoid(gelu_tanh_argument(z));
      return gradient * s.value * at::vec::fmadd(z * gelu_tanh_argument_slope(z), s.complement, one);
    }
    case ActivationKind::Hardswish: {
      const Vec<T> between = gradient * at::vec::fmadd(z, Vec<T>(T(1) / T(3)), Vec<T>(T(0.5)));
      const Vec<T> below_three = Vec<T>::blendv(between, zero, z <= Vec<T>(T(-3)));
      return Vec<T>::blendv(below_three, gradient, z >= Vec<T>(T(3)));
    }
  }
}

// Calls body(std::integral_constant<ActivationKind, kind>()).
template <typename Body>
inline void with_activation(ActivationKind kind, const Body& body) {
  const auto call = [&]<ActivationKind KIND>() { body(std::integral_constant<ActivationKind, KIND>()); };
  switch (kind) {
    case ActivationKind::None:
      return call.template operator()<ActivationKind::None>();
    case ActivationKind::Relu:
      return call.template operator()<ActivationKind::Relu>();
    case ActivationKind::LeakyRelu:
      return call.template operator()<ActivationKind::LeakyRelu>();
    case ActivationKind::Silu:
      return call.template operator()<ActivationKind::Silu>();
    case ActivationKind::Gelu:
      return call.template operator()<ActivationKind::Gelu>();
    case ActivationKind::GeluTanh:
      return call.template operator()<ActivationKind::GeluTanh>();
    case ActivationKind::Hardswish:
      return call.template operator()<ActivationKind::Hardswish>();
  }
}

}  // namespace myvision::CPU_CAPABILITY
