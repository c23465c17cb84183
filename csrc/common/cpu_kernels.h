// The table of CPU kernels: every *_cpu.cpp is compiled once per instruction set, in the namespace CPU_CAPABILITY
// (DEFAULT, AVX2 or AVX512, set by the build), and defines there each function named below.
#pragma once
#include "common/cpu_capability.h"
#include "ops/attention/attention.h"
#include "ops/batch_norm/batch_norm.h"
#include "ops/deform_conv2d/deform_conv2d.h"
#include "ops/layer_norm/layer_norm.h"
#include "ops/my_add/my_add.h"

namespace myvision {

struct CpuKernels {
  void (*my_add)(const MyAddParams&);
  void (*deform_conv2d_forward)(const DeformConv2dParams&);
  void (*deform_conv2d_backward)(const DeformConv2dParams&, const DeformConv2dGradients&);
  void (*batch_norm_forward)(const BatchNormParams&);
  void (*batch_norm_backward)(const BatchNormParams&, const BatchNormGradients&);
  void (*layer_norm_forward)(const LayerNormParams&);
  void (*layer_norm_backward)(const LayerNormParams&, const LayerNormGradients&);
  void (*attention_forward)(const AttentionParams&);
  void (*attention_backward)(const AttentionParams&, const AttentionGradients&);
};

// Of the instruction set in use; the second form of a given one, for the tests (it must be one that was built).
const CpuKernels& cpu_kernels();
const CpuKernels& cpu_kernels(CpuCapability capability);

}  // namespace myvision
