// deform_conv2d on the CPU, element by element: plain, until the fused kernel takes its place.
#include "ops/deform_conv2d/deform_conv2d.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <type_traits>
#include <vector>

#include "common/cpu_kernels.h"
#include "common/parallel.h"
#include "ops/deform_conv2d/deform_conv2d_math.h"

namespace myvision::CPU_CAPABILITY {
namespace {

template <typename T>
using Real = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
T& at(const Strided4& t, int64_t i, int64_t j, int64_t k, int64_t l) {
  return static_cast<T*>(t.data)[i * t.stride[0] + j * t.stride[1] + k * t.stride[2] + l * t.stride[3]];
}

// Accumulates a gradient in Real, then writes it in T.
template <typename T>
struct Accumulator {
  const Strided4& target;
  int64_t size[4];
  std::vector<Real<T>> sum = std::vector<Real<T>>(target.data ? size[0] * size[1] * size[2] * size[3] : 0);

  void add(int64_t i, int64_t j, int64_t k, int64_t l, Real<T> value) {
    if (target.data) sum[((i * size[1] + j) * size[2] + k) * size[3] + l] += value;
  }
  ~Accumulator() {
    if (!target.data) return;
    auto value = sum.begin();
    for (int64_t i = 0; i < size[0]; i++)
      for (int64_t j = 0; j < size[1]; j++)
        for (int64_t k = 0; k < size[2]; k++)
          for (int64_t l = 0; l < size[3]; l++) at<T>(target, i, j, k, l) = static_cast<T>(*value++);
  }
};

template <typename T>
struct Sampler {
  using R = Real<T>;
  const DeformConv2dParams& p;
  int64_t n, og, tap, oh, ow;
  AxisSample<R> y =
      axis_sample(sample_position(oh, p.stride_h, p.padding_h, tap / p.kernel_w, p.dilation_h, offset(0)), p.height);
  AxisSample<R> x =
      axis_sample(sample_position(ow, p.stride_w, p.padding_w, tap % p.kernel_w, p.dilation_w, offset(1)), p.width);
  bool inside = y.inside && x.inside;
  int64_t channel = og * p.kernel_h * p.kernel_w + tap;
  R mask = p.mask.data ? R(at<T>(p.mask, n, channel, oh, ow)) : R(1);

