// Bilinear sampling of deform_conv2d on the CPU, and its derivative, over one tile of output pixels.
//
// A plan holds, for every tap and pixel of a tile, where to sample and with which weights. It is a table of kPlanRows
// rows of kPlanRow numbers per tap. Slices are padded with a border of zeros, so no corner needs a test: points
// outside the image are sent to the border below it, with weight 0.
#pragma once
#include <bit>
#include <cstdint>
#include <type_traits>

#include "common/vec_io.h"
#include "ops/deform_conv2d/cpu/deform_conv2d_layout.h"
#include "ops/deform_conv2d/deform_conv2d_math.h"

namespace myvision::CPU_CAPABILITY::deform_conv2d {

// Rows of a plan. Corner: the weight of each corner, mask included; backward replaces it by the dot product of that
// corner with the gradient of the column. First: the first corner as a pixel of the padded slice, an integer in the
// bits.
enum PlanRow { kCorner00, kCorner01, kCorner10, kCorner11, kFirst, kMask, kFractionY, kFractionX, kPlanRows };
constexpr int64_t kPlanRow = kTilePixels + 16;      // a vector to spare: rows are written in whole vectors
constexpr int64_t kPlanTap = kPlanRows * kPlanRow;  // numbers per tap

template <typename T>
using PixelIndex = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;

// axis_sample() of deform_conv2d_math.h for a vector of positions; inside is a mask of bits.
template <typename T>
struct AxisSamples {
  Vec<T> low, fraction, inside;
  AxisSamples(const Vec<T>& position, int64_t size)
      : inside((position >= Vec<T>(T(-1))) & (position < Vec<T>(static_cast<T>(size)))) {
    const Vec<T> safe = Vec<T>::blendv(Vec<T>(T(-1)), position, inside);
    low = safe.floor();
    fraction = safe - low;
  }
};

// Writes the plan of one vector of pixels.
template <typename T>
void plan_samples(const AxisSamples<T>& y, const AxisSamples<T>& x, const Vec<T>& mask, const Layout& l, T* plan) {
  using Index = at::vec::Vectorized<PixelIndex<T>>;
  const Vec<T> one(T(1)), inside = y.inside & x.inside;
  const Vec<T> fy = y.fraction & inside, fx = x.fraction & inside;
  const Vec<T> m = mask & inside, lower = m * fy, upper = m - lower, lower_right = lower * fx, upper_right = upper * fx;
  const Index row = at::vec::convert_to_int_of_same_size<T>(y.low + one),
              column = at::vec::convert_to_int_of_same_size<T>(x.low + one);
  const Index first = row * Index(static_cast<PixelIndex<T>>(l.pitch)) + column;
  const Vec<T> outside(std::bit_cast<T>(static_cast<PixelIndex<T>>(l.outside)));
  (upper - upper_right).store(plan + kCorner00 * kPlanRow);
  upper_right.store(plan + kCorner01 * kPlanRow);
  (lower - lower_right).store(plan + kCorner10 * kPlanRow);
  lower_right.store(plan + kCorner11 * kPlanRow);
  Vec<T>::blendv(outside, at::vec::cast<T>(first), inside).store(plan + kFirst * kPlanRow);
  m.store(plan + kMask * kPlanRow);  // outside what it multiplies is 0, which infinity would turn into NaN
  fy.store(plan + kFractionY * kPlanRow);
  fx.store(plan + kFractionX * kPlanRow);
}

// Inlined by force: GCC takes a function that only prefetches for one without effect, and drops its calls.
template <typename In>
[[gnu::always_inline]] inline void fetch_row(const In* row, int64_t stride, int64_t n) {
  constexpr int64_t kLine = 64 / sizeof(In);
  if (stride != 1) return;
  for (int64_t i = 0; i < n; i += kLine) __builtin_prefetch(row + i);
  __builtin_prefetch(row + n - 1);
}

template <typename In>
inline In* element(const Strided4& tensor, int64_t i0, int64_t i1 = 0, int64_t i2 = 0, int64_t i3 = 0) {
  return static_cast<In*>(tensor.data) + i0 * tensor.stride[0] + i1 * tensor.stride[1] + i2 * tensor.stride[2] +
         i3 * tensor.stride[3];
}

// Copies a row of a tile from the plane of offsets (image, channel), and from the next plane.
template <typename In, typename T>
void load_offsets(const DeformConv2dParams& p, int64_t image, int64_t channel, const Tile& tile, int64_t y, T* down,
                  T* right) {
  with_offset_type<In, T>(p, [&]<typename Offset>(Offset*) {
    const int64_t plane = p.offset.stride[1], pixel = p.offset.stride[3];
    const Offset* at = element<Offset>(p.offset, image, channel, y, tile.x);
    // The planes lie far apart: fetch what the tap after next, or the next offset group, will read.
    fetch_row(at + 4 * plane, pixel, tile.width);
    fetch_row(at + 5 * plane, pixel, tile.width);
    copy_row<T>(at, pixel, tile.width, down, 1);
    copy_row<T>(at + plane, pixel, tile.width, right, 1);
  });
}

// Fills the plan for one image and offset group, and the taps of a range. In is the type of the input in memory.
template <typename In, typename T>
void make_plan(const DeformConv2dParams& p, const Layout& l, int64_t image, int64_t offset_group, const Tile& tile,
               const TapRange& taps, T* plan) {
  T grid_x[kTileWidth] = {}, offset_y[kTileWidth] = {}, offset_x[kTileWidth] = {}, factor[kTileWidth];
  std::fill_n(factor, kTileWidth, T(1));
  for (int64_t t = 0; t < taps.count; ++t) {
    const int64_t tap = taps.first + t, tap_y = tap / p.kernel_w, tap_x = tap % p.kernel_w;
    const int64_t channel = offset_group * l.taps + tap;
    for (int64_t i = 0; i < tile.width; ++i)
      grid_x[i] = sample_position(tile.x + i, p.stride_w, p.padding_w, tap_x, p.dilation_w, T(0));
    for (int64_t row = 0; row < tile.height; ++row) {
      const int64_t y = tile.y + row;
      load_offsets<In>(p, image, 2 * channel, tile, y, offset_y, offset_x);
      if (p.mask.data) {
        const In* mask = element<In>(p.mask, image, channel, y, tile.x);
        fetch_row(mask + 2 * p.mask.stride[1], p.mask.stride[3], tile.width);
        copy_row<T>(mask, p.mask.stride[3], tile.width, factor, 1);
      }
      const Vec<T> grid_y(sample_position(y, p.stride_h, p.padding_h, tap_y, p.dilation_h, T(0)));
      for (int64_t i = 0; i < tile.width; i += Vec<T>::size())
        plan_samples<T>(AxisSamples<T>(grid_y + Vec<T>::loadu(offset_y + i), p.height),
                        AxisSamples<T>(Vec<T>::loadu(grid_x + i) + Vec<T>::loadu(offset_x + i), p.width),
                        Vec<T>::loadu(factor + i), l, plan + t * kPlanTap + row * tile.width + i);
    }
  }
}

// Calls body(at, q, t) for the pixels and taps of a tile; the pixel stands at `at` in a plan's rows and is the q-th in
// turn. All taps of a pixel follow each other, and pixels go down the columns of the tile, so that a sampled pixel is
// still in the L1 cache when its neighbours want it, and columns are written in the order of memory.
template <typename Body>
inline void for_each_sample(const Tile& tile, int64_t taps, const Body& body) {
  for (int64_t x = 0; x < tile.width; ++x)
    for (int64_t y = 0; y < tile.height; ++y)
      for (int64_t t = 0; t < taps; ++t) body(y * tile.width + x, x * tile.height + y, t);
}

// Calls f with the type of the vectors that samples of so many channels are taken in (a std::type_identity), and with
// their number as a constant where it is 1 ... 4, else with 0: any number.
template <typename T, typename F>
inline void with_vectors(int64_t channels, const F& f) {
  constexpr std::type_identity<Vec<T>> vector;
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (std::is_same_v<T, float>)
    if (channels <= HalfVec::size()) return f(std::type_identity<HalfVec>(), std::integral_constant<int, 1>());
#endif
  switch (ceil_div(channels, Vec<T>::size())) {
    case 1:
      return f(vector, std::integral_constant<int, 1>());
    case 2:
      return f(vector, std::integral_constant<int, 2>());
    case 3:
      return f(vector, std::integral_constant<int, 3>());
    case 4:
      return f(vector, std::integral_constant<int, 4>());
    default:
      return f(vector, std::integral_constant<int, 0>());
  }
}

// The four corners of a sample in a padded slice, and their weights.
template <typename V, typename T>
struct Corners {
  int64_t at, right, below;  // elements
  V w00, w01, w10, w11;
  Corners(const T* plan, int64_t pixel_channels, int64_t pitch)
      : at(std::bit_cast<PixelIndex<T>>(plan[kFirst * kPlanRow]) * pixel_channels),
        right(pixel_channels),
        below(pitch * pixel_channels),
        w00(plan[kCorner00 * kPlanRow]),
        w01(plan[kCorner01 * kPlanRow]),
        w10(plan[kCorner10 * kPlanRow]),
        w11(plan[kCorner11 * kPlanRow]) {}
};

// The columns of a block: columns[q * row + t * channels + c]. The last vector of a sample may reach past `channels`,
// into the place of the next sample, which is written later: rows must come in order, with a vector to spare at their
// end.
template <typename V, int VECTORS, typename T>
void sample(const T* plan, const T* slice, int64_t pixel_channels, int64_t pitch, const Tile& tile, int64_t taps,
            int64_t channels, T* columns, int64_t row) {
  const int64_t vectors = VECTORS ? VECTORS : ceil_div(channels, V::size());
  for_each_sample(tile, taps, [&](int64_t at, int64_t q, int64_t t) {
    const Corners<V, T> corner(plan + t * kPlanTap + at, pixel_channels, pitch);
    const T *top = slice + corner.at, *low = top + corner.below;
    T* out = columns + q * row + t * channels;
#pragma GCC unroll 4
    for (int64_t v = 0; v < vectors; ++v) {
      const int64_t c = v * V::size();
      V sum = corner.w00 * V::loadu(top + c);
      sum = fmadd(corner.w01, V::loadu(top + corner.right + c), sum);
      sum = fmadd(corner.w10, V::loadu(low + c), sum);
      sum = fmadd(corner.w11, V::loadu(low + corner.right + c), sum);
      sum.store(out + c);
    }
  });
}

// sums[i] = the sum of the lanes of v[i]
template <typename V, typename T>
inline void lane_sums(const V (&v)[4], T* sums) {
  for (int i = 0; i < 4; ++i) {
    T lanes[V::size()];
    v[i].store(lanes);
    sums[i] = T(0);
    for (const T lane : lanes) sums[i] += lane;
  }
}
#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
inline void lane_sums_of_8(const __m256 (&v)[4], float* sums) {
  const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}
#if defined(CPU_CAPABILITY_AVX512)
inline void lane_sums(const HalfVec (&v)[4], float* sums) {
  lane_sums_of_8({v[0].lanes, v[1].lanes, v[2].lanes, v[3].lanes}, sums);
}
inline void lane_sums(const Vec<float> (&v)[4], float* sums) {
  const auto halves = [&](int i) {
    return _mm256_add_ps(_mm512_castps512_ps256(v[i]), _mm512_extractf32x8_ps(v[i], 1));
  };
  lane_sums_of_8({halves(0), halves(1), halves(2), halves(3)}, sums);
}
#else
inline void lane_sums(const Vec<float> (&v)[4], float* sums) { lane_sums_of_8({v[0], v[1], v[2], v[3]}, sums); }
#endif
#endif

// All bits set in the lanes of the last vector of `channels`, none in those past it.
template <typename V, typename T>
inline V last_lanes(int64_t channels) {
  T bits[V::size()];
  std::memset(bits, 0, sizeof(bits));
  std::memset(bits, 0xff, ((channels - 1) % V::size() + 1) * sizeof(T));
  return V::loadu(bits);
}

// The derivative of sample(). `columns` holds the gradient of the columns. It is scattered into the padded slice
// grad_slice (where INPUT), its dot products with the corners take the place of their weights in the plan, and the
// columns themselves, which the gradient of the weight wants, take its own place (where WEIGHT).
template <typename V, int VECTORS, bool INPUT, bool WEIGHT, typename T>
void sample_backward(T* plan, const T* slice, T* grad_slice, int64_t pixel_channels, int64_t pitch, const Tile& tile,
                     int64_t taps, int64_t channels, T* columns, int64_t row) {
  const int64_t vectors = VECTORS ? VECTORS : ceil_div(channels, V::size());
  const bool ragged = channels % V::size() != 0;
  const V lanes = last_lanes<V, T>(channels);
  for_each_sample(tile, taps, [&](int64_t at, int64_t q, int64_t t) {
    T* const place = plan + t * kPlanTap + at;
    const Corners<V, T> corner(place, pixel_channels, pitch);
    T* const out = columns + q * row + t * channels;
    V dot[4] = {V(T(0)), V(T(0)), V(T(0)), V(T(0))};
    const auto step = [&](int64_t c, const auto& keep) {
      const T *top = slice + corner.at + c, *low = top + corner.below;
      const V g = keep(V::loadu(out + c));
      const V x00 = keep(V::loadu(top)), x01 = keep(V::loadu(top + corner.right));
      const V x10 = keep(V::loadu(low)), x11 = keep(V::loadu(low + corner.right));
      dot[0] = fmadd(g, x00, dot[0]);
      dot[1] = fmadd(g, x01, dot[1]);
      dot[2] = fmadd(g, x10, dot[2]);
      dot[3] = fmadd(g, x11, dot[3]);
      if constexpr (WEIGHT) {
        V sum = fmadd(corner.w01, x01, corner.w00 * x00);
        sum = fmadd(corner.w11, x11, fmadd(corner.w10, x10, sum));
        sum.store(out + c, static_cast<int>(std::min<int64_t>(channels - c, V::size())));
      }
      if constexpr (INPUT) {
        T *grad_top = grad_slice + corner.at + c, *grad_low = grad_top + corner.below;
        const auto add = [&](T* to, const V& w) { (V::loadu(to) + keep(w * g)).store(to); };
        add(grad_top, corner.w00);
        add(grad_top + corner.right, corner.w01);
        add(grad_low, corner.w10);
        add(grad_low + corner.right, corner.w11);
      }
    };
    const int64_t whole = ragged ? vectors - 1 : vectors;
#pragma GCC unroll 4
    for (int64_t v = 0; v < whole; ++v) step(v * V::size(), [](const V& x) { return x; });
    if (ragged) step(whole * V::size(), [&](const V& x) { return x & lanes; });
    T sums[4];
    lane_sums(dot, sums);
    for (int i = 0; i < 4; ++i) place[(kCorner00 + i) * kPlanRow] = sums[i];
  });
}

// Dot products in the plan -> gradients of the offset's two channels and of the mask, added to sums[tap][3][pixels of
// the image].
template <typename T>
void add_offset_gradients(const T* plan, const Tile& tile, const TapRange& taps, int64_t out_height, int64_t out_width,
                          T* sums) {
  const int64_t image = out_height * out_width;
  for (int64_t t = 0; t < taps.count; ++t)
    for (int64_t row = 0; row < tile.height; ++row) {
      const T* in = plan + t * kPlanTap + row * tile.width;
      T* out = sums + (taps.first + t) * 3 * image + (tile.y + row) * out_width + tile.x;
      for (int64_t i = 0; i < tile.width; ++i) {
        const T d00 = in[kCorner00 * kPlanRow + i], d01 = in[kCorner01 * kPlanRow + i];
        const T d10 = in[kCorner10 * kPlanRow + i], d11 = in[kCorner11 * kPlanRow + i];
        const T mask = in[kMask * kPlanRow + i];
        const T fy = in[kFractionY * kPlanRow + i], fx = in[kFractionX * kPlanRow + i];
        const T top = d00 + fx * (d01 - d00), low = d10 + fx * (d11 - d10);
        out[i] += mask * (low - top);
        out[image + i] += mask * ((d01 - d00) + fy * ((d11 - d10) - (d01 - d00)));
        out[2 * image + i] += top + fy * (low - top);
      }
    }
}

}  // namespace myvision::CPU_CAPABILITY::deform_conv2d
