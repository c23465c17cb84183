// Launches batch_norm's kernels.
#include "ops/batch_norm/batch_norm_kernel.cuh"

namespace myvision {

const char* batch_norm_forward_cuda(const BatchNormParams&, void*, void*) { return "not there yet"; }
int64_t batch_norm_forward_cuda_workspace(const BatchNormParams&) { return 0; }
int64_t batch_norm_backward_cuda_workspace(const BatchNormParams&, const BatchNormGradients&) { return 0; }
const char* batch_norm_backward_cuda(const BatchNormParams&, const BatchNormGradients&, void*, void*) {
  return "not there yet";
}

}  // namespace myvision
