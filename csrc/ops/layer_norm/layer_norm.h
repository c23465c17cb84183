// layer_norm, rms_norm, add_layer_norm and add_rms_norm: the plain parameters that every backend takes. Checked once,
// in layer_norm.cpp.
//
//   sum    = dropout(input) + addend                       where there is an addend; else sum is input
//   output = activation((sum - mean) * rstd * weight + bias + residual)
//
// A row is what shares a mean: the channels of one (batch, height, width). Rows are numbered in that order. Real is
// double where dtype is Float64 and float otherwise; arrays of Real are contiguous.
#pragma once
#include <cstdint>

#include "common/activation.h"
#include "common/dtype.h"
#include "common/host_device.h"
#include "common/kernel.h"
#include "common/strided.h"

namespace myvision {

struct LayerNormParams {
  Dtype dtype;  // of input, addend, sum, residual, output and their gradients: Float64, Float32, Float16 or BFloat16
  int64_t batch, channels, height, width;
  Strided4 input;
  Strided4 addend, sum;  // both or neither
  Strided4 residual;     // or none
  Strided4 output;
  const void* weight;  // Real[channels], or null: 1
  const void* bias;    // Real[channels], or null: 0
  void* statistics;    // centered: Real[3][rows]: mean; what it lost by being rounded; 1 / sqrt(variance + eps).
                       // Else Real[1][rows]: 1 / sqrt(mean of squares + eps). Null: not wanted
  bool centered;       // false: rms_norm, whose mean is 0
  double eps;
  Activation activation;
  double dropout_p;     // of input, before addend is added
  const int64_t* seed;  // of dropout, on the device; null where dropout_p is 0. Element row * channels + channel
};

// Of a backward call params.input is what was normalised: the input, or the sum; params.statistics are given, and there
// is no addend. Null data, or a null pointer: not wanted.
struct LayerNormGradients {
  Strided4 output;   // given
  Strided4 sum;      // given, or null: added to what flows into the normalised tensor
  Strided4 input;    // of what was normalised
  Strided4 dropped;  // of what dropout was given: that of input, masked and scaled again
  Strided4 residual;
  void* weight;  // Real[channels]
  void* bias;    // Real[channels]
};

MYVISION_KERNEL(layer_norm, forward, LayerNormParams)
MYVISION_KERNEL_WITH_WORKSPACE(layer_norm, backward, LayerNormParams, LayerNormGradients)

MYVISION_HOST_DEVICE int64_t number_of_rows(const LayerNormParams& p) { return p.batch * p.height * p.width; }

}  // namespace myvision
