// deform_conv2d's gradients on the GPU: deform_conv2d_kernel.cuh tells how they multiply, and what the table means.
// Only the additions of atomic_add, where it is asked for, have no fixed order.
//
// Kernel                 | result                | operations             | bytes, mostly of caches | limit aimed at
// -----------------------+-----------------------+------------------------+-------------------------+------------------
// backward_columns       | (pixel, tap, channel) | group_outputs FMAs, 20 | group_outputs (1/R +    | FMA throughput;
//                        |                       | for the sample         | 1/C) e + 4 e read,      | atomics if few
//                        |                       |                        | 4 r added to atomically | output channels
// backward_input_ordered | (pixel, tap, channel) | the same               | the same, but 4 r read  | latency of these
//                        |                       |                        | and written in turn     | by one thread
// backward_weight        | (output, depth row)   | pixels (1+4/R) FMAs    | pixels (4/R + 1/C) e    | FMA throughput
//                        |                       |                        | read, splits r written  |
// sum_weight_gradient    | weight element        | splits additions       | splits r + e            | bandwidth
// backward_bias          | output channel        | pixels additions       | pixels e                | bandwidth
// write_input_gradient   | input element         | none                   | r + e                   | bandwidth
#pragma once
#include "ops/deform_conv2d/gpu/deform_conv2d_kernel.cuh"

namespace myvision::gpu::deform_conv2d {

// ---- input, offset and mask -----------------------------------------------------------------------------------------

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

// Adds to the input's gradient around a sample where one thread owns the channel.
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
__device__ __forceinline__ void write_sample_gradient(const DeformConv2dParams& params,
                                                      const SampleGradient<RealOf<T>>& gradient,
                                                      const Sample<RealOf<T>>& sample, const Pixel& pixel,
                                                      int64_t sample_channel, const Strided4& grad_offset,
                                                      const Strided4& grad_mask) {
  if (grad_offset.data) {
    const RealOf<T> mask = sample.corners ? sample.mask : 0;  // outside the gradient is 0, whatever the mask is
    with_offset_type<T, RealOf<T>>(params, [&](auto* type) {
      using Offset = std::remove_pointer_t<decltype(type)>;
      Offset* target = at<Offset>(grad_offset, pixel.image, 2 * sample_channel, pixel.y, pixel.x);
      target[0] = from_real<Offset>(gradient.y * mask);
      target[grad_offset.stride[1]] = from_real<Offset>(gradient.x * mask);
    });
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
      write_sample_gradient<T>(params, sum, sample, pixel, int64_t(offset_group) * sizes.taps + tap, grad_offset,
                               grad_mask);
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

// ---- weight and bias ------------------------------------------------------------------------------------------------

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

}  // namespace myvision::gpu::deform_conv2d
