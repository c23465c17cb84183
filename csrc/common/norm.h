// What the glue of the norms shares: checks, layouts, and the view of any tensor as [batch, channels, height, width].
#pragma once
#include <algorithm>
#include <optional>
#include <string>

#include "common/broadcast.h"
#include "common/checks.h"
#include "common/strided.h"

namespace myvision {

// ------------------------------------------------------------------------------------------------ checks
// The checks stand in the order in which myvision/ops/_norm.py makes them for the fakes.
// A weight or a bias, of any floating-point type: it is cast to the type computed in.
inline void check_parameter(const char* op, const char* name, const std::optional<Tensor>& tensor, IntArray shape,
                            const Tensor& input) {
  if (!tensor) return;
  const Argument argument{name, *tensor};
  check_shape(op, argument, shape);
  check_defined(op, argument);
  check_floating(op, argument);
  check_same_device(op, argument, {"input", input});
}

// A parameter of one number a channel of input is checked likewise. Where the numbers of channels differ it is the
// input that is told of, as the parameters belong to a model and so are seldom what is wrong.
inline void check_channel_parameter(const char* op, const char* name, const std::optional<Tensor>& tensor,
                                    const Tensor& input) {
  if (!tensor) return;
  MYVISION_CHECK(op, tensor->dim() != 1 || tensor->size(0) == input.size(1), "input must have ", tensor->size(0),
                 " channels, as ", name, " has, but has shape ", shape_name(input.sizes()));
  check_parameter(op, name, tensor, {input.size(1)}, input);
}

// A residual or a gradient of the output must be like input.
inline void check_like_input(const char* op, const char* name, const std::optional<Tensor>& tensor,
                             const Tensor& input) {
  if (!tensor) return;
  const Argument argument{name, *tensor}, like{"input", input};
  check_defined(op, argument);
  check_same_shape(op, argument, like);
  check_like(op, argument, like);
}

// ------------------------------------------------------------------------------------------------ parameters
// Returns a parameter as the kernels take it: contiguous, in the type computed in.
inline std::optional<Tensor> as_reals(const std::optional<Tensor>& tensor, const Tensor& input) {
  if (!tensor) return std::nullopt;
  return torch::stable::contiguous(cast(*tensor, real_type(input)));
}

inline Tensor new_reals(const Tensor& input, IntArray sizes) {
  return torch::stable::new_empty(input, sizes, real_type(input));
}

// Backward is given the statistics that forward returned.
inline void check_statistics(const char* op, const Tensor& statistics, IntArray shape, const Tensor& input) {
  MYVISION_CHECK(op,
                 std::ranges::equal(statistics.sizes(), shape) && statistics.scalar_type() == real_type(input) &&
                     statistics.is_contiguous(),
                 "statistics must be contiguous ", name_of(real_type(input)), " of shape ", shape_name(shape),
                 ", but are ", name_of(statistics.scalar_type()), " of shape ", shape_name(statistics.sizes()));
  check_same_device(op, {"statistics", statistics}, {"input", input});
}

// ------------------------------------------------------------------------------------------------ layout
// Returns an uninitialised, dense tensor of the shape and type of `like`, channels_last or contiguous.
inline Tensor new_dense(const Tensor& like, bool channels_last) {
  const IntArray sizes = like.sizes();
  const int dims = static_cast<int>(sizes.size());
  int64_t strides[kMaxDims];
  int64_t stride = channels_last ? sizes[1] : 1;
  for (int dim = dims - 1; dim >= 0; --dim) {
    if (channels_last && dim == 1) {
      strides[dim] = 1;
      continue;
    }
    strides[dim] = stride;
    stride *= std::max<int64_t>(sizes[dim], 1);
  }
  return empty_strided(dims, sizes.data(), strides, like.scalar_type(), like);
}

// Whether a tensor is contiguous or channels_last, with nothing between its numbers.
inline bool is_dense(const Tensor& tensor) {
  if (tensor.is_contiguous()) return true;
  int64_t span = 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) span += (tensor.size(dim) - 1) * tensor.stride(dim);
  return is_channels_last(tensor) && span == tensor.numel();
}

