// What deform_conv2d's kernels share, forward and backward: implicit matrix products. A block samples a tile of columns
// [depth x pixels] straight into shared memory and multiplies it there; no column matrix is ever in global memory. All
// arithmetic is in Real (float, for float64 double), half types only at loads and stores.
//
// depth is in_channels / groups * taps, taps outermost (row tap * group_inputs + channel), so that consecutive rows
// share where they sample. A tile of R = kRows by C = kColumns shares its operands: each is read once per tile. e is
// sizeof(T), r sizeof(Real). Sampling takes 4 loads and 4 multiply-adds.
//
// Kernel                 | result                | operations             | bytes, mostly of caches | limit aimed at
// -----------------------+-----------------------+------------------------+-------------------------+------------------
// pack_weight            | weight element        | none                   | 2 e                     | bandwidth
#pragma once
#include "common/gpu.cuh"
#include "ops/deform_conv2d/deform_conv2d.h"
#include "ops/deform_conv2d/deform_conv2d_math.h"

namespace myvision::gpu::deform_conv2d {

// Sizes that every kernel derives from DeformConv2dParams.
struct DeformConv2dSizes {
  int taps;             // kernel_h * kernel_w
  int group_inputs;     // input channels of a group
  int group_outputs;    // output channels of a group
  int offset_channels;  // input channels that share their offsets
  int depth;            // rows of a group's column matrix
  int64_t pixels;       // output positions of the whole batch: columns of the column matrix
};

template <typename T>
__device__ __forceinline__ T* at(const Strided4& tensor, int64_t i, int64_t j, int64_t k, int64_t l) {
  return static_cast<T*>(tensor.data) + i * tensor.stride[0] + j * tensor.stride[1] + k * tensor.stride[2] +
         l * tensor.stride[3];
}

// ---- where to sample ------------------------------------------------------------------------------------------------

// An output position.
struct Pixel {
  int64_t image;
  int y, x;

  __device__ __forceinline__ void advance(int count, const DeformConv2dParams& params) {
    const int width = static_cast<int>(params.out_width), height = static_cast<int>(params.out_height);
    for (x += count; x >= width; x -= width) ++y;
    for (; y >= height; y -= height) ++image;
  }
};

__device__ __forceinline__ Pixel pixel_at(const DeformConv2dParams& params, int64_t index) {
  const int64_t row = divide(index, params.out_width);
  const int64_t image = divide(row, params.out_height);
  return {image, static_cast<int>(row - image * params.out_height), static_cast<int>(index - row * params.out_width)};
}

// One sample: between the pixels (low_y, low_x) and (low_y + 1, low_x + 1) of every channel of an offset group.
template <typename Real>
struct Sample {
  int low_y, low_x;
  Real fraction_y, fraction_x;
  Real mask;
  unsigned corners;  // bit 2 * dy + dx: pixel (low_y + dy, low_x + dx) exists; 0 where the sample is outside

