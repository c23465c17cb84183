// Whose matrix product an operator takes on the CPU: its own kernels', which fuse what follows, or torch's.
#pragma once
#include "common/dtype.h"

namespace myvision {

struct ProductChoice {
  bool is_torch;
  bool is_asked_for;  // by the environment variable
  const char* why;
};

// For products of this floating-point type: torch's where it is known to be faster on this CPU. The environment
// variable MYVISION_PRODUCT, "own" or "torch", decides for every type; another value of it raises.
const ProductChoice& cpu_product(Dtype dtype);

}  // namespace myvision
