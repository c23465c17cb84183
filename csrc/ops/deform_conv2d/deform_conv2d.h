// deform_conv2d: the plain parameters that every backend takes. deform_conv2d.cpp has checked them.
#pragma once
#include <cstdint>

#include "common/dtype.h"
#include "common/kernel.h"
#include "common/strided.h"

namespace myvision {

struct DeformConv2dParams {
  Dtype dtype;         // of every tensor but offset: Float64, Float32, Float16 or BFloat16
  Dtype offset_dtype;  // the same, or Float32 beside a half type, which would round the places
  int64_t batch, in_channels, height, width;
  int64_t out_channels, kernel_h, kernel_w, out_height, out_width;
  int64_t stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w;
  int64_t groups, offset_groups;
  Strided4 input;   // [batch, in_channels, height, width]
  Strided4 weight;  // [out_channels, in_channels / groups, kernel_h, kernel_w]
  Strided4 offset;  // [batch, offset_groups * kernel_h * kernel_w * 2, out_height, out_width], (y, x) pairs
  Strided4 mask;    // [batch, offset_groups * kernel_h * kernel_w, out_height, out_width], or absent
  Strided4 bias;    // [out_channels] (stride[0]), or absent
  Strided4 output;  // [batch, out_channels, out_height, out_width]; backward: the gradient of the output, read only
};

// Gradients to compute, each of its tensor's shape and dtype; data is null where a gradient is not wanted.
struct DeformConv2dGradients {
  Strided4 input, weight, offset, mask, bias;
  bool deterministic;  // the same bits in every run and, on the CPU, for any number of threads
};

MYVISION_KERNEL_WITH_WORKSPACE(deform_conv2d, forward, DeformConv2dParams)
MYVISION_KERNEL_WITH_WORKSPACE(deform_conv2d, backward, DeformConv2dParams, DeformConv2dGradients)

}  // namespace myvision
