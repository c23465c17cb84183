// Element-wise operators on the GPU: an operator's files give the formula, kernels and launchers stand here.
// Per output a formula does few operations and moves the bytes of all operands. A GPU offers more than ten operations a
// byte: bandwidth is the limit, so threads move 16 bytes an access wherever the layout lets them.
#pragma once
#include <utility>

#include "common/elementwise_params.h"
#include "common/gpu.cuh"

namespace myvision {

// An integer whose sums, differences and products wrap around, which C++'s own signed ones need not.
template <typename T>
struct Wrapping {
  using Bits = std::conditional_t<sizeof(T) <= sizeof(uint32_t), uint32_t, uint64_t>;

  T value;

  template <typename Number>
  __device__ __forceinline__ explicit Wrapping(Number number) : value(static_cast<T>(number)) {}

  __device__ __forceinline__ friend Wrapping operator+(Wrapping a, Wrapping b) {
    return Wrapping(Bits(a.value) + Bits(b.value));
  }
  __device__ __forceinline__ friend Wrapping operator-(Wrapping a, Wrapping b) {
    return Wrapping(Bits(a.value) - Bits(b.value));
  }
  __device__ __forceinline__ friend Wrapping operator*(Wrapping a, Wrapping b) {
    return Wrapping(Bits(a.value) * Bits(b.value));
  }
};

// The formula, in float32 for half types.
template <typename T, typename Formula, typename... Inputs>
__device__ __forceinline__ T evaluate(const Formula& formula, Inputs... inputs) {
  if constexpr (std::is_integral_v<T>) {
    return formula(Wrapping<T>(inputs)...).value;
  } else {
    return from_real<T>(formula(to_real(inputs)...));
  }
}

template <typename T, int kWidth, typename Formula, typename... Packs>
__device__ __forceinline__ Pack<T, kWidth> evaluate_pack(const Formula& formula, const Packs&... packs) {
  Pack<T, kWidth> result;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) result.value[i] = evaluate<T>(formula, packs.value[i]...);
  return result;
}

template <int kInputs>
struct Lines {
  const void* input[kInputs];
  void* output;
};

// kWidth > 1 wants all lines aligned to a pack. The elements after the last whole pack go one by one.
template <typename T, int kWidth, int kInputs, typename Formula, std::size_t... I>
__device__ __forceinline__ void walk_lines(const Lines<kInputs>& lines, const Formula& formula, int64_t size,
                                           std::index_sequence<I...>) {
  T* output = static_cast<T*>(lines.output);
  const int64_t packs = size / kWidth;
  for (int64_t i = global_thread(); i < packs; i += global_threads()) {
    store_vector(
        output + i * kWidth,
        evaluate_pack<T, kWidth>(formula, load_vector<kWidth>(static_cast<const T*>(lines.input[I]) + i * kWidth)...));
  }
  for (int64_t i = packs * kWidth + global_thread(); i < size; i += global_threads()) {
    output[i] = evaluate<T>(formula, static_cast<const T*>(lines.input[I])[i]...);
  }
}

template <typename T, int kWidth, int kInputs, typename Formula>
__global__ void elementwise_lines(const Lines<kInputs> lines, const Formula formula, int64_t size) {
  walk_lines<T, kWidth>(lines, formula, size, std::make_index_sequence<kInputs>());
}

// Any strides. A thread's unit is a pack along dimension 0: params count that dimension, size and strides, in packs of
// kWidth elements, and every other stride in elements.
template <typename T, int kWidth, typename Params, typename Formula, std::size_t... I>
__device__ __forceinline__ void walk_strided(const Params& params, const Formula& formula, int64_t packs,
                                             std::index_sequence<I...>) {
  for (int64_t pack = global_thread(); pack < packs; pack += global_threads()) {
    int64_t input[Params::kOperands] = {}, output = 0, rest = pack;
    for (int dim = 0; dim < params.dims; ++dim) {
      const int64_t next = divide(rest, params.size[dim]);
      const int64_t index = rest - next * params.size[dim];
      ((input[I] += index * params.stride[I][dim]), ...);
      output += index * params.output_stride[dim];
      rest = next;
    }
    store_vector(static_cast<T*>(params.output) + output,
                 evaluate_pack<T, kWidth>(formula, load_pack<kWidth>(static_cast<const T*>(params.input[I]) + input[I],
                                                                     params.stride[I][0] / kWidth)...));
  }
}

