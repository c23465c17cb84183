// What may follow a normalisation: the formulas and their derivatives, for one number, on host and device.
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

}  // namespace myvision