  __device__ __forceinline__ bool has(int dy, int dx) const { return corners >> (2 * dy + dx) & 1; }
  __device__ __forceinline__ int64_t position(int dy, int dx, const Strided4& tensor) const {
    return (low_y + dy) * tensor.stride[2] + (low_x + dx) * tensor.stride[3];
  }
  __device__ __forceinline__ Real weight_y(int dy) const { return dy ? fraction_y : 1 - fraction_y; }
  __device__ __forceinline__ Real weight_x(int dx) const { return dx ? fraction_x : 1 - fraction_x; }
};

// Bit d: pixel low + d exists.
template <typename Real>
__device__ __forceinline__ unsigned existing_neighbours(const AxisSample<Real>& axis, int64_t size) {
  return unsigned(axis.low >= 0) | unsigned(axis.low + 1 < size) << 1;
}

template <typename T>
__device__ __forceinline__ Sample<RealOf<T>> sample_at(const DeformConv2dParams& params, const DeformConv2dSizes& sizes,
                                                       const Pixel& pixel, int offset_group, int tap) {
  using Real = RealOf<T>;
  const int64_t channel = int64_t(offset_group) * sizes.taps + tap;
  const int kernel_w = static_cast<int>(params.kernel_w), tap_y = tap / kernel_w, tap_x = tap - tap_y * kernel_w;
  Real offset_y = 0, offset_x = 0;
  with_offset_type<T, Real>(params, [&](auto* type) {
    const auto* offset =
        at<std::remove_pointer_t<decltype(type)>>(params.offset, pixel.image, 2 * channel, pixel.y, pixel.x);
    offset_y = to_real(offset[0]), offset_x = to_real(offset[params.offset.stride[1]]);
  });
  const auto y = axis_sample(
      sample_position(pixel.y, params.stride_h, params.padding_h, tap_y, params.dilation_h, offset_y), params.height);
  const auto x = axis_sample(
      sample_position(pixel.x, params.stride_w, params.padding_w, tap_x, params.dilation_w, offset_x), params.width);

  Sample<Real> sample{y.low, x.low, y.fraction, x.fraction, 1, 0};
  if (params.mask.data) sample.mask = to_real(*at<const T>(params.mask, pixel.image, channel, pixel.y, pixel.x));
  if (y.inside && x.inside) {
    const unsigned rows = existing_neighbours(y, params.height), columns = existing_neighbours(x, params.width);
    sample.corners = ((rows & 1) * columns) | ((rows >> 1) * columns << 2);
  }
  return sample;
}

// What a channel holds around a sample; 0 outside of the image.
template <typename Real>
struct Corners {
  Real value[2][2];
};

template <typename T>
__device__ __forceinline__ Corners<RealOf<T>> load_corners(const Sample<RealOf<T>>& sample, const Strided4& input,
                                                           const T* channel) {
  Corners<RealOf<T>> corners;
#pragma unroll
  for (int dy = 0; dy < 2; ++dy) {
#pragma unroll
    for (int dx = 0; dx < 2; ++dx) {
      corners.value[dy][dx] = sample.has(dy, dx) ? to_real(channel[sample.position(dy, dx, input)]) : 0;
    }
  }
  return corners;
}

template <typename Real>
__device__ __forceinline__ Real interpolate(const Sample<Real>& sample, const Corners<Real>& corners) {
  Real sum = 0;
#pragma unroll
  for (int dy = 0; dy < 2; ++dy) {
#pragma unroll
    for (int dx = 0; dx < 2; ++dx) sum += sample.weight_y(dy) * sample.weight_x(dx) * corners.value[dy][dx];
  }
  return sum;
}

// Derivatives of interpolate by the position.
template <typename Real>
__device__ __forceinline__ Real slope_y(const Sample<Real>& sample, const Corners<Real>& corners) {
  return sample.weight_x(0) * (corners.value[1][0] - corners.value[0][0]) +
         sample.weight_x(1) * (corners.value[1][1] - corners.value[0][1]);
}

template <typename Real>
__device__ __forceinline__ Real slope_x(const Sample<Real>& sample, const Corners<Real>& corners) {
  return sample.weight_y(0) * (corners.value[0][1] - corners.value[0][0]) +
         sample.weight_y(1) * (corners.value[1][1] - corners.value[1][0]);
}

// A row of a group's column matrix.
struct DepthRow {
  int tap, channel;

  __device__ __forceinline__ void advance(int count, int group_inputs) {
    for (channel += count; channel >= group_inputs; channel -= group_inputs) ++tap;
  }
};

// Computes elements of the column matrix at one pixel; keeps the sample for as long as rows share it.
template <typename T>
class ColumnSampler {
 public:
  using Real = RealOf<T>;

  __device__ __forceinline__ ColumnSampler(const DeformConv2dParams& params, const DeformConv2dSizes& sizes, int group)
      : params_(params), sizes_(sizes), group_start_(group * sizes.group_inputs) {}