template <typename T, int kWidth, typename Params, typename Formula>
__global__ void elementwise_strided(const Params params, const Formula formula, int64_t packs) {
  walk_strided<T, kWidth>(params, formula, packs, std::make_index_sequence<Params::kOperands>());
}

// Whether every row along dimension 0 starts at a multiple of `width` elements.
template <int kInputs>
bool has_aligned_rows(const Broadcast<kInputs>& b, const void* data, const int64_t* stride, int width) {
  bool aligned = is_vector_aligned(data);
  for (int dim = 1; dim < b.dims; ++dim) aligned = aligned && stride[dim] % width == 0;
  return aligned;
}

// An input that is not contiguous along dimension 0 is gathered, so its alignment does not matter.
template <typename Params>
bool rows_hold_packs(const Params& params, int width) {
  bool hold = params.size[0] % width == 0 && params.output_stride[0] == 1 &&
              has_aligned_rows(params, params.output, params.output_stride, width);
  for (int i = 0; i < Params::kOperands; ++i) {
    hold = hold && (params.stride[i][0] != 1 || has_aligned_rows(params, params.input[i], params.stride[i], width));
  }
  return hold;
}

template <typename Params>
Params in_packs(Params params, int width) {
  params.size[0] /= width;
  for (auto& stride : params.stride) stride[0] *= width;
  params.output_stride[0] *= width;
  return params;
}

template <typename T, int kWidth, typename Params, typename Formula>
const char* launch_lines(const Params& params, const Formula& formula, int64_t size, GpuStream stream) {
  constexpr int kInputs = Params::kOperands;
  Lines<kInputs> lines;
  std::copy_n(params.input, kInputs, lines.input);
  lines.output = params.output;
  MYVISION_LAUNCH((elementwise_lines<T, kWidth, kInputs, Formula>), walk_blocks(size / kWidth + size % kWidth),
                  kWalkThreads, stream, lines, formula, size);
  return launch_error();
}

template <typename T, int kWidth, typename Params, typename Formula>
const char* launch_strided(const Params& params, const Formula& formula, int64_t size, GpuStream stream) {
  const int64_t packs = size / kWidth;
  MYVISION_LAUNCH((elementwise_strided<T, kWidth, Params, Formula>), walk_blocks(packs), kWalkThreads, stream,
                  in_packs(params, kWidth), formula, packs);
  return launch_error();
}

template <typename Params>
bool lines_are_aligned(const Params& params) {
  bool aligned = is_vector_aligned(params.output);
  for (const void* input : params.input) aligned = aligned && is_vector_aligned(input);
  return aligned;
}

template <typename T, typename Params, typename Formula>
const char* launch_elementwise(const Params& params, const Formula& formula, GpuStream stream) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  const int64_t size = numel(params);
  if (is_one_line(params)) {
    return lines_are_aligned(params) ? launch_lines<T, kWidth>(params, formula, size, stream)
                                     : launch_lines<T, 1>(params, formula, size, stream);
  }
  return rows_hold_packs(params, kWidth) ? launch_strided<T, kWidth>(params, formula, size, stream)
                                         : launch_strided<T, 1>(params, formula, size, stream);
}

// output = formula(inputs...): the formula takes and returns numbers, of float32 for half types. Returns null, or what
// went wrong with the launch.
template <typename Params, typename Formula>
const char* elementwise(const Params& params, const Formula& formula, void* stream) {
  static_assert(sizeof(Params) + sizeof(Formula) <= 4000, "a GPU kernel takes 4 KB of arguments");
  return visit_dtype<Half, BFloat16, Params::kNumbers>(params.dtype, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    return launch_elementwise<T>(params, formula, static_cast<GpuStream>(stream));
  });
}

}  // namespace myvision
