// deform_conv2d on the GPU: implicit matrix products. A block samples a tile of columns [depth x pixels] straight into
// shared memory and multiplies it there; no column matrix is ever in global memory. All arithmetic is in Real (float,
// for float64 double), half types only at loads and stores; only atomic_add, where it is asked for, has no fixed order.
//
// depth is in_channels / groups * taps, taps outermost (row tap * group_inputs + channel), so that consecutive rows
// share where they sample. A tile of R = kRows by C = kColumns shares its operands: each is read once per tile. e is
// sizeof(T), r sizeof(Real). Sampling takes 4 loads and 4 multiply-adds.
//
// Kernel                 | result                | operations             | bytes, mostly of caches | limit aimed at
// -----------------------+-----------------------+------------------------+-------------------------+------------------
// forward                | output element        | depth (1+4/R) FMAs     | depth (4/R + 1/C) e     | FMA throughput;
//                        |                       |                        | read, e written         | gathers if R < 64
// backward_columns       | (pixel, tap, channel) | group_outputs FMAs, 20 | group_outputs (1/R +    | FMA throughput;
//                        |                       | for the sample         | 1/C) e + 4 e read,      | atomics if few
//                        |                       |                        | 4 r added to atomically | output channels
// backward_input_ordered | (pixel, tap, channel) | the same               | the same, but 4 r read  | latency of these
//                        |                       |                        | and written in turn     | by one thread
// backward_weight        | (output, depth row)   | pixels (1+4/R) FMAs    | pixels (4/R + 1/C) e    | FMA throughput
//                        |                       |                        | read, splits r written  |
// sum_weight_gradient    | weight element        | splits additions       | splits r + e            | bandwidth
// backward_bias          | output channel        | pixels additions       | pixels e                | bandwidth
// pack_weight            | weight element        | none                   | 2 e                     | bandwidth
// write_input_gradient   | input element         | none                   | r + e                   | bandwidth
#pragma once
#include "common/gpu.cuh"
#include "ops/deform_conv2d/deform_conv2d.h"
#include "ops/deform_conv2d/deform_conv2d_math.h"

