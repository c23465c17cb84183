// deform_conv2d for torch: schema, checks, allocation, registration. The kernels see only DeformConv2dParams.
#include "ops/deform_conv2d/deform_conv2d.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <vector>

#include "common/checks.h"

namespace myvision {
namespace {

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

constexpr const char* kOp = "deform_conv2d";
constexpr int64_t kMaxGeometry = int64_t{1} << 20;  // of strides, dilations, ...: their products stay inside int64_t
constexpr int64_t kMaxSide = std::numeric_limits<int32_t>::max();  // AxisSample counts pixels in 32 bits

// ------------------------------------------------------------------------------------------------ checks
// myvision/ops/deform_conv2d.py makes the same checks in the same order for the fake.
struct Geometry {
  IntArray stride, padding, dilation;
  int64_t groups, offset_groups;
};

void check_rank(const char* name, const Tensor& tensor, int64_t rank, const char* layout) {
  MYVISION_CHECK(kOp, tensor.dim() == rank, name, " must have ", rank, " dimensions (", layout, "), but has shape ",
                 shape_name(tensor.sizes()));
}

bool is_half(const Tensor& tensor) {
  return tensor.scalar_type() == ScalarType::Half || tensor.scalar_type() == ScalarType::BFloat16;
}

// Offsets are places: float32 ones may stand beside half types, which would round them.
Dtype check_offset_dtype(const Tensor& offset, const Tensor& input) {
  if (!is_half(input)) {
    check_same_dtype(kOp, {"offset", offset}, {"input", input});
  } else {
    MYVISION_CHECK(kOp, offset.scalar_type() == input.scalar_type() || offset.scalar_type() == ScalarType::Float,
                   "offset must have the dtype of input, ", name_of(input.scalar_type()), ", or float32, but has ",
                   name_of(offset.scalar_type()));
  }
  return *to_dtype(offset.scalar_type());
}

void check_range(const char* name, int64_t value, int64_t least, int64_t most = kMaxGeometry) {
  MYVISION_CHECK(kOp, value >= least && value <= most, name, " must be between ", least, " and ", most, ", but is ",
                 value);
}

void check_pair(const char* name, IntArray pair, int64_t least) {
  MYVISION_CHECK(kOp, pair.size() == 2, name, " must have 2 elements (height, width), but has ", pair.size());
  for (int64_t value : pair) check_range(name, value, least);
}

Dtype check_input(const Tensor& input) {
  check_rank("input", input, 4, "batch, in_channels, height, width");
  return check_floating(kOp, {"input", input});
}

void check_other(const char* name, const Tensor& tensor, int64_t rank, const char* layout, const Tensor& input) {
  check_rank(name, tensor, rank, layout);
  check_like(kOp, {name, tensor}, {"input", input});
}

void check_geometry(const Geometry& geometry) {
  check_pair("stride", geometry.stride, 1);
  check_pair("padding", geometry.padding, 0);
  check_pair("dilation", geometry.dilation, 1);
  check_range("groups", geometry.groups, 1);
  check_range("offset_groups", geometry.offset_groups, 1);
}

void check_sizes(const DeformConv2dParams& p, int64_t share) {
  check_range("in_channels (input.shape[1])", p.in_channels, 1);
  check_range("height (input.shape[2])", p.height, 1, kMaxSide);
  check_range("width (input.shape[3])", p.width, 1, kMaxSide);
  check_range("kernel height (weight.shape[2])", p.kernel_h, 1);
  check_range("kernel width (weight.shape[3])", p.kernel_w, 1);
  MYVISION_CHECK(kOp, p.in_channels % p.groups == 0 && p.in_channels / p.groups == share, "weight.shape[1] (", share,
                 ") times groups (", p.groups, ") must be the number of input channels, ", p.in_channels);
  MYVISION_CHECK(kOp, p.out_channels % p.groups == 0, "out_channels (weight.shape[0] = ", p.out_channels,
                 ") must be a multiple of groups (", p.groups, ")");
  MYVISION_CHECK(kOp, p.in_channels % p.offset_groups == 0, "in_channels (input.shape[1] = ", p.in_channels,
                 ") must be a multiple of offset_groups (", p.offset_groups, ")");
}

#ifndef MYVISION_GPU
// The CPU kernels number the pixels of a padded plane in 32 bits.
void check_plane(const DeformConv2dParams& p) {
  MYVISION_CHECK(kOp, (p.height + 3) * (p.width + 2) <= kMaxSide, "input has planes of ", p.height, " x ", p.width,
                 " pixels; on the CPU they must have less than 2^31, a border included");
}
#endif

void set_output_size(DeformConv2dParams& p) {
  const int64_t kernel_h = p.dilation_h * (p.kernel_h - 1) + 1, kernel_w = p.dilation_w * (p.kernel_w - 1) + 1;
  const int64_t height = p.height + 2 * p.padding_h, width = p.width + 2 * p.padding_w;
  MYVISION_CHECK(kOp, kernel_h <= height && kernel_w <= width, "the dilated kernel, ", kernel_h, " x ", kernel_w,
                 ", must fit into the padded input, ", height, " x ", width);
  p.out_height = (height - kernel_h) / p.stride_h + 1;
  p.out_width = (width - kernel_w) / p.stride_w + 1;
}

Strided4 strided(const Tensor& tensor, const void* data) {
  Strided4 view{const_cast<void*>(data), {}};
  std::ranges::copy(tensor.strides(), view.stride);
  return view;
}

Strided4 readable(const Tensor& tensor) { return strided(tensor, tensor.const_data_ptr()); }
Strided4 writable(const Tensor& tensor) { return strided(tensor, tensor.mutable_data_ptr()); }

// Checks every argument and describes the call; the output is still to be set.
DeformConv2dParams checked_params(const Tensor& input, const Tensor& weight, const Tensor& offset,
                                  const std::optional<Tensor>& mask, const std::optional<Tensor>& bias,
                                  const Geometry& geometry) {
  constexpr const char* kOffsetLayout =
      "batch, 2 * offset_groups * kernel_height * kernel_width, out_height, out_width";
  constexpr const char* kMaskLayout = "batch, offset_groups * kernel_height * kernel_width, out_height, out_width";
  DeformConv2dParams p{};
  p.dtype = check_input(input);
  check_other("weight", weight, 4, "out_channels, in_channels / groups, kernel_height, kernel_width", input);
  check_rank("offset", offset, 4, kOffsetLayout);
  p.offset_dtype = check_offset_dtype(offset, input);
  check_same_device(kOp, {"offset", offset}, {"input", input});
  if (mask) check_other("mask", *mask, 4, kMaskLayout, input);
  if (bias) check_other("bias", *bias, 1, "out_channels", input);
  check_geometry(geometry);

  p.batch = input.size(0), p.in_channels = input.size(1), p.height = input.size(2), p.width = input.size(3);
  p.out_channels = weight.size(0), p.kernel_h = weight.size(2), p.kernel_w = weight.size(3);
  p.stride_h = geometry.stride[0], p.stride_w = geometry.stride[1];
  p.padding_h = geometry.padding[0], p.padding_w = geometry.padding[1];
  p.dilation_h = geometry.dilation[0], p.dilation_w = geometry.dilation[1];
  p.groups = geometry.groups, p.offset_groups = geometry.offset_groups;
  check_sizes(p, weight.size(1));
  set_output_size(p);

  const int64_t samples = p.offset_groups * p.kernel_h * p.kernel_w;
  check_shape(kOp, {"offset", offset}, {p.batch, 2 * samples, p.out_height, p.out_width}, kOffsetLayout);
  if (mask) check_shape(kOp, {"mask", *mask}, {p.batch, samples, p.out_height, p.out_width}, kMaskLayout);
  if (bias) check_shape(kOp, {"bias", *bias}, {p.out_channels}, "out_channels");
#ifndef MYVISION_GPU
  check_plane(p);
#endif
  p.input = readable(input), p.weight = readable(weight), p.offset = readable(offset);
  if (mask) p.mask = readable(*mask);
  if (bias) p.bias = readable(*bias);
  return p;
}

// ------------------------------------------------------------------------------------------------ allocation
Tensor new_output(const DeformConv2dParams& p, const Tensor& input, const Tensor& weight) {
  using torch::headeronly::MemoryFormat;
  const auto format =
      is_channels_last(input) || is_channels_last(weight) ? MemoryFormat::ChannelsLast : MemoryFormat::Contiguous;
  return torch::stable::empty({p.batch, p.out_channels, p.out_height, p.out_width}, input.scalar_type(), std::nullopt,
                              input.device(), std::nullopt, format);
}

// ------------------------------------------------------------------------------------------------ launch
void run_forward(const DeformConv2dParams& params, const Tensor& input) {
  launch(kOp, input, deform_conv2d_forward_kernel, params);
}

void run_backward(const DeformConv2dParams& params, const DeformConv2dGradients& gradients, const Tensor& input) {
  launch(kOp, input, deform_conv2d_backward_kernel, params, gradients);
}

// ------------------------------------------------------------------------------------------------ operators
Tensor deform_conv2d(const Tensor& input, const Tensor& weight, const Tensor& offset, const std::optional<Tensor>& mask,
                     const std::optional<Tensor>& bias, IntArray stride, IntArray padding, IntArray dilation,
                     int64_t groups, int64_t offset_groups) {
  const Geometry geometry{stride, padding, dilation, groups, offset_groups};
  DeformConv2dParams params = checked_params(input, weight, offset, mask, bias, geometry);
  const Tensor output = new_output(params, input, weight);
  if (output.numel() == 0) return output;
  params.output = writable(output);
  run_forward(params, input);
  return output;
}

// A gradient of the shape and layout of `like`, or an undefined tensor where it is not wanted.
Tensor new_gradient(bool wanted, const Tensor& like, Strided4& view) {
  if (!wanted) return Tensor();
  const Tensor gradient = torch::stable::empty_like(like);
  view = writable(gradient);
  return gradient;
}

void zero_if_defined(Tensor& gradient) {
  if (gradient.defined()) torch::stable::zero_(gradient);
}

Gradients deform_conv2d_backward(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                                 const Tensor& offset, const std::optional<Tensor>& mask, IntArray stride,
                                 IntArray padding, IntArray dilation, int64_t groups, int64_t offset_groups,
                                 const std::vector<bool>& output_mask, bool deterministic) {
  const Geometry geometry{stride, padding, dilation, groups, offset_groups};
  DeformConv2dParams params = checked_params(input, weight, offset, mask, std::nullopt, geometry);
  constexpr const char* kOutputLayout = "batch, out_channels, out_height, out_width";
  check_other("grad_output", grad_output, 4, kOutputLayout, input);
  check_shape(kOp, {"grad_output", grad_output},
              {params.batch, params.out_channels, params.out_height, params.out_width}, kOutputLayout);
  check_output_mask(kOp, output_mask, 5);
  MYVISION_CHECK(kOp, mask || !output_mask[3], "output_mask asks for the gradient of mask, but mask is None");

  params.output = readable(grad_output);
  DeformConv2dGradients views{};
  views.deterministic = deterministic;
  Tensor bias_like = output_mask[4] ? torch::stable::new_empty(weight, {params.out_channels}) : Tensor();
  const Gradients gradients{new_gradient(output_mask[0], input, views.input),
                            new_gradient(output_mask[1], weight, views.weight),
                            new_gradient(output_mask[2], offset, views.offset),
                            new_gradient(output_mask[3], mask.value_or(input), views.mask),
                            new_gradient(output_mask[4], bias_like, views.bias)};
  if (grad_output.numel() > 0) {
    run_backward(params, views, input);
  } else {
    std::apply([](auto... gradient) { (zero_if_defined(gradient), ...); }, gradients);
  }
  return gradients;
}

}  // namespace

}  // namespace myvision

MYVISION_SCHEMAS(m) {
  m.def(
      "deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor? mask, Tensor? bias, int[2] stride, "
      "int[2] padding, int[2] dilation, int groups, int offset_groups) -> Tensor");
  m.def(
      "_deform_conv2d_backward(Tensor grad_output, Tensor input, Tensor weight, Tensor offset, Tensor? mask, "
      "int[2] stride, int[2] padding, int[2] dilation, int groups, int offset_groups, bool[5] output_mask, "
      "bool deterministic) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
}

MYVISION_IMPLEMENTATIONS(m) {
  m.impl("deform_conv2d", TORCH_BOX(&myvision::deform_conv2d));
  m.impl("_deform_conv2d_backward", TORCH_BOX(&myvision::deform_conv2d_backward));
}