  R offset(int axis) const { return at<T>(p.offset, n, (og * p.kernel_h * p.kernel_w + tap) * 2 + axis, oh, ow); }
  bool has(int64_t row, int64_t column) const {
    return inside && row >= 0 && row < p.height && column >= 0 && column < p.width;
  }
  R pixel(int64_t c, int dy, int dx) const {
    return has(y.low + dy, x.low + dx) ? R(at<T>(p.input, n, c, y.low + dy, x.low + dx)) : R(0);
  }
  R value(int64_t c) const {
    return (1 - y.fraction) * ((1 - x.fraction) * pixel(c, 0, 0) + x.fraction * pixel(c, 0, 1)) +
           y.fraction * ((1 - x.fraction) * pixel(c, 1, 0) + x.fraction * pixel(c, 1, 1));
  }
  R slope_y(int64_t c) const {
    return (1 - x.fraction) * (pixel(c, 1, 0) - pixel(c, 0, 0)) + x.fraction * (pixel(c, 1, 1) - pixel(c, 0, 1));
  }
  R slope_x(int64_t c) const {
    return (1 - y.fraction) * (pixel(c, 0, 1) - pixel(c, 0, 0)) + y.fraction * (pixel(c, 1, 1) - pixel(c, 1, 0));
  }
};

template <typename T>
void forward(const DeformConv2dParams& p) {
  using R = Real<T>;
  const int64_t group_in = p.in_channels / p.groups, group_out = p.out_channels / p.groups;
  const int64_t share = std::max<int64_t>(p.in_channels / p.offset_groups, 1), taps = p.kernel_h * p.kernel_w;
  parallel_for(0, p.batch * p.out_height, 1, [&](int64_t first, int64_t last) {
    std::vector<R> column(p.in_channels * taps);
    for (int64_t row = first; row < last; row++)
      for (int64_t ow = 0; ow < p.out_width; ow++) {
        const int64_t n = row / p.out_height, oh = row % p.out_height;
        for (int64_t c = 0; c < p.in_channels; c++)
          for (int64_t tap = 0; tap < taps; tap++) {
            const Sampler<T> s{p, n, c / share, tap, oh, ow};
            column[c * taps + tap] = s.inside ? s.mask * s.value(c) : 0;
          }
        for (int64_t k = 0; k < p.out_channels; k++) {
          R sum = p.bias.data ? R(at<T>(p.bias, k, 0, 0, 0)) : R(0);
          for (int64_t c = 0; c < group_in; c++)
            for (int64_t tap = 0; tap < taps; tap++)
              sum += R(at<T>(p.weight, k, c, tap / p.kernel_w, tap % p.kernel_w)) *
                     column[(k / group_out * group_in + c) * taps + tap];
          at<T>(p.output, n, k, oh, ow) = static_cast<T>(sum);
        }
      }
  });
}

template <typename T>
void backward(const DeformConv2dParams& p, const DeformConv2dGradients& g) {
  using R = Real<T>;
  const int64_t group_in = p.in_channels / p.groups, group_out = p.out_channels / p.groups;
  const int64_t share = std::max<int64_t>(p.in_channels / p.offset_groups, 1), taps = p.kernel_h * p.kernel_w;
  Accumulator<T> input{g.input, {p.batch, p.in_channels, p.height, p.width}};
  Accumulator<T> weight{g.weight, {p.out_channels, group_in, p.kernel_h, p.kernel_w}};
  Accumulator<T> offset{g.offset, {p.batch, 2 * p.offset_groups * taps, p.out_height, p.out_width}};
  Accumulator<T> mask{g.mask, {p.batch, p.offset_groups * taps, p.out_height, p.out_width}};
  Accumulator<T> bias{g.bias, {p.out_channels, 1, 1, 1}};
  for (int64_t n = 0; n < p.batch; n++)
    for (int64_t oh = 0; oh < p.out_height; oh++)
      for (int64_t ow = 0; ow < p.out_width; ow++) {
        for (int64_t k = 0; k < p.out_channels; k++) bias.add(k, 0, 0, 0, R(at<T>(p.output, n, k, oh, ow)));
        for (int64_t c = 0; c < p.in_channels; c++)
          for (int64_t tap = 0; tap < taps; tap++) {
            const Sampler<T> s{p, n, c / share, tap, oh, ow};
            if (!s.inside) continue;
            const int64_t row = tap / p.kernel_w, column = tap % p.kernel_w, group = c / group_in;
            const R value = s.value(c);
            R grad = 0;
            for (int64_t k = group * group_out; k < (group + 1) * group_out; k++) {
              const R grad_output = at<T>(p.output, n, k, oh, ow);
              grad += R(at<T>(p.weight, k, c % group_in, row, column)) * grad_output;
              weight.add(k, c % group_in, row, column, grad_output * s.mask * value);
            }
            mask.add(n, s.channel, oh, ow, grad * value);
            offset.add(n, 2 * s.channel, oh, ow, grad * s.mask * s.slope_y(c));
            offset.add(n, 2 * s.channel + 1, oh, ow, grad * s.mask * s.slope_x(c));
            for (int dy = 0; dy < 2; dy++)
              for (int dx = 0; dx < 2; dx++)
                if (s.has(s.y.low + dy, s.x.low + dx))
                  input.add(
                      n, c, s.y.low + dy, s.x.low + dx,
                      grad * s.mask * (dy ? s.y.fraction : 1 - s.y.fraction) * (dx ? s.x.fraction : 1 - s.x.fraction));
          }
      }
}

template <typename Run>
void dispatch(Dtype dtype, const Run& run) {
  switch (dtype) {
    case Dtype::Float64:
      return run(double{});
    case Dtype::Float32:
      return run(float{});
    case Dtype::Float16:
      return run(torch::headeronly::Half{});
    default:
      return run(torch::headeronly::BFloat16{});
  }
}

}  // namespace

void deform_conv2d_forward(const DeformConv2dParams& params) {
  dispatch(params.dtype, [&](auto t) { forward<decltype(t)>(params); });
}

void deform_conv2d_backward(const DeformConv2dParams& params, const DeformConv2dGradients& gradients) {
  dispatch(params.dtype, [&](auto t) { backward<decltype(t)>(params, gradients); });
}

}  // namespace myvision::CPU_CAPABILITY