namespace myvision {

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
  const T* offset = at<const T>(params.offset, pixel.image, 2 * channel, pixel.y, pixel.x);
  const Real offset_y = to_real(offset[0]), offset_x = to_real(offset[params.offset.stride[1]]);
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
  // Of a multiprocessor at a time: leaves a thread 128 registers (double: 255), enough for every kernel here.
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

// From a multiple of 16 bytes.
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

// ---- forward --------------------------------------------------------------------------------------------------------

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

// Adds the bias and writes a tile: `channels` channels from first_channel on, at the first `pixels` positions of
// output.
template <typename T, typename Tile>
__device__ __forceinline__ void write_output(const DeformConv2dParams& params, int64_t first_channel, int channels,
                                             const int64_t* positions, int64_t pixels,
                                             const typename Tile::Sums& sums) {
  using Real = typename Tile::Real;
#pragma unroll
  for (int i = 0; i < Tile::kThreadRows; ++i) {
    const int row = Tile::first_row() + i;
    if (row >= channels) break;
    const Real bias = params.bias.data ? to_real(*at<const T>(params.bias, first_channel + row, 0, 0, 0)) : Real(0);
    T* output = at<T>(params.output, 0, first_channel + row, 0, 0);
#pragma unroll
    for (int j = 0; j < Tile::kThreadColumns; ++j) {
      const int column = Tile::first_column() + j;
      if (column < pixels) output[positions[column]] = from_real<T>(sums[i][j] + bias);
    }
  }
}

// A block computes kRows output channels of one group at kColumns pixels. weight is packed depth first.
template <typename T, typename Tile>
__global__ void MYVISION_LAUNCH_BOUNDS(Tile::kThreads, Tile::kMinBlocks)
    deform_conv2d_forward(const DeformConv2dParams params, const DeformConv2dSizes sizes, const T* weight,
                          int64_t tiles) {
  using Real = typename Tile::Real;
  using Operands = typename Tile::Operands;
  constexpr int kSampledRows = Tile::kDepth * Tile::kColumns / Tile::kThreads;
  MYVISION_SHARED(Operands, operands);
  MYVISION_SHARED(int64_t, output_position, [Tile::kColumns]);
  const int column = threadIdx.x % Tile::kColumns, first_sampled = threadIdx.x / Tile::kColumns * kSampledRows;
  const int row_tiles = (sizes.group_outputs + Tile::kRows - 1) / Tile::kRows;

  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t pixel_tile_and_group = divide(tile, row_tiles);
    const int64_t pixel_tile = divide(pixel_tile_and_group, params.groups);
    const int group = static_cast<int>(pixel_tile_and_group - pixel_tile * params.groups);
    const int first_row = static_cast<int>(tile - pixel_tile_and_group * row_tiles) * Tile::kRows;
    const int64_t first_pixel = pixel_tile * Tile::kColumns, pixels_left = sizes.pixels - first_pixel;

    // Columns past the last pixel repeat it; they are not written.
    const Pixel pixel = pixel_at(params, first_pixel + min(int64_t(column), pixels_left - 1));
    if (first_sampled == 0) {
      output_position[column] =
          pixel.image * params.output.stride[0] + pixel.y * params.output.stride[2] + pixel.x * params.output.stride[3];
    }
    ColumnSampler<T> sampler(params, sizes, group);
    sampler.move_to(pixel);
    DepthRow sampled{0, 0};
    sampled.advance(first_sampled, sizes.group_inputs);
    const T* chunk = weight + int64_t(group) * sizes.depth * sizes.group_outputs + first_row;
    int depth_left = sizes.depth;
    Real sums[Tile::kThreadRows][Tile::kThreadColumns] = {};
    multiply_chunks<Tile>(
        operands, (sizes.depth + Tile::kDepth - 1) / Tile::kDepth,
        [&](auto& rows, auto& columns) {
          load_matrix<Tile::kThreads, Tile::kRows>(rows, chunk, sizes.group_outputs, depth_left,
                                                   sizes.group_outputs - first_row);
          sampler.template rows<kSampledRows>(
              sampled, [&](int i, Real element) { columns[first_sampled + i][column] = element; });
          chunk += int64_t(Tile::kDepth) * sizes.group_outputs;
          depth_left -= Tile::kDepth;
          sampled.advance(Tile::kDepth, sizes.group_inputs);
        },
        sums);

    write_output<T, Tile>(params, int64_t(group) * sizes.group_outputs + first_row, sizes.group_outputs - first_row,
                          output_position, pixels_left, sums);
    __syncthreads();  // output_position is free again
  }
}

// ---- backward: input, offset and mask -------------------------------------------------------------------------------

// The gradient of a tile of columns: kRows channels at one tap and kColumns pixels.
template <typename Tile>
union alignas(kVectorBytes) ColumnGradient {
  typename Tile::Operands operands;
  typename Tile::Real gradient[Tile::kRows][Tile::kColumns + Tile::kVector];
};

// How many channels from `channel` on, of one group and before `end`, make one tile.
template <typename Tile>
__device__ __forceinline__ int channels_of_tile(const DeformConv2dSizes& sizes, int channel, int end) {
  const int group_end = (channel / sizes.group_inputs + 1) * sizes.group_inputs;
  return min(int(Tile::kRows), min(end, group_end) - channel);
}

