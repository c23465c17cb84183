// my_add: output = 2 * x + y.
#pragma once
#include "common/broadcast.h"
#include "common/cpu_kernel.h"
#include "common/dtype.h"

namespace myvision {

// The broadcast gives sizes and strides.
struct MyAddParams : Broadcast {
  const void* x;
  const void* y;
  void* output;
  Dtype dtype;  // of all three
};

MYVISION_CPU_KERNEL(my_add, forward, MyAddParams)

// Null, or what went wrong with the launch.
const char* my_add_cuda(const MyAddParams& params, void* stream);

}  // namespace myvision
