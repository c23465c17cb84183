// my_add on the GPU: output = 2 * x + y.
// Per output: 2 additions and 3 * sizeof(T) bytes moved. That is at most 1/6 operation a byte for floats of 32 bits,
// where a GPU offers more than ten: bandwidth is the limit, so threads move 16 bytes an access wherever the layout lets
// them.
#pragma once
#include "common/gpu.cuh"
#include "ops/my_add/my_add.h"

namespace myvision {

template <typename T>
__device__ __forceinline__ T twice_plus(T x, T y) {
  if constexpr (std::is_integral_v<T>) {
    using Wrapping = std::make_unsigned_t<T>;
    return static_cast<T>(Wrapping(2) * static_cast<Wrapping>(x) + static_cast<Wrapping>(y));
  } else {
    return from_real<T>(to_real(x) + to_real(x) + to_real(y));  // as on the CPU: the same bits, fused or not
  }
}

template <typename T, int kWidth>
__device__ __forceinline__ Pack<T, kWidth> twice_plus(const Pack<T, kWidth>& x, const Pack<T, kWidth>& y) {
  Pack<T, kWidth> result;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) result.value[i] = twice_plus(x.value[i], y.value[i]);
  return result;
}

// kWidth > 1 wants all three aligned to a pack. The elements after the last whole pack go one by one.
template <typename T, int kWidth>
__global__ void my_add_contiguous(const T* x, const T* y, T* output, int64_t size) {
  const int64_t packs = size / kWidth;
  for (int64_t i = global_thread(); i < packs; i += global_threads()) {
    store_vector(output + i * kWidth,
                 twice_plus(load_vector<kWidth>(x + i * kWidth), load_vector<kWidth>(y + i * kWidth)));
  }
  for (int64_t i = packs * kWidth + global_thread(); i < size; i += global_threads()) {
    output[i] = twice_plus(x[i], y[i]);
  }
}

// Any strides. A thread's unit is a pack along dimension 0: params count that dimension, size and strides, in packs of
// kWidth elements, and every other stride in elements.
template <typename T, int kWidth>
__global__ void my_add_strided(const MyAddParams params, int64_t packs) {
  for (int64_t pack = global_thread(); pack < packs; pack += global_threads()) {
    int64_t x = 0, y = 0, output = 0, rest = pack;
    for (int dim = 0; dim < params.dims; ++dim) {
      const int64_t next = divide(rest, params.size[dim]);
      const int64_t index = rest - next * params.size[dim];
      x += index * params.x_stride[dim];
      y += index * params.y_stride[dim];
      output += index * params.output_stride[dim];
      rest = next;
    }
    const auto x_pack = load_pack<kWidth>(static_cast<const T*>(params.x) + x, params.x_stride[0] / kWidth);
    const auto y_pack = load_pack<kWidth>(static_cast<const T*>(params.y) + y, params.y_stride[0] / kWidth);
    store_vector(static_cast<T*>(params.output) + output, twice_plus(x_pack, y_pack));
  }
}

}  // namespace myvision
