// A tensor of four dimensions as the kernels see it: free of torch.
#pragma once
#include <cstdint>

namespace myvision {

// Strides in elements; data is null where an optional tensor is absent.
struct Strided4 {
  void* data;
  int64_t stride[4];
};

}  // namespace myvision
