// Where deform_conv2d samples: the arithmetic that the CPU and GPU kernels share. Real is float or double.
#pragma once
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "common/host_device.h"
#include "ops/deform_conv2d/deform_conv2d.h"

namespace myvision {

// Calls f with a null pointer to the type of offset in memory: T, that of the other tensors, or, beside a half type,
// Real, the one computed in.
template <typename T, typename Real, typename F>
MYVISION_HOST_DEVICE void with_offset_type(const DeformConv2dParams& params, const F& f) {
  if constexpr (!std::is_same_v<T, Real>) {
    if (params.offset_dtype != params.dtype) return f(static_cast<Real*>(nullptr));
  }
  f(static_cast<T*>(nullptr));
}

// Coordinate along one axis of the sample that kernel tap `tap` takes for output position `out`.
template <typename Real>
MYVISION_HOST_DEVICE Real sample_position(int64_t out, int64_t stride, int64_t padding, int64_t tap, int64_t dilation,
                                          Real offset) {
  return static_cast<Real>(out * stride - padding + tap * dilation) + offset;
}

// A coordinate between the pixels low and low + 1 of a line; either may lie outside the line and then counts as 0.
template <typename Real>
struct AxisSample {
  int32_t low;    // -1 ... size - 1; -1 where !inside
  Real fraction;  // share of pixel low + 1; 0 where !inside
  bool inside;    // false for NaN, infinity, and everything a whole pixel away from the line
};

// -1 itself counts as inside: its value is 0, but torchvision gives it the derivative of the right-hand side.
template <typename Real>
MYVISION_HOST_DEVICE AxisSample<Real> axis_sample(Real position, int64_t size) {
  const bool inside = position >= Real(-1) && position < static_cast<Real>(size);
  const Real safe = inside ? position : Real(-1);
  const Real low = std::floor(safe);
  return {static_cast<int32_t>(low), safe - low, inside};
}

}  // namespace myvision
