// linear on the GPU, where torch computes the products: what follows that of forward, and what comes before those of
// backward.
//
// Bandwidth is the limit of both. With e = sizeof(T) they move, per element:
//   linear_epilogue            e read (2 e with a residual), e written
//   linear_epilogue_backward   e read (2 e with an activation), e written
#pragma once
#include "common/activation.h"
#include "common/gpu.cuh"
#include "common/philox.h"
#include "ops/linear/linear.h"

namespace myvision::gpu::linear {

// What is written is contiguous, and threads walk it in packs, whose elements they read from other matrices.
enum class Access : int8_t {
  Line,    // at the same place
  Rows,    // in one access, in another place
  Gather,  // one by one
};

struct Operand {
  Matrix matrix;
  Access access;
};

template <typename T, int kWidth>
__device__ __forceinline__ Pack<RealOf<T>, kWidth> load(const Operand& operand, int64_t element, int64_t outputs) {
  const T* data = static_cast<const T*>(operand.matrix.data);
  if (operand.access == Access::Line) return reals_of(load_vector<kWidth>(data + element));
  int64_t i = divide(element, outputs), j = element - i * outputs;
  if (operand.access == Access::Rows) return reals_of(load_vector<kWidth>(data + i * operand.matrix.row + j));
  Pack<T, kWidth> pack;
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    pack.value[k] = data[i * operand.matrix.row + j * operand.matrix.column];
    if (++j == outputs) j = 0, ++i;
  }
  return reals_of(pack);
}

// Dropout multiplies numbers with 0, or with what keeps their mean. A pack begins at a multiple of its width, so four
// neighbours share what philox draws.
template <int kWidth, typename Real>
__device__ __forceinline__ void drop(const LinearParams& params, int64_t element, Pack<Real, kWidth>& numbers) {
  if (params.dropout_p == 0) return;
  const uint64_t seed = *params.seed, threshold = dropout_threshold(params.dropout_p);
  const auto scale = static_cast<Real>(params.dropout_p < 1 ? 1 / (1 - params.dropout_p) : 0);
  PhiloxWords words{};
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    if (j % 4 == 0) words = philox(seed, (element + j) / 4);
    numbers.value[j] *= word_of(words, element + j) < threshold ? 0 : scale;
  }
}

// Calls visit(element, width), where width is a constant: kWidth, and 1 for what follows the last whole pack.
template <int kWidth, typename Visit>
__device__ __forceinline__ void walk(const LinearParams& params, Visit visit) {
  const int64_t size = params.rows * params.outputs, packs = size / kWidth;
  for (int64_t pack = global_thread(); pack < packs; pack += global_threads()) {
    visit(pack * kWidth, std::integral_constant<int, kWidth>());
  }
  for (int64_t element = packs * kWidth + global_thread(); element < size; element += global_threads()) {
    visit(element, std::integral_constant<int, 1>());
  }
}

// kWidth > 1 wants the output aligned to a pack, which the product may share.
template <typename T, int kWidth>
__global__ void linear_epilogue(const LinearParams params, const Operand product, const Operand residual) {
  walk<kWidth>(params, [&](int64_t element, auto width) {
    auto numbers = load<T, width>(product, element, params.outputs);
#pragma unroll
    for (int j = 0; j < width; ++j) numbers.value[j] = activate(params.activation, numbers.value[j]);
    drop(params, element, numbers);
    if (residual.matrix.data) {
      const auto added = load<T, width>(residual, element, params.outputs);
#pragma unroll
      for (int j = 0; j < width; ++j) numbers.value[j] += added.value[j];
    }
    store_vector(static_cast<T*>(params.output) + element, rounded<T>(numbers));
  });
}

// kWidth > 1 wants preactivation and gradient aligned to a pack.
template <typename T, int kWidth>
__global__ void linear_epilogue_backward(const LinearParams params, const Operand grad_output, T* gradient) {
  walk<kWidth>(params, [&](int64_t element, auto width) {
    auto numbers = load<T, width>(grad_output, element, params.outputs);
    drop(params, element, numbers);
    if (params.preactivation) {
      const auto z = reals_of(load_vector<width>(static_cast<const T*>(params.preactivation) + element));
#pragma unroll
      for (int j = 0; j < width; ++j) {
        numbers.value[j] *= activation_derivative(params.activation, z.value[j]);
      }
    }
    store_vector(gradient + element, rounded<T>(numbers));
  });
}

}  // namespace myvision::gpu::linear