  __device__ __forceinline__ void move_to(const Pixel& pixel) {
    pixel_ = pixel;
    image_ = at<const T>(params_.input, pixel.image, group_start_, 0, 0);
    end_ = 0;
  }

  // Calls store(i, element) for the kCount rows from `row` on; rows past the matrix give 0.
  template <int kCount, typename Store>
  __device__ __forceinline__ void rows(DepthRow row, Store store) {
    int done = 0;
    while (done < kCount && row.tap < sizes_.taps) {
      if (row.channel >= end_ || row.tap != tap_) take_sample(row);
      const int run = min(kCount - done, end_ - row.channel);
      const T* channel = image_ + row.channel * params_.input.stride[1];
#pragma unroll 4  // 16 loads in flight; more would spill registers
      for (int i = 0; i < run; ++i) {
        store(done + i, element(channel));
        channel += params_.input.stride[1];
      }
      done += run;
      row.advance(run, sizes_.group_inputs);
    }
    for (; done < kCount; ++done) store(done, Real(0));
  }

 private:
  __device__ __forceinline__ void take_sample(const DepthRow& row) {
    const int offset_group = (group_start_ + row.channel) / sizes_.offset_channels;
    sample_ = sample_at<T>(params_, sizes_, pixel_, offset_group, row.tap);
    tap_ = row.tap;
    end_ = min(sizes_.group_inputs, (offset_group + 1) * sizes_.offset_channels - group_start_);
  }

  __device__ __forceinline__ Real element(const T* channel) const {
    if (sample_.corners == 0) return 0;  // whatever the mask is
    return sample_.mask * interpolate(sample_, load_corners(sample_, params_.input, channel));
  }

  const DeformConv2dParams& params_;
  const DeformConv2dSizes& sizes_;
  int group_start_;  // first input channel of the group
  Pixel pixel_;
  const T* image_;  // the group's first channel at pixel_.image
  Sample<Real> sample_;
  int tap_, end_;  // sample_ serves tap_, for the group's channels before end_
};

// ---- products in shared memory --------------------------------------------------------------------------------------

// A block's share of a product: sums[kRows][kColumns] += rows^T * columns, kDepth at a time; each thread keeps
// kThreadRows x kThreadColumns of the sums in registers.
template <typename RealType, int kTileRows, int kTileColumns, int kRowsOfThread, int kColumnsOfThread>
struct Tile {
  using Real = RealType;
  static constexpr int kRows = kTileRows;
  static constexpr int kColumns = kTileColumns;
  static constexpr int kThreadRows = kRowsOfThread;
  static constexpr int kThreadColumns = kColumnsOfThread;
  static constexpr int kDepth = 64 / sizeof(Real);
  static constexpr int kThreads = kRows * kColumns / (kThreadRows * kThreadColumns);
  // A multiprocessor can run so many blocks at a time and leave a thread 128 registers (double: 255), enough for every
  // kernel here.
  static constexpr int kMinBlocks = 2048 / sizeof(Real) / kThreads;
  static constexpr int kVector = kVectorBytes / sizeof(Real);

  // The padding spreads a column of the tile over the banks of shared memory.
  using RowTile = Real[kDepth][kRows + kVector];
  using ColumnTile = Real[kDepth][kColumns + kVector];
  using Sums = Real[kThreadRows][kThreadColumns];

  struct alignas(kVectorBytes) Operands {  // of two chunks of depth: one is multiplied while the next is filled
    RowTile rows[2];
    ColumnTile columns[2];
  };

  static __device__ __forceinline__ int first_row() { return threadIdx.x / (kColumns / kThreadColumns) * kThreadRows; }
  static __device__ __forceinline__ int first_column() {
    return threadIdx.x % (kColumns / kThreadColumns) * kThreadColumns;
  }
};

// Loads kCount numbers from an address that is a multiple of 16 bytes.
template <int kCount, typename Real>
__device__ __forceinline__ void load_fragment(const Real* from, Real (&to)[kCount]) {
  constexpr int kWidth = kVectorBytes / sizeof(Real);
  static_assert(kCount % kWidth == 0);
#pragma unroll
  for (int i = 0; i < kCount / kWidth; ++i) {
    const Pack<Real, kWidth> vector = load_vector<kWidth>(from + i * kWidth);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) to[i * kWidth + j] = vector.value[j];
  }
}

