// batch_norm, and instance_norm and group_norm, which differ from it in what a mean is taken over: the plain parameters
// that every backend takes. Checked once, in batch_norm.cpp.
//
//   output = activation((input - mean) * rstd * weight + bias + residual)
//
// Real is double where dtype is Float64 and float otherwise; arrays of Real are contiguous. A set of numbers that share
// a mean is a group: a channel of the whole batch (groups == 0), or so many neighbouring channels of one image.
#pragma once
#include <cstdint>

#include "common/activation.h"
#include "common/dtype.h"
#include "common/host_device.h"
#include "common/kernel.h"
#include "common/strided.h"

namespace myvision {

enum class StatisticsFrom : int8_t {
  Input,    // computed, and written to `statistics` where that is not null
  Running,  // mean and variance are running_mean and running_var; groups == 0. Written to `statistics` too, if not null
  Given     // read from `statistics`
};

struct BatchNormParams {
  Dtype dtype;  // of input, residual, output and their gradients: Float64, Float32, Float16 or BFloat16
  int64_t batch, channels, height, width;
  int64_t groups;                    // in an image; 0: channels over the batch
  Strided4 input, residual, output;  // output.data is null where only the statistics are wanted
  const void* weight;                // Real[channels], or null: 1
  const void* bias;                  // Real[channels], or null: 0
  void* statistics;  // Real[3][groups of all]: mean; what it lost by being rounded; 1 / sqrt(variance + eps)
  StatisticsFrom statistics_from;
  void* running_mean;  // Real[channels], or null. From Input: updated, x = (1 - momentum) * x + momentum * new,
  void* running_var;   // by the unbiased variance; of several groups a channel, by their average
  double momentum, eps;
  Activation activation;
};

enum class BackwardStage : int8_t {
  Whole,
  Sums,   // only Gradients::sums, and from them weight and bias
  Finish  // from given sums: input and residual
};

// What has null data, or is a null pointer, is not wanted.
struct BatchNormGradients {
  Strided4 output;  // given
  Strided4 input, residual;
  void* weight;   // Real[channels]
  void* bias;     // Real[channels]
  bool training;  // the statistics are the input's own, so that its gradient flows through them
  BackwardStage stage;
  // Real[2][channels], for groups == 0 and a stage other than Whole: the sums over a channel of g and of g *
  // normalised, where g is the gradient before the activation. Finish takes them divided by the number of elements.
  void* sums;
};

MYVISION_KERNEL_WITH_WORKSPACE(batch_norm, forward, BatchNormParams)
MYVISION_KERNEL_WITH_WORKSPACE(batch_norm, backward, BatchNormParams, BatchNormGradients)

MYVISION_HOST_DEVICE int64_t number_of_groups(const BatchNormParams& p) {
  return p.groups == 0 ? p.channels : p.batch * p.groups;
}

}  // namespace myvision
