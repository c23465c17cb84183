// my_add on the GPU.
#pragma once
#include "common/elementwise.cuh"
#include "ops/my_add/my_add.h"

namespace myvision {

struct MyAddFormula {
  template <typename T>
  __device__ T operator()(T x, T y) const {
    return x + x + y;  // as on the CPU: the same bits, fused or not
  }
};

}  // namespace myvision
