// my_add: output = 2 * x + y.
#pragma once
#include <cstdint>

#include "common/dtype.h"

namespace myvision {

// The broadcast inputs walked in the order of output's memory, contiguous dimensions merged: stride[i] in elements.
struct MyAddParams {
  static constexpr int kMaxDims = 64;
  const void* x;
  const void* y;
  void* output;
  Dtype dtype;  // of all three
  int dims;
  int64_t size[kMaxDims];  // innermost dimension first
  int64_t x_stride[kMaxDims];
  int64_t y_stride[kMaxDims];
  int64_t output_stride[kMaxDims];
};

// Null, or what went wrong with the launch.
const char* my_add_cuda(const MyAddParams& params, void* stream);

}  // namespace myvision