// tile.gradient = weight^T * grad_output, the rows of `channels` channels at one tap. weight is packed outputs first;
// grad_output is the pixel of the thread's column, threadIdx.x % kColumns.
template <typename Tile, typename T>
__device__ __forceinline__ void column_gradient(const DeformConv2dParams& params, const DeformConv2dSizes& sizes,
                                                const T* weight, int tap, int channel, int channels,
                                                const T* grad_output, ColumnGradient<Tile>& tile) {
  using Real = typename Tile::Real;
  constexpr int kLoadedRows = Tile::kDepth * Tile::kColumns / Tile::kThreads;
  const int column = threadIdx.x % Tile::kColumns, first_loaded = threadIdx.x / Tile::kColumns * kLoadedRows;
  const int group = channel / sizes.group_inputs;
  const int64_t first_output = int64_t(group) * sizes.group_outputs;
  weight += first_output * sizes.depth + tap * sizes.group_inputs + (channel - group * sizes.group_inputs);
  grad_output += first_output * params.output.stride[1];
  int output = 0;
  Real sums[Tile::kThreadRows][Tile::kThreadColumns] = {};
  multiply_chunks<Tile>(
      tile.operands, (sizes.group_outputs + Tile::kDepth - 1) / Tile::kDepth,
      [&](auto& rows, auto& columns) {
        load_matrix<Tile::kThreads, Tile::kRows>(rows, weight + int64_t(output) * sizes.depth, sizes.depth,
                                                 sizes.group_outputs - output, channels);
#pragma unroll
        for (int i = 0; i < kLoadedRows; ++i) {
          const int row = output + first_loaded + i;
          columns[first_loaded + i][column] =
              row < sizes.group_outputs ? to_real(grad_output[row * params.output.stride[1]]) : Real(0);
        }
        output += Tile::kDepth;
      },
      sums);
#pragma unroll
  for (int i = 0; i < Tile::kThreadRows; ++i) {
#pragma unroll
    for (int j = 0; j < Tile::kThreadColumns; ++j) {
      tile.gradient[Tile::first_row() + i][Tile::first_column() + j] = sums[i][j];
    }
  }
  __syncthreads();
}

// What the gradient of a column element adds to the input's gradient around its sample.
template <typename Real>
__device__ __forceinline__ Corners<Real> spread(const Sample<Real>& sample, Real gradient) {
  Corners<Real> share;
#pragma unroll
  for (int dy = 0; dy < 2; ++dy) {
#pragma unroll
    for (int dx = 0; dx < 2; ++dx) {
      share.value[dy][dx] = gradient * sample.mask * sample.weight_y(dy) * sample.weight_x(dx);
    }
  }
  return share;
}

// Calls visit(dy, dx, position) for the corners that exist.
template <typename Real, typename Visit>
__device__ __forceinline__ void visit_corners(const Sample<Real>& sample, const Strided4& tensor, Visit visit) {
#pragma unroll
  for (int dy = 0; dy < 2; ++dy) {
#pragma unroll
    for (int dx = 0; dx < 2; ++dx) {
      if (sample.has(dy, dx)) visit(dy, dx, sample.position(dy, dx, tensor));
    }
  }
}

// Adds to the input's gradient around a sample, in no fixed order.
template <typename Real>
__device__ __forceinline__ void add_atomically(const Sample<Real>& sample, Real gradient, const Strided4& grad_input,
                                               Real* channel) {
  const Corners<Real> share = spread(sample, gradient);
  visit_corners(sample, grad_input,
                [&](int dy, int dx, int64_t position) { atomic_add(channel + position, share.value[dy][dx]); });
}

// The same where one thread owns the channel.
template <typename Real>
__device__ __forceinline__ void add_alone(const Sample<Real>& sample, Real gradient, const Strided4& grad_input,
                                          Real* channel) {
  const Corners<Real> share = spread(sample, gradient);
  // The corners are distinct: reading all before the first write leaves one latency to wait for, not four.
  const Corners<Real> sum = load_corners(sample, grad_input, channel);
  visit_corners(sample, grad_input,
                [&](int dy, int dx, int64_t position) { channel[position] = sum.value[dy][dx] + share.value[dy][dx]; });
}

// Gradients of a sample's offset, but for the factor mask, and of its mask.
template <typename Real>
struct SampleGradient {
  Real y, x, mask;

  __device__ __forceinline__ void operator+=(const SampleGradient& other) {
    y += other.y;
    x += other.x;
    mask += other.mask;
  }
};

template <typename Real>
__device__ __forceinline__ SampleGradient<Real> sample_gradient(const Sample<Real>& sample,
                                                                const Corners<Real>& corners, Real gradient) {
  return {gradient * slope_y(sample, corners), gradient * slope_x(sample, corners),
          gradient * interpolate(sample, corners)};
}

