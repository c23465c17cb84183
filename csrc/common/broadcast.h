// How the operands of an element-wise operator are broadcast, how its output is laid out, and in which order memory is
// walked. These are the rules of torch's TensorIterator: the output gets the strides that torch would give it. Free of
// torch.
#pragma once
#include <cstdint>
#include <utility>

namespace myvision {

inline constexpr int kMaxDims = 64;  // as in torch

// The operands and their output, strides in elements, innermost dimension first.
template <int kInputs>
struct Broadcast {
  static constexpr int kOperands = kInputs;

  int dims;
  int64_t size[kMaxDims];
  int64_t stride[kInputs][kMaxDims];  // 0 where an operand is repeated
  int64_t output_stride[kMaxDims];
};

// What a tensor says of itself: outermost dimension first.
struct Shape {
  int64_t dims;
  const int64_t* sizes;
  const int64_t* strides;
};

struct OutputShape {
  int dims;
  int64_t sizes[kMaxDims];
  int64_t strides[kMaxDims];
};

template <int kInputs>
int64_t numel(const Broadcast<kInputs>& b) {
  int64_t product = 1;
  for (int dim = 0; dim < b.dims; ++dim) product *= b.size[dim];
  return product;
}

// Whether every tensor is one gapless line, so that element i of each lies at position i.
template <int kInputs>
bool is_one_line(const Broadcast<kInputs>& b) {
  bool line = b.dims == 1 && b.output_stride[0] == 1;
  for (const auto& stride : b.stride) line = line && stride[0] == 1;
  return line;
}

namespace detail {

inline int64_t size_at(const Shape& shape, int dim) { return dim < shape.dims ? shape.sizes[shape.dims - 1 - dim] : 1; }

inline int64_t stride_at(const Shape& shape, int dim, int64_t broadcast_size) {
  return dim < shape.dims && size_at(shape, dim) == broadcast_size ? shape.strides[shape.dims - 1 - dim] : 0;
}

inline bool same_shape(const Shape& x, const Shape& y) {
  bool same = x.dims == y.dims;
  for (int64_t dim = 0; same && dim < x.dims; ++dim) same = x.sizes[dim] == y.sizes[dim];
  return same;
}

template <int kInputs>
bool same_shapes(const Shape (&shapes)[kInputs]) {
  for (int i = 1; i < kInputs; ++i) {
    if (!same_shape(shapes[0], shapes[i])) return false;
  }
  return true;
}

// Whether memory holds the dimensions in this order without a gap; the stride of a single element does not matter.
template <int kInputs>
bool is_packed(const Broadcast<kInputs>& b, const int* order) {
  int64_t expected = 1;
  for (int i = 0; i < b.dims; ++i) {
    const int dim = order[i];
    for (const auto& stride : b.stride) {
      if (b.size[dim] != 1 && stride[dim] != expected) return false;
    }
    expected *= b.size[dim];
  }
  return true;
}

// The same of one tensor, for whatever order; no dimension may be empty.
template <int kInputs>
bool is_dense(const Broadcast<kInputs>& b, const int64_t* stride) {
  for (int64_t expected = 1, volume = numel(b); expected != volume;) {
    int dim = 0;
    while (dim < b.dims && (b.size[dim] == 1 || stride[dim] != expected)) ++dim;
    if (dim == b.dims) return false;
    expected *= b.size[dim];
  }
  return true;
}

template <int kInputs>
void pack(Broadcast<kInputs>& b, const int* order) {
  int64_t stride = 1;
  for (int i = 0; i < b.dims; ++i) {
    b.output_stride[order[i]] = stride;
    stride *= b.size[order[i]];
  }
}

template <int kInputs>
void pack_contiguous(Broadcast<kInputs>& b) {
  int64_t stride = 1;
  for (int dim = 0; dim < b.dims; ++dim) {
    b.output_stride[dim] = stride;
    stride *= b.size[dim] > 0 ? b.size[dim] : 1;
  }
}

// Operands of one shape that lie densely in one and the same order: the output lies like them, and all are walked as
// one line. Returns whether that is so.
template <int kInputs>
bool lay_out_alike(Broadcast<kInputs>& b, const int* identity) {
  static constexpr int kChannelsLast[] = {2, 0, 1, 3};  // C, W, H, N
  if (numel(b) == 0 || is_packed(b, identity)) {
    pack_contiguous(b);
    return true;
  }
  if (b.dims == 4 && is_packed(b, kChannelsLast)) {
    pack(b, kChannelsLast);
    return true;
  }
  for (int dim = 0; dim < b.dims; ++dim) {
    for (const auto& stride : b.stride) {
      if (stride[dim] != b.stride[0][dim]) return false;
    }
    b.output_stride[dim] = b.stride[0][dim];
  }
  return is_dense(b, b.stride[0]);
}

// 1 if dimension `inner` has to be walked outside of `outer`, -1 if inside, 0 if the strides do not say. The operand
// numbered `leader` is asked first.
template <int kInputs>
int compare(const Broadcast<kInputs>& b, int leader, int inner, int outer) {
  for (int i = 0; i < kInputs; ++i) {
    const int64_t* stride = b.stride[(leader + i) % kInputs];
    if (stride[inner] == 0 || stride[outer] == 0) continue;
    if (stride[inner] != stride[outer]) return stride[inner] < stride[outer] ? -1 : 1;
    if (b.size[inner] > b.size[outer]) return 1;
  }
  return 0;
}

// Insertion sort that passes over undecided pairs, as torch does it: `compare` is no total order.
template <int kInputs>
void sort_by_stride(const Broadcast<kInputs>& b, int leader, int* order) {
  for (int i = 1; i < b.dims; ++i) {
    for (int at = i, below = i - 1; below >= 0; --below) {
      const int comparison = compare(b, leader, order[below], order[at]);
      if (comparison < 0) break;
      if (comparison > 0) {
        std::swap(order[below], order[at]);
        at = below;
      }
    }
  }
}

inline bool is_identity(const int* order, int dims) {
  for (int i = 0; i < dims; ++i) {
    if (order[i] != i) return false;
  }
  return true;
}

// Puts the dimensions in this order and merges neighbours that every tensor walks as one.
template <int kInputs>
void reorder_and_merge(Broadcast<kInputs>& b, const int* order) {
  const Broadcast<kInputs> from = b;
  b.dims = 0;
  for (int i = 0; i < from.dims; ++i) {
    const int dim = order[i], last = b.dims - 1;
    if (from.size[dim] == 1) continue;
    bool merges = last >= 0 && from.output_stride[dim] == b.output_stride[last] * b.size[last];
    for (int j = 0; j < kInputs && merges; ++j) merges = from.stride[j][dim] == b.stride[j][last] * b.size[last];
    if (merges) {
      b.size[last] *= from.size[dim];
      continue;
    }
    b.size[b.dims] = from.size[dim];
    for (int j = 0; j < kInputs; ++j) b.stride[j][b.dims] = from.stride[j][dim];
    b.output_stride[b.dims] = from.output_stride[dim];
    ++b.dims;
  }
}

template <int kInputs>
void walk_as_one_line(Broadcast<kInputs>& b) {
  b.size[0] = numel(b);
  for (auto& stride : b.stride) stride[0] = 1;
  b.output_stride[0] = 1;
  b.dims = 1;
}

// False where the shapes do not go together.
template <int kInputs>
bool broadcast_sizes(const Shape (&shapes)[kInputs], Broadcast<kInputs>& b) {
  int64_t dims = 0;
  for (const Shape& shape : shapes) dims = shape.dims > dims ? shape.dims : dims;
  b.dims = static_cast<int>(dims);
  for (int dim = 0; dim < b.dims; ++dim) {
    b.size[dim] = 1;
    for (const Shape& shape : shapes) {
      const int64_t size = size_at(shape, dim);
      if (size == 1) continue;
      if (b.size[dim] != 1 && b.size[dim] != size) return false;
      b.size[dim] = size;
    }
    for (int i = 0; i < kInputs; ++i) b.stride[i][dim] = stride_at(shapes[i], dim, b.size[dim]);
  }
  return true;
}

template <int kInputs>
void set_output_shape(const Broadcast<kInputs>& b, OutputShape& output) {
  output.dims = b.dims;
  for (int dim = 0; dim < b.dims; ++dim) {
    output.sizes[b.dims - 1 - dim] = b.size[dim];
    output.strides[b.dims - 1 - dim] = b.output_stride[dim];
  }
}

}  // namespace detail

// Fills in the shape of the output and how to walk all tensors: in the order of the output's memory, dimensions merged,
// at least one of them. Where the operands lie in different orders, the one numbered `leader` decides first, then those
// after it. False where the shapes do not go together. No tensor may have more than kMaxDims.
template <int kInputs>
bool broadcast(const Shape (&shapes)[kInputs], int leader, OutputShape& output, Broadcast<kInputs>& b) {
  if (!detail::broadcast_sizes(shapes, b)) return false;
  int order[kMaxDims];
  for (int dim = 0; dim < b.dims; ++dim) order[dim] = dim;
  const bool alike = detail::same_shapes(shapes) && detail::lay_out_alike(b, order);
  if (!alike) {
    detail::sort_by_stride(b, leader, order);
    detail::is_identity(order, b.dims) ? detail::pack_contiguous(b) : detail::pack(b, order);
  }
  detail::set_output_shape(b, output);
  if (!alike) detail::reorder_and_merge(b, order);
  if (alike || b.dims == 0) detail::walk_as_one_line(b);
  return true;
}

}  // namespace myvision
