// attention on the CPU, compiled once per instruction set.
#include <type_traits>

#include "ops/attention/cpu/attention_backward.h"
#include "ops/attention/cpu/attention_forward.h"

namespace myvision::CPU_CAPABILITY::attention {

void forward(const AttentionParams& params) {
  with_type(params.dtype, [&](auto* type) { run_forward<std::remove_pointer_t<decltype(type)>>(params); });
}

void backward(const AttentionParams& params, const AttentionGradients& gradients) {
  with_type(params.dtype, [&](auto* type) { run_backward<std::remove_pointer_t<decltype(type)>>(params, gradients); });
}

}  // namespace myvision::CPU_CAPABILITY::attention