template <typename T>
__device__ __forceinline__ void write_sample_gradient(const SampleGradient<RealOf<T>>& gradient,
                                                      const Sample<RealOf<T>>& sample, const Pixel& pixel,
                                                      int64_t sample_channel, const Strided4& grad_offset,
                                                      const Strided4& grad_mask) {
  if (grad_offset.data) {
    const RealOf<T> mask = sample.corners ? sample.mask : 0;  // outside the gradient is 0, whatever the mask is
    T* target = at<T>(grad_offset, pixel.image, 2 * sample_channel, pixel.y, pixel.x);
    target[0] = from_real<T>(gradient.y * mask);
    target[grad_offset.stride[1]] = from_real<T>(gradient.x * mask);
  }
  if (grad_mask.data) {
    *at<T>(grad_mask, pixel.image, sample_channel, pixel.y, pixel.x) = from_real<T>(gradient.mask);
  }
}

// A block takes one tap of one offset group at kColumns pixels, so that the sums over channels which are the gradients
// of offset and mask stay inside the block. grad_input is of Real, and added to by atomics.
template <typename T, typename Tile>
__global__ void MYVISION_LAUNCH_BOUNDS(Tile::kThreads, Tile::kMinBlocks)
    deform_conv2d_backward_columns(const DeformConv2dParams params, const DeformConv2dSizes sizes, const T* weight,
                                   const Strided4 grad_input, const Strided4 grad_offset, const Strided4 grad_mask,
                                   int64_t tiles) {
  using Real = typename Tile::Real;
  constexpr int kSlices = Tile::kThreads / Tile::kColumns;  // threads that share a pixel
  MYVISION_SHARED(ColumnGradient<Tile>, shared);
  MYVISION_SHARED(SampleGradient<Real>, partial, [kSlices][Tile::kColumns]);
  const int column = threadIdx.x % Tile::kColumns, slice = threadIdx.x / Tile::kColumns;

  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t pixel_tile_and_group = divide(tile, sizes.taps);
    const int64_t pixel_tile = divide(pixel_tile_and_group, params.offset_groups);
    const int tap = static_cast<int>(tile - pixel_tile_and_group * sizes.taps);
    const int offset_group = static_cast<int>(pixel_tile_and_group - pixel_tile * params.offset_groups);
    const int64_t index = pixel_tile * Tile::kColumns + column;

    // Columns past the last pixel repeat it, without effect.
    const bool exists = index < sizes.pixels;
    const Pixel pixel = pixel_at(params, exists ? index : sizes.pixels - 1);
    const T* grad_output = at<const T>(params.output, pixel.image, 0, pixel.y, pixel.x);
    const Sample<Real> sample = sample_at<T>(params, sizes, pixel, offset_group, tap);
    SampleGradient<Real> sum{};
    const int end = (offset_group + 1) * sizes.offset_channels;
    for (int channel = offset_group * sizes.offset_channels, channels; channel < end; channel += channels) {
      channels = channels_of_tile<Tile>(sizes, channel, end);
      column_gradient<Tile>(params, sizes, weight, tap, channel, channels, grad_output, shared);
      for (int row = slice; row < channels && exists && sample.corners; row += kSlices) {
        const Real gradient = shared.gradient[row][column];
        if (grad_input.data) {
          add_atomically(sample, gradient, grad_input, at<Real>(grad_input, pixel.image, channel + row, 0, 0));
        }
        if (grad_offset.data || grad_mask.data) {
          const T* input = at<const T>(params.input, pixel.image, channel + row, 0, 0);
          sum += sample_gradient(sample, load_corners(sample, params.input, input), gradient);
        }
      }
      __syncthreads();  // shared is free again
    }

    partial[slice][column] = sum;  // the products' barriers stand between the last tile's reads and this
    __syncthreads();
    if (slice == 0 && exists) {
#pragma unroll
      for (int other = 1; other < kSlices; ++other) sum += partial[other][column];
      write_sample_gradient<T>(sum, sample, pixel, int64_t(offset_group) * sizes.taps + tap, grad_offset, grad_mask);
    }
  }
}

