// How the two operands of a pointwise operator are broadcast, how its output is laid out, and in which order memory is
// walked. These are torch.add's rules: the output gets the strides that torch would give it. Free of torch.
#pragma once
#include <cstdint>
#include <utility>

namespace myvision {

inline constexpr int kMaxDims = 64;  // as in torch

// Two operands and their output, strides in elements, innermost dimension first.
struct Broadcast {
  int dims;
  int64_t size[kMaxDims];
  int64_t x_stride[kMaxDims];  // 0 where x is repeated
  int64_t y_stride[kMaxDims];  // 0 where y is repeated
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

inline int64_t numel(const Broadcast& b) {
  int64_t product = 1;
  for (int dim = 0; dim < b.dims; ++dim) product *= b.size[dim];
  return product;
}

// Whether memory holds the dimensions in this order without a gap; the stride of a single element does not matter.
inline bool is_packed(const Broadcast& b, const int64_t* stride, const int* order) {
  int64_t expected = 1;
  for (int i = 0; i < b.dims; ++i) {
    if (b.size[order[i]] != 1 && stride[order[i]] != expected) return false;
    expected *= b.size[order[i]];
  }
  return true;
}

// The same for whatever order; no dimension may be empty.
inline bool is_dense(const Broadcast& b, const int64_t* stride) {
  for (int64_t expected = 1, volume = numel(b); expected != volume;) {
    int dim = 0;
    while (dim < b.dims && (b.size[dim] == 1 || stride[dim] != expected)) ++dim;
    if (dim == b.dims) return false;
    expected *= b.size[dim];
  }
  return true;
}

inline void pack(Broadcast& b, const int* order) {
  int64_t stride = 1;
  for (int i = 0; i < b.dims; ++i) {
    b.output_stride[order[i]] = stride;
    stride *= b.size[order[i]];
  }
}

inline void pack_contiguous(Broadcast& b) {
  int64_t stride = 1;
  for (int dim = 0; dim < b.dims; ++dim) {
    b.output_stride[dim] = stride;
    stride *= b.size[dim] > 0 ? b.size[dim] : 1;
  }
}

// Operands of one shape that lie densely in one and the same order: the output lies like them, and all three are walked
// as one line. Returns whether that is so.
inline bool lay_out_alike(Broadcast& b, const int* identity) {
  static constexpr int kChannelsLast[] = {2, 0, 1, 3};  // C, W, H, N
  if (numel(b) == 0 || (is_packed(b, b.x_stride, identity) && is_packed(b, b.y_stride, identity))) {
    pack_contiguous(b);
    return true;
  }
  if (b.dims == 4 && is_packed(b, b.x_stride, kChannelsLast) && is_packed(b, b.y_stride, kChannelsLast)) {
    pack(b, kChannelsLast);
    return true;
  }
  for (int dim = 0; dim < b.dims; ++dim) {
    if (b.x_stride[dim] != b.y_stride[dim]) return false;
    b.output_stride[dim] = b.x_stride[dim];
  }
  return is_dense(b, b.x_stride);
}

// 1 if dimension `inner` has to be walked outside of `outer`, -1 if inside, 0 if the strides do not say.
// torch.add(y, x, alpha=2) asks y first.
inline int compare(const Broadcast& b, int inner, int outer) {
  for (const int64_t* stride : {b.y_stride, b.x_stride}) {
    if (stride[inner] == 0 || stride[outer] == 0) continue;
    if (stride[inner] != stride[outer]) return stride[inner] < stride[outer] ? -1 : 1;
    if (b.size[inner] > b.size[outer]) return 1;
  }
  return 0;
}

// Insertion sort that passes over undecided pairs, as torch does it: `compare` is no total order.
inline void sort_by_stride(const Broadcast& b, int* order) {
  for (int i = 1; i < b.dims; ++i) {
    for (int at = i, below = i - 1; below >= 0; --below) {
      const int comparison = compare(b, order[below], order[at]);
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
inline void reorder_and_merge(Broadcast& b, const int* order) {
  const Broadcast from = b;
  b.dims = 0;
  for (int i = 0; i < from.dims; ++i) {
    const int dim = order[i];
    if (from.size[dim] == 1) continue;
    const int last = b.dims - 1;
    if (last >= 0 && from.x_stride[dim] == b.x_stride[last] * b.size[last] &&
        from.y_stride[dim] == b.y_stride[last] * b.size[last] &&
        from.output_stride[dim] == b.output_stride[last] * b.size[last]) {
      b.size[last] *= from.size[dim];
      continue;
    }
    b.size[b.dims] = from.size[dim];
    b.x_stride[b.dims] = from.x_stride[dim];
    b.y_stride[b.dims] = from.y_stride[dim];
    b.output_stride[b.dims] = from.output_stride[dim];
    ++b.dims;
  }
}

inline void walk_as_one_line(Broadcast& b) {
  b.size[0] = numel(b);
  b.x_stride[0] = b.y_stride[0] = b.output_stride[0] = 1;
  b.dims = 1;
}

// False where the shapes do not go together.
inline bool broadcast_sizes(const Shape& x, const Shape& y, Broadcast& b) {
  b.dims = static_cast<int>(x.dims > y.dims ? x.dims : y.dims);
  for (int dim = 0; dim < b.dims; ++dim) {
    const int64_t x_size = size_at(x, dim), y_size = size_at(y, dim);
    if (x_size != y_size && x_size != 1 && y_size != 1) return false;
    b.size[dim] = x_size == 1 ? y_size : x_size;
    b.x_stride[dim] = stride_at(x, dim, b.size[dim]);
    b.y_stride[dim] = stride_at(y, dim, b.size[dim]);
  }
  return true;
}

inline void set_output_shape(const Broadcast& b, OutputShape& output) {
  output.dims = b.dims;
  for (int dim = 0; dim < b.dims; ++dim) {
    output.sizes[b.dims - 1 - dim] = b.size[dim];
    output.strides[b.dims - 1 - dim] = b.output_stride[dim];
  }
}

}  // namespace detail

// Fills in the shape of the output and how to walk all three: in the order of the output's memory, dimensions merged,
// at least one of them. False where the shapes do not go together. Neither tensor may have more than kMaxDims.
inline bool broadcast(const Shape& x, const Shape& y, OutputShape& output, Broadcast& b) {
  if (!detail::broadcast_sizes(x, y, b)) return false;
  int order[kMaxDims];
  for (int dim = 0; dim < b.dims; ++dim) order[dim] = dim;
  const bool alike = detail::same_shape(x, y) && detail::lay_out_alike(b, order);
  if (!alike) {
    detail::sort_by_stride(b, order);
    detail::is_identity(order, b.dims) ? detail::pack_contiguous(b) : detail::pack(b, order);
  }
  detail::set_output_shape(b, output);
  if (!alike) detail::reorder_and_merge(b, order);
  if (alike || b.dims == 0) detail::walk_as_one_line(b);
  return true;
}

}  // namespace myvision
