// Launches linear's kernels: chooses how wide packs are, and how matrices are read.
#include "ops/linear/gpu/linear_kernel.cuh"

namespace myvision {
using namespace gpu::linear;
namespace {

Operand operand_of(const Matrix& matrix, const LinearParams& params) {
  const int64_t width = kVectorBytes / size_of(params.dtype);
  const bool runs_along_rows = matrix.column == 1 || params.outputs == 1;
  if (!runs_along_rows || !is_vector_aligned(matrix.data)) return {matrix, Access::Gather};
  if (matrix.row == params.outputs || params.rows == 1) return {matrix, Access::Line};
  const bool holds_packs = params.outputs % width == 0 && matrix.row % width == 0;
  return {matrix, holds_packs ? Access::Rows : Access::Gather};
}

// Calls launch(width, blocks) with the width of packs, a constant.
template <typename T, typename Launch>
const char* launch_in_packs(const LinearParams& params, bool aligned, Launch launch) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  const int64_t size = params.rows * params.outputs;
  if (aligned) {
    launch(std::integral_constant<int, kWidth>(), walk_blocks(size / kWidth + size % kWidth));
  } else {
    launch(std::integral_constant<int, 1>(), walk_blocks(size));
  }
  return launch_error();
}

}  // namespace

const char* linear_epilogue_cuda(const LinearParams& params, const Matrix& product, void* stream) {
  return visit_floating(params.dtype, [&](auto element) {
    using T = decltype(element);
    return launch_in_packs<T>(params, is_vector_aligned(params.output), [&](auto width, unsigned blocks) {
      MYVISION_LAUNCH((linear_epilogue<T, width>), blocks, kWalkThreads, static_cast<GpuStream>(stream), params,
                      operand_of(product, params), operand_of(params.residual, params));
    });
  });
}

const char* linear_epilogue_backward_cuda(const LinearParams& params, const Matrix& grad_output, void* const& gradient,
                                          void* stream) {
  const bool aligned = is_vector_aligned(params.preactivation) && is_vector_aligned(gradient);
  return visit_floating(params.dtype, [&](auto element) {
    using T = decltype(element);
    return launch_in_packs<T>(params, aligned, [&](auto width, unsigned blocks) {
      MYVISION_LAUNCH((linear_epilogue_backward<T, width>), blocks, kWalkThreads, static_cast<GpuStream>(stream),
                      params, operand_of(grad_output, params), static_cast<T*>(gradient));
    });
  });
}

}  // namespace myvision