// The gradient of the input in a fixed order. A block owns up to kRows channels of one image, one thread a channel: it
// adds tap by tap, pixel by pixel. grad_input is of Real.
template <typename T, typename Tile>
__global__ void MYVISION_LAUNCH_BOUNDS(Tile::kThreads, Tile::kMinBlocks)
    deform_conv2d_backward_input_ordered(const DeformConv2dParams params, const DeformConv2dSizes sizes,
                                         const T* weight, const Strided4 grad_input, int64_t tiles) {
  using Real = typename Tile::Real;
  static_assert(Tile::kRows <= Tile::kThreads);
  MYVISION_SHARED(ColumnGradient<Tile>, shared);
  MYVISION_SHARED(Sample<Real>, samples, [Tile::kColumns]);
  const int column = threadIdx.x % Tile::kColumns;
  const int channel_tiles = (sizes.offset_channels + Tile::kRows - 1) / Tile::kRows;
  const int64_t plane = params.out_height * params.out_width;

  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t image_and_group = divide(tile, channel_tiles), image = divide(image_and_group, params.offset_groups);
    const int offset_group = static_cast<int>(image_and_group - image * params.offset_groups);
    const int begin =
        offset_group * sizes.offset_channels + static_cast<int>(tile - image_and_group * channel_tiles) * Tile::kRows;
    const int end = min(begin + int(Tile::kRows), (offset_group + 1) * sizes.offset_channels);
    for (int tap = 0; tap < sizes.taps; ++tap) {
      for (int64_t first_pixel = 0; first_pixel < plane; first_pixel += Tile::kColumns) {
        const int columns = static_cast<int>(min(int64_t(Tile::kColumns), plane - first_pixel));
        const Pixel pixel = pixel_at(params, image * plane + first_pixel + min(column, columns - 1));
        const T* grad_output = at<const T>(params.output, image, 0, pixel.y, pixel.x);
        if (threadIdx.x < Tile::kColumns) samples[column] = sample_at<T>(params, sizes, pixel, offset_group, tap);
        for (int channel = begin, channels; channel < end; channel += channels) {
          channels = channels_of_tile<Tile>(sizes, channel, end);
          column_gradient<Tile>(params, sizes, weight, tap, channel, channels, grad_output, shared);
          const int row = threadIdx.x;
          for (int i = 0; i < columns && row < channels; ++i) {
            add_alone(samples[i], shared.gradient[row][i], grad_input,
                      at<Real>(grad_input, image, channel + row, 0, 0));
          }
          __syncthreads();  // shared, and at last samples, are free again
        }
      }
    }
  }
}

// Writes the input's gradient of one batch: a dense [batch, in_channels, height, width] of Real, or zeros for null.
template <typename T>
__global__ void write_input_gradient(const Strided4 target, const DeformConv2dParams params, const RealOf<T>* source,
                                     int64_t count) {
  for (int64_t i = global_thread(); i < count; i += global_threads()) {
    const int64_t row = divide(i, params.width), channel_row = divide(row, params.height);
    const int64_t image = divide(channel_row, params.in_channels);
    *at<T>(target, image, channel_row - image * params.in_channels, row - channel_row * params.height,
           i - row * params.width) = from_real<T>(source ? source[i] : 0);
  }
}

// ---- backward: weight and bias --------------------------------------------------------------------------------------

