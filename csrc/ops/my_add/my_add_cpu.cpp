// my_add on the CPU, compiled once per instruction set.
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include "common/parallel.h"
#include "ops/my_add/my_add.h"

#if defined(CPU_CAPABILITY_AVX512)
// Bound by memory, where vectors of 512 bits were 3 to 12 % slower than torch.add and those of 256 bits as fast.
namespace myvision::AVX2::my_add {
CpuKernel<MyAddParams> forward;
}
namespace myvision::AVX512::my_add {
void forward(const MyAddParams& params) { AVX2::my_add::forward(params); }
}  // namespace myvision::AVX512::my_add
#else

namespace myvision::CPU_CAPABILITY::my_add {
namespace {

constexpr int64_t kBlock = 512;    // elements brought together at a time: three blocks of any type stay in L1
constexpr int64_t kGrain = 32768;  // elements that are worth a thread
constexpr int kVectors = 4;        // that are loaded before any is stored

using at::vec::Vectorized;

// 2 * x + y, as x + x + y: the same bits on every instruction set, whether or not it fuses products.
template <typename T>
inline Vectorized<T> formula(const Vectorized<T>& x, const Vectorized<T>& y) {
  if constexpr (at::vec::is_reduced_floating_point_v<T>) {
    const auto [x0, x1] = at::vec::convert_to_float<T>(x);
    const auto [y0, y1] = at::vec::convert_to_float<T>(y);
    return at::vec::convert_from_float<T>(x0 + x0 + y0, x1 + x1 + y1);
  } else {
    return x + x + y;
  }
}

template <typename T>
void add(const T* x, const T* y, T* output, int64_t size) {
  using Vector = Vectorized<T>;
  int64_t i = 0;
  // Several vectors at a time: the compiler may not move loads before stores, and memory answers the faster.
  for (; i <= size - kVectors * Vector::size(); i += kVectors * Vector::size()) {
    Vector sums[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      const int64_t at = i + j * Vector::size();
      sums[j] = formula(Vector::loadu(x + at), Vector::loadu(y + at));
    }
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) sums[j].store(output + i + j * Vector::size());
  }
  for (; i <= size - Vector::size(); i += Vector::size()) {
    formula(Vector::loadu(x + i), Vector::loadu(y + i)).store(output + i);
  }
  if (i < size) {
    const int count = static_cast<int>(size - i);
    formula(Vector::loadu(x + i, count), Vector::loadu(y + i, count)).store(output + i, count);
  }
}

// Reads one operand in the order of the output's memory.
template <typename T>
class Reader {
 public:
  Reader(const void* data, const int64_t* stride, const MyAddParams& params, int64_t begin)
      : data_(static_cast<const T*>(data)), stride_(stride), params_(params) {
    for (int dim = 0; dim < params.dims; ++dim) {
      index_[dim] = begin % params.size[dim];
      begin /= params.size[dim];
      data_ += index_[dim] * stride[dim];
    }
  }

  // The next `count` elements, at most kBlock unless all of memory is one line: where they lie, or gathered.
  const T* next(int64_t count) {
    if (stride_[0] == 1 && index_[0] + count <= params_.size[0]) {
      const T* run = data_;
      advance(count);
      return run;
    }
    for (int64_t done = 0; done < count;) {
      const int64_t left_in_row = params_.size[0] - index_[0];
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
    for (int dim = 0; index_[dim] == params_.size[dim] && dim + 1 < params_.dims; ++dim) {
      data_ += stride_[dim + 1] - params_.size[dim] * stride_[dim];
      index_[dim] = 0;
      ++index_[dim + 1];
    }
  }

  const T* data_;
  const int64_t* stride_;
  const MyAddParams& params_;
  int64_t index_[kMaxDims];
  T block_[kBlock];
};

bool is_one_line(const MyAddParams& params) {
  return params.dims == 1 && params.x_stride[0] == 1 && params.y_stride[0] == 1;
}

template <typename T>
void add_range(const MyAddParams& params, int64_t begin, int64_t end) {
  T* output = static_cast<T*>(params.output);
  if (is_one_line(params)) {
    const T* x = static_cast<const T*>(params.x);
    const T* y = static_cast<const T*>(params.y);
    return add(x + begin, y + begin, output + begin, end - begin);
  }
  Reader<T> x(params.x, params.x_stride, params, begin);
  Reader<T> y(params.y, params.y_stride, params, begin);
  for (int64_t i = begin; i < end; i += kBlock) {
    const int64_t count = end - i < kBlock ? end - i : kBlock;
    add(x.next(count), y.next(count), output + i, count);
  }
}

template <typename T>
void add_all(const MyAddParams& params) {
  int64_t numel = 1;
  for (int dim = 0; dim < params.dims; ++dim) numel *= params.size[dim];
  if (numel <= kGrain) return add_range<T>(params, 0, numel);
  parallel_for(0, numel, kGrain, [&](int64_t begin, int64_t end) { add_range<T>(params, begin, end); });
}

}  // namespace

void forward(const MyAddParams& params) {
  switch (params.dtype) {
    case Dtype::Float64:
      return add_all<double>(params);
    case Dtype::Float32:
      return add_all<float>(params);
    case Dtype::Float16:
      return add_all<c10::Half>(params);
    case Dtype::BFloat16:
      return add_all<c10::BFloat16>(params);
    case Dtype::Int64:
      return add_all<int64_t>(params);
    case Dtype::Int32:
      return add_all<int32_t>(params);
    case Dtype::Int16:
      return add_all<int16_t>(params);
    case Dtype::Int8:
      return add_all<int8_t>(params);
    case Dtype::UInt8:
      return add_all<uint8_t>(params);
  }
}

}  // namespace myvision::CPU_CAPABILITY::my_add
#endif