template <typename Tile>
__device__ __forceinline__ void multiply(const typename Tile::RowTile& rows, const typename Tile::ColumnTile& columns,
                                         typename Tile::Sums& sums) {
  using Real = typename Tile::Real;
#pragma unroll
  for (int k = 0; k < Tile::kDepth; ++k) {
    Real row[Tile::kThreadRows], column[Tile::kThreadColumns];
    load_fragment(&rows[k][Tile::first_row()], row);
    load_fragment(&columns[k][Tile::first_column()], column);
#pragma unroll
    for (int i = 0; i < Tile::kThreadRows; ++i) {
#pragma unroll
      for (int j = 0; j < Tile::kThreadColumns; ++j) sums[i][j] += row[i] * column[j];
    }
  }
}

// Adds `chunks` chunks to sums; fill(rows, columns) writes the next chunk's operands. With two buffers a chunk takes
// one barrier, and warps that fill overlap with warps that multiply.
template <typename Tile, typename Count, typename Fill>
__device__ __forceinline__ void multiply_chunks(typename Tile::Operands& operands, Count chunks, Fill fill,
                                                typename Tile::Sums& sums) {
  for (Count chunk = 0; chunk <= chunks; ++chunk) {
    const int filled = chunk % 2, multiplied = 1 - filled;
    if (chunk < chunks) fill(operands.rows[filled], operands.columns[filled]);
    if (chunk > 0) multiply<Tile>(operands.rows[multiplied], operands.columns[multiplied], sums);
    __syncthreads();
  }
}

// Fills a tile of kColumns columns from `rows_left` rows of `columns_left` consecutive elements, with zeros beyond.
template <int kThreads, int kColumns, typename Real, int kDepth, int kPitch, typename T>
__device__ __forceinline__ void load_matrix(Real (&tile)[kDepth][kPitch], const T* data, int64_t pitch, int rows_left,
                                            int columns_left) {
  constexpr int kStep = kThreads / kColumns;  // rows at a time
  static_assert(kThreads % kColumns == 0 && kDepth % kStep == 0);
  const int first_row = threadIdx.x / kColumns, column = threadIdx.x % kColumns;
  if (column >= columns_left) rows_left = 0;
  data += first_row * pitch + column;
#pragma unroll
  for (int row = 0; row < kDepth; row += kStep) {
    tile[first_row + row][column] = first_row + row < rows_left ? to_real(*data) : Real(0);
    data += kStep * pitch;
  }
}

// ---- the packed weight ----------------------------------------------------------------------------------------------

// The weight as the products read it: [group][depth][group_outputs] where kDepthFirst (forward), else
// [group][group_outputs][depth] (backward).
template <typename T, bool kDepthFirst>
__global__ void pack_weight(const Strided4 weight, T* packed, const DeformConv2dSizes sizes, int kernel_w,
                            int64_t count) {
  const int lines = kDepthFirst ? sizes.depth : sizes.group_outputs;
  const int length = kDepthFirst ? sizes.group_outputs : sizes.depth;
  for (int64_t i = global_thread(); i < count; i += global_threads()) {
    const int64_t group_and_line = divide(i, length), group = divide(group_and_line, lines);
    const int line = static_cast<int>(group_and_line - group * lines);
    const int within = static_cast<int>(i - group_and_line * length);
    const int row = kDepthFirst ? line : within, output = kDepthFirst ? within : line;
    const int tap = row / sizes.group_inputs, channel = row - tap * sizes.group_inputs;
    packed[i] = *at<const T>(weight, group * sizes.group_outputs + output, channel, tap / kernel_w, tap % kernel_w);
  }
}

}  // namespace myvision::gpu::deform_conv2d
