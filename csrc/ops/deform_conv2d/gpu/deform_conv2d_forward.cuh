// deform_conv2d's forward pass on the GPU: deform_conv2d_kernel.cuh tells how it multiplies, and what the table means.
//
// Kernel                 | result                | operations             | bytes, mostly of caches | limit aimed at
// -----------------------+-----------------------+------------------------+-------------------------+------------------
// forward                | output element        | depth (1+4/R) FMAs     | depth (4/R + 1/C) e     | FMA throughput;
//                        |                       |                        | read, e written         | gathers if R < 64
#pragma once
#include "ops/deform_conv2d/gpu/deform_conv2d_kernel.cuh"

namespace myvision::gpu::deform_conv2d {

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

}  // namespace myvision::gpu::deform_conv2d