// ------------------------------------------------------------------------------------------------ views
// Tensors of one shape and where a kernel's parameters want them.
class NormOperands {
 public:
  void read(const std::optional<Tensor>& tensor, Strided4& view) {
    if (tensor && tensor->defined()) operands_[count_++] = {*tensor, &view, false};
  }
  void write(const Tensor& tensor, Strided4& view) {
    if (tensor.defined()) operands_[count_++] = {tensor, &view, true};
  }

  // Describes all of them as [batch, channels, height, width] to params: dimensions [first, last) are the channels,
  // what stands before and after them the rest. Neighbours become one wherever every tensor walks them as one. A tensor
  // that needs more dimensions than the kernels have is copied.
  template <typename Params>
  void set_views(Params& params, int first, int last) {
    if (!fits(first, last)) {
      for (int i = 0; i < count_; ++i) {
        if (!operands_[i].written) operands_[i].tensor = torch::stable::contiguous(operands_[i].tensor);
      }
    }
    const int dims = static_cast<int>(operands_[0].tensor.dim());
    const Axes before = merged(0, first), channels = merged(first, last), after = merged(last, dims);
    Axis rest[3] = {{1, {}}, {1, {}}, {1, {}}};  // batch, height, width
    for (int i = 0; i < before.count; ++i) rest[i == 0 ? 0 : 3 - before.count + i] = before.axis[i];
    for (int i = 0; i < after.count; ++i) rest[3 - after.count + i] = after.axis[i];
    const Axis channel = channels.count == 1 ? channels.axis[0] : Axis{1, {}};
    params.batch = rest[0].size, params.channels = channel.size;
    params.height = rest[1].size, params.width = rest[2].size;
    for (int i = 0; i < count_; ++i) {
      const Operand& operand = operands_[i];
      void* data =
          operand.written ? operand.tensor.mutable_data_ptr() : const_cast<void*>(operand.tensor.const_data_ptr());
      *operand.view = {data, {rest[0].stride[i], channel.stride[i], rest[1].stride[i], rest[2].stride[i]}};
    }
  }

 private:
  static constexpr int kMaxOperands = 6;
  static constexpr int kMaxAxes = 4;  // one more than the kernels take

  struct Operand {
    Tensor tensor;
    Strided4* view;
    bool written;
  };
  struct Axis {
    int64_t size;
    int64_t stride[kMaxOperands];
  };
  struct Axes {
    int count = 0;
    Axis axis[kMaxAxes];
  };

  bool fits(int first, int last) const {
    const int dims = static_cast<int>(operands_[0].tensor.dim());
    const int before = merged(0, first).count, after = merged(last, dims).count;
    return merged(first, last).count <= 1 && after <= 2 && before + after <= 3;
  }

  // Returns dimensions [begin, end), outermost first, with neighbours merged.
  Axes merged(int begin, int end) const {
    Axes axes;
    for (int dim = begin; dim < end && axes.count < kMaxAxes; ++dim) {
      const int64_t size = operands_[0].tensor.size(dim);
      if (size == 1) continue;
      const bool joins = axes.count > 0 && joins_axis(axes.axis[axes.count - 1], dim);
      Axis& axis = axes.axis[joins ? axes.count - 1 : axes.count++];
      axis.size = joins ? axis.size * size : size;
      for (int i = 0; i < count_; ++i) axis.stride[i] = operands_[i].tensor.stride(dim);
    }
    return axes;
  }

  bool joins_axis(const Axis& outer, int dim) const {
    for (int i = 0; i < count_; ++i) {
      if (outer.stride[i] != operands_[i].tensor.size(dim) * operands_[i].tensor.stride(dim)) return false;
    }
    return true;
  }

  Operand operands_[kMaxOperands];
  int count_ = 0;
};

}  // namespace myvision
