// Launches layer_norm's kernels.
#include "ops/layer_norm/layer_norm_kernel.cuh"

namespace myvision {

const char* layer_norm_forward_cuda(const LayerNormParams&, void*) { return "not there yet"; }
int64_t layer_norm_backward_cuda_workspace(const LayerNormParams&, const LayerNormGradients&) { return 0; }
const char* layer_norm_backward_cuda(const LayerNormParams&, const LayerNormGradients&, void*, void*) {
  return "not there yet";
}

}  // namespace myvision
