#include "common/cpu_kernels.h"

#define MYVISION_DECLARE_CPU_KERNELS(INSTRUCTION_SET)                                   \
  namespace INSTRUCTION_SET {                                                           \
  void my_add(const MyAddParams&);                                                      \
  void deform_conv2d_forward(const DeformConv2dParams&);                                \
  void deform_conv2d_backward(const DeformConv2dParams&, const DeformConv2dGradients&); \
  void batch_norm_forward(const BatchNormParams&);                                      \
  void batch_norm_backward(const BatchNormParams&, const BatchNormGradients&);          \
  void layer_norm_forward(const LayerNormParams&);                                      \
  void layer_norm_backward(const LayerNormParams&, const LayerNormGradients&);          \
  void attention_forward(const AttentionParams&);                                       \
  void attention_backward(const AttentionParams&, const AttentionGradients&);           \
  constexpr CpuKernels kernels = {                                                      \
      .my_add = &my_add,                                                                \
      .deform_conv2d_forward = &deform_conv2d_forward,                                  \
      .deform_conv2d_backward = &deform_conv2d_backward,                                \
      .batch_norm_forward = &batch_norm_forward,                                        \
      .batch_norm_backward = &batch_norm_backward,                                      \
      .layer_norm_forward = &layer_norm_forward,                                        \
      .layer_norm_backward = &layer_norm_backward,                                      \
      .attention_forward = &attention_forward,                                          \
      .attention_backward = &attention_backward,                                        \
  };                                                                                    \
  }

namespace myvision {

MYVISION_DECLARE_CPU_KERNELS(DEFAULT)
#if defined(MYVISION_CPU_AVX2)
MYVISION_DECLARE_CPU_KERNELS(AVX2)
#endif
#if defined(MYVISION_CPU_AVX512)
MYVISION_DECLARE_CPU_KERNELS(AVX512)
#endif

const CpuKernels& cpu_kernels(CpuCapability capability) {
  switch (capability) {
#if defined(MYVISION_CPU_AVX512)
    case CpuCapability::AVX512:
      return AVX512::kernels;
#endif
#if defined(MYVISION_CPU_AVX2)
    case CpuCapability::AVX2:
      return AVX2::kernels;
#endif
    default:
      return DEFAULT::kernels;
  }
}

const CpuKernels& cpu_kernels() {
  static const CpuKernels& kernels = cpu_kernels(cpu_capability());
  return kernels;
}

}  // namespace myvision