// A block multiplies grad_output [pixels x kRows output channels] by sampled columns [pixels x kColumns depth rows]
// over one of the `splits` parts of the pixels: partial[split][out_channels][depth].
template <typename T, typename Tile>
__global__ void MYVISION_LAUNCH_BOUNDS(Tile::kThreads, Tile::kMinBlocks)
    deform_conv2d_backward_weight(const DeformConv2dParams params, const DeformConv2dSizes sizes,
                                  typename Tile::Real* partial, int64_t pixels_of_split, int64_t tiles) {
  using Real = typename Tile::Real;
  using Operands = typename Tile::Operands;
  constexpr int kSlices = Tile::kThreads / Tile::kDepth;  // threads that share a pixel
  constexpr int kLoadedRows = Tile::kRows / kSlices, kSampledRows = Tile::kColumns / kSlices;
  MYVISION_SHARED(Operands, operands);
  const int k = threadIdx.x % Tile::kDepth, slice = threadIdx.x / Tile::kDepth;
  const int row_tiles = (sizes.group_outputs + Tile::kRows - 1) / Tile::kRows;
  const int depth_tiles = (sizes.depth + Tile::kColumns - 1) / Tile::kColumns;

  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t to_row = divide(tile, row_tiles), to_depth = divide(to_row, depth_tiles);
    const int64_t split = divide(to_depth, params.groups);
    const int group = static_cast<int>(to_depth - split * params.groups);
    const int first_row = static_cast<int>(tile - to_row * row_tiles) * Tile::kRows;
    const int first_depth = static_cast<int>(to_row - to_depth * depth_tiles) * Tile::kColumns;
    const int64_t first_output = int64_t(group) * sizes.group_outputs + first_row;
    const int rows_left = sizes.group_outputs - first_row;

    int64_t index = split * pixels_of_split + k;
    const int64_t end = min(sizes.pixels, (split + 1) * pixels_of_split);
    Pixel pixel = pixel_at(params, index);
    ColumnSampler<T> sampler(params, sizes, group);
    const int sampled = first_depth + slice * kSampledRows;
    const DepthRow sampled_row{sampled / sizes.group_inputs, sampled % sizes.group_inputs};
    Real sums[Tile::kThreadRows][Tile::kThreadColumns] = {};
    multiply_chunks<Tile>(
        operands, (end - split * pixels_of_split + Tile::kDepth - 1) / Tile::kDepth,
        [&](auto& rows, auto& columns) {
          const bool exists = index < end;
          const T* grad_output = at<const T>(params.output, pixel.image, first_output, pixel.y, pixel.x);
#pragma unroll
          for (int i = 0; i < kLoadedRows; ++i) {
            const int row = slice * kLoadedRows + i;
            rows[k][row] = exists && row < rows_left ? to_real(grad_output[row * params.output.stride[1]]) : Real(0);
          }
          sampler.move_to(pixel);
          sampler.template rows<kSampledRows>(exists ? sampled_row : DepthRow{sizes.taps, 0}, [&](int i, Real element) {
            columns[k][slice * kSampledRows + i] = element;
          });
          index += Tile::kDepth;
          pixel.advance(Tile::kDepth, params);
        },
        sums);

#pragma unroll
    for (int i = 0; i < Tile::kThreadRows; ++i) {
      const int row = Tile::first_row() + i;
      Real* line = partial + (split * params.out_channels + first_output + row) * sizes.depth;
#pragma unroll
      for (int j = 0; j < Tile::kThreadColumns; ++j) {
        const int depth = first_depth + Tile::first_column() + j;
        if (row < rows_left && depth < sizes.depth) line[depth] = sums[i][j];
      }
    }
  }
}

// Adds the splits in their order.
template <typename T>
__global__ void sum_weight_gradient(const Strided4 grad_weight, const DeformConv2dSizes sizes, int kernel_w,
                                    const RealOf<T>* partial, int64_t splits, int64_t count) {
  for (int64_t i = global_thread(); i < count; i += global_threads()) {
    RealOf<T> sum = 0;
    for (int64_t split = 0; split < splits; ++split) sum += partial[split * count + i];
    const int64_t output = divide(i, sizes.depth);
    const int row = static_cast<int>(i - output * sizes.depth);
    const int tap = row / sizes.group_inputs, channel = row - tap * sizes.group_inputs;
    *at<T>(grad_weight, output, channel, tap / kernel_w, tap % kernel_w) = from_real<T>(sum);
  }
}

// A block sums grad_output over all pixels of one channel.
template <typename T, int kThreads>
__global__ void __launch_bounds__(kThreads)
    deform_conv2d_backward_bias(const DeformConv2dParams params, const DeformConv2dSizes sizes,
                                const Strided4 grad_bias) {
  for (int64_t channel = blockIdx.x; channel < params.out_channels; channel += gridDim.x) {
    RealOf<T> sum = 0;
    Pixel pixel = pixel_at(params, threadIdx.x);
    for (int64_t i = threadIdx.x; i < sizes.pixels; i += kThreads) {
      sum += to_real(*at<const T>(params.output, pixel.image, channel, pixel.y, pixel.x));
      pixel.advance(kThreads, params);
    }
    sum = block_sum<kThreads>(sum);
    if (threadIdx.x == 0) *at<T>(grad_bias, channel, 0, 0, 0) = from_real<T>(sum);
  }
}

}  // namespace myvision
