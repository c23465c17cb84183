// Element-wise operators on the CPU: an operator's file gives the formula, all else stands here. Compiled once per
// instruction set.
#pragma once
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <tuple>
#include <utility>

#include "common/elementwise_params.h"
#include "common/parallel.h"

namespace myvision::CPU_CAPABILITY {

using at::vec::Vectorized;

namespace elementwise_detail {

constexpr int64_t kBlock = 512;    // elements brought together at a time: the blocks of all operands stay in L1
constexpr int64_t kGrain = 32768;  // elements that are worth a thread
constexpr int kVectors = 4;        // that are loaded before any is stored

// The formula, in float32 for half types.
template <typename T, typename Formula, typename... Inputs>
[[gnu::always_inline]] inline Vectorized<T> evaluate(const Formula& formula, const Inputs&... inputs) {
  if constexpr (at::vec::is_reduced_floating_point_v<T>) {
    const auto of_halves = [&](const auto&... halves) __attribute__((always_inline)) {
      return at::vec::convert_from_float<T>(formula(std::get<0>(halves)...), formula(std::get<1>(halves)...));
    };
    return of_halves(at::vec::convert_to_float<T>(inputs)...);
  } else {
    return formula(inputs...);
  }
}

// Every operand is one line. The formula is a copy: what is stored might else change its numbers, for all that the
// compiler knows, and they would be loaded for every vector anew.
template <typename T, typename Formula, typename... Inputs>
void apply(const Formula formula, int64_t size, T* output, const Inputs*... inputs) {
  using Vector = Vectorized<T>;
  int64_t i = 0;
  // Several vectors at a time: the compiler may not move loads before stores, and memory answers the faster.
  for (; i <= size - kVectors * Vector::size(); i += kVectors * Vector::size()) {
    Vector results[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j)
      results[j] = evaluate<T>(formula, Vector::loadu(inputs + i + j * Vector::size())...);
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) results[j].store(output + i + j * Vector::size());
  }
  for (; i <= size - Vector::size(); i += Vector::size())
    evaluate<T>(formula, Vector::loadu(inputs + i)...).store(output + i);
  if (i < size) {
    const int count = static_cast<int>(size - i);
    evaluate<T>(formula, Vector::loadu(inputs + i, count)...).store(output + i, count);
  }
}

// Reads one operand in the order of the output's memory.
template <typename T, int kInputs>
class Reader {
 public:
  Reader(const void* data, const int64_t* stride, const Broadcast<kInputs>& broadcast, int64_t begin)
      : data_(static_cast<const T*>(data)), stride_(stride), broadcast_(broadcast) {
    for (int dim = 0; dim < broadcast.dims; ++dim) {
      index_[dim] = begin % broadcast.size[dim];
      begin /= broadcast.size[dim];
      data_ += index_[dim] * stride[dim];
    }
  }

  // The next `count` elements, at most kBlock: where they lie, or gathered.
  const T* next(int64_t count) {
    if (stride_[0] == 1 && index_[0] + count <= broadcast_.size[0]) {
      const T* run = data_;
      advance(count);
      return run;
    }
    for (int64_t done = 0; done < count;) {
      const int64_t left_in_row = broadcast_.size[0] - index_[0];
      const int64_t run = left_in_row < count - done ? left_in_row : count - done;
      for (int64_t i = 0; i < run; ++i) block_[done + i] = data_[i * stride_[0]];
      advance(run);
      done += run;
    }
    return block_;
  }

 private:
  // Goes on within the row, or to the start of the next one.
  void advance(int64_t count) {
    data_ += count * stride_[0];
    index_[0] += count;
    for (int dim = 0; index_[dim] == broadcast_.size[dim] && dim + 1 < broadcast_.dims; ++dim) {
      data_ += stride_[dim + 1] - broadcast_.size[dim] * stride_[dim];
      index_[dim] = 0;
      ++index_[dim + 1];
    }
  }

  const T* data_;
  const int64_t* stride_;
  const Broadcast<kInputs>& broadcast_;
  int64_t index_[kMaxDims];
  T block_[kBlock];
};

template <typename T, typename Params, typename Formula, std::size_t... I>
void apply_range(const Params& params, const Formula& formula, int64_t begin, int64_t end, std::index_sequence<I...>) {
  T* output = static_cast<T*>(params.output);
  if (is_one_line(params))
    return apply(formula, end - begin, output + begin, static_cast<const T*>(params.input[I]) + begin...);
  Reader<T, Params::kOperands> readers[] = {{params.input[I], params.stride[I], params, begin}...};
  for (int64_t i = begin; i < end; i += kBlock) {
    const int64_t count = end - i < kBlock ? end - i : kBlock;
    apply(formula, count, output + i, readers[I].next(count)...);
  }
}

template <typename T, typename Params, typename Formula>
void apply_all(const Params& params, const Formula& formula) {
  const int64_t size = numel(params);
  const auto range = [&](int64_t begin, int64_t end) {
    apply_range<T>(params, formula, begin, end, std::make_index_sequence<Params::kOperands>());
  };
  if (size <= kGrain) return range(0, size);
  parallel_for(0, size, kGrain, range);
}

}  // namespace elementwise_detail

// output = formula(inputs...): the formula takes and returns vectors, of float32 for half types.
template <typename Params, typename Formula>
void elementwise(const Params& params, const Formula& formula) {
#if defined(CPU_CAPABILITY_AVX512)
  __builtin_trap();  // MYVISION_ELEMENTWISE_KERNEL never picks AVX-512, so nothing is compiled for it
#else
  visit_dtype<c10::Half, c10::BFloat16, Params::kNumbers>(params.dtype, [&](auto* element) {
    elementwise_detail::apply_all<std::remove_pointer_t<decltype(element)>>(params, formula);
  });
#endif
}

}  // namespace myvision::CPU_CAPABILITY
