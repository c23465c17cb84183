// Launches deform_conv2d's kernels: chooses tiles, lays out the workspace, cuts the batch where that is bounded.
#include <algorithm>

#include "ops/deform_conv2d/gpu/deform_conv2d_backward.cuh"
#include "ops/deform_conv2d/gpu/deform_conv2d_forward.cuh"

namespace myvision {
using namespace gpu::deform_conv2d;
namespace {

constexpr int64_t kEnoughBlocks = 256;  // a smaller tile is better than fewer blocks: large GPUs run these at once
constexpr int64_t kWantedWeightBlocks = 512;  // the weight's gradient is split until it has as many
constexpr int64_t kMaxPartialBytes = 32 << 20;
constexpr int64_t kMaxCount = 1 << 30;  // of what the kernels count in 32 bits, with room to round up
constexpr int64_t kAlignment = 256;     // of the parts of the workspace

// Forward takes the largest tile of which the output channels of a group fill more than half the rows.
template <typename Real>
using LargeTile = Tile<Real, 128, 64, 8, 4>;
template <typename Real>
using MediumTile = Tile<Real, 64, 64, 8, 4>;
template <typename Real>
using SmallTile = Tile<Real, 32, 32, 4, 4>;
// Tiles of backward leave a thread few enough sums that nothing spills; where a block works alone on an image, its tile
// has few channels.
template <typename Real>
using BackwardTile =
    std::conditional_t<std::is_same_v<Real, double>, Tile<Real, 64, 32, 4, 2>, Tile<Real, 64, 64, 4, 4>>;
template <typename Real>
using OrderedTile = Tile<Real, 32, 64, 4, 4>;

int64_t align(int64_t bytes) { return ceil_div(bytes, kAlignment) * kAlignment; }

int64_t depth_of(const DeformConv2dParams& params) {
  return params.in_channels / params.groups * params.kernel_h * params.kernel_w;
}

DeformConv2dSizes sizes_of(const DeformConv2dParams& params) {
  DeformConv2dSizes sizes;
  sizes.taps = static_cast<int>(params.kernel_h * params.kernel_w);
  sizes.group_inputs = static_cast<int>(params.in_channels / params.groups);
  sizes.group_outputs = static_cast<int>(params.out_channels / params.groups);
  sizes.offset_channels = static_cast<int>(params.in_channels / params.offset_groups);
  sizes.depth = static_cast<int>(depth_of(params));
  sizes.pixels = params.batch * params.out_height * params.out_width;
  return sizes;
}

// The kernels count along one dimension, and the rows of a group's column matrix, in 32 bits.
const char* check(const DeformConv2dParams& params) {
  for (int64_t count : {params.in_channels, params.out_channels, params.kernel_h * params.kernel_w,
                        params.offset_groups, depth_of(params), params.out_height, params.out_width}) {
    if (count > kMaxCount) return "the GPU kernels take up to 2^30 channels, column rows and output rows";
  }
  return nullptr;
}

int64_t weight_count(const DeformConv2dParams& params) { return params.out_channels * depth_of(params); }
int64_t packed_weight_bytes(const DeformConv2dParams& params) {
  return align(weight_count(params) * size_of(params.dtype));
}

template <typename T, bool kDepthFirst>
void pack(const DeformConv2dParams& params, const DeformConv2dSizes& sizes, T* packed, GpuStream stream) {
  const int64_t count = weight_count(params);
  MYVISION_LAUNCH((pack_weight<T, kDepthFirst>), walk_blocks(count), kWalkThreads, stream, params.weight, packed, sizes,
                  static_cast<int>(params.kernel_w), count);
}

// ---- forward --------------------------------------------------------------------------------------------------------

template <typename Tile>
int64_t forward_tiles(const DeformConv2dParams& params, const DeformConv2dSizes& sizes) {
  return ceil_div(sizes.group_outputs, Tile::kRows) * params.groups * ceil_div(sizes.pixels, Tile::kColumns);
}

template <typename Tile>
bool suits(const DeformConv2dParams& params, const DeformConv2dSizes& sizes) {
  return sizes.group_outputs > Tile::kRows / 2 && forward_tiles<Tile>(params, sizes) >= kEnoughBlocks;
}

template <typename Tile, typename T>
const char* launch_forward(const DeformConv2dParams& params, const DeformConv2dSizes& sizes, const T* weight,
                           GpuStream stream) {
  const int64_t tiles = forward_tiles<Tile>(params, sizes);
  MYVISION_LAUNCH((deform_conv2d_forward<T, Tile>), blocks_for(tiles), Tile::kThreads, stream, params, sizes, weight,
                  tiles);
  return launch_error();
}

template <typename T>
const char* forward(const DeformConv2dParams& params, T* weight, GpuStream stream) {
  using Real = RealOf<T>;
  const DeformConv2dSizes sizes = sizes_of(params);
  pack<T, true>(params, sizes, weight, stream);
  if (suits<LargeTile<Real>>(params, sizes)) return launch_forward<LargeTile<Real>>(params, sizes, weight, stream);
  if (suits<MediumTile<Real>>(params, sizes)) return launch_forward<MediumTile<Real>>(params, sizes, weight, stream);
  return launch_forward<SmallTile<Real>>(params, sizes, weight, stream);
}

// ---- backward -------------------------------------------------------------------------------------------------------

bool needs_columns(const DeformConv2dGradients& gradients) {
  return gradients.input.data || gradients.offset.data || gradients.mask.data;
}

bool accumulates_in_workspace(const DeformConv2dParams& params, const DeformConv2dGradients& gradients) {
  return gradients.input.data && (params.dtype == Dtype::Float16 || params.dtype == Dtype::BFloat16);
}

int64_t image_count(const DeformConv2dParams& params) { return params.in_channels * params.height * params.width; }

// How many images the kernels take at a time: half inputs have gradients in float, which are scratch memory.
int64_t images_of_part(const DeformConv2dParams& params, const DeformConv2dGradients& gradients) {
  if (!accumulates_in_workspace(params, gradients)) return params.batch;
  const int64_t image_bytes = image_count(params) * sizeof(float);
  return std::max<int64_t>(std::min(kScratchBytes / image_bytes, params.batch), 1);
}

int64_t input_gradient_bytes(const DeformConv2dParams& params, const DeformConv2dGradients& gradients) {
  if (!accumulates_in_workspace(params, gradients)) return 0;
  return images_of_part(params, gradients) * image_count(params) * sizeof(float);
}

// Into how many parts the sum over pixels that is the weight's gradient is split: the same on every GPU, so that
// results are the same too.
int64_t splits_of(const DeformConv2dParams& params) {
  using Tile = BackwardTile<float>;
  const int64_t tiles = ceil_div(params.out_channels / params.groups, Tile::kRows) * params.groups *
                        ceil_div(depth_of(params), Tile::kColumns);
  const int64_t most = std::min(kMaxPartialBytes / (weight_count(params) * real_size(params.dtype)),
                                ceil_div(params.batch * params.out_height * params.out_width, Tile::kDepth));
  return std::max<int64_t>(std::min(ceil_div(kWantedWeightBlocks, tiles), most), 1);
}

Strided4 from_image(Strided4 tensor, int64_t image, int64_t element_size) {
  if (tensor.data) tensor.data = static_cast<char*>(tensor.data) + image * tensor.stride[0] * element_size;
  return tensor;
}

DeformConv2dParams images_of(DeformConv2dParams params, int64_t first, int64_t count) {
  const int64_t size = size_of(params.dtype);
  params.batch = count;
  params.input = from_image(params.input, first, size);
  params.offset = from_image(params.offset, first, size_of(params.offset_dtype));
  params.mask = from_image(params.mask, first, size);
  params.output = from_image(params.output, first, size);
  return params;
}

DeformConv2dGradients images_of(const DeformConv2dParams& params, DeformConv2dGradients gradients, int64_t first) {
  const int64_t size = size_of(params.dtype);
  gradients.input = from_image(gradients.input, first, size);
  gradients.offset = from_image(gradients.offset, first, size_of(params.offset_dtype));
  gradients.mask = from_image(gradients.mask, first, size);
  return gradients;
}

Strided4 dense_input(const DeformConv2dParams& params, void* data) {
  return {data, {image_count(params), params.height * params.width, params.width, 1}};
}

template <typename T>
void write_input(const DeformConv2dParams& params, const Strided4& target, const RealOf<T>* source, GpuStream stream) {
  const int64_t count = params.batch * image_count(params);
  MYVISION_LAUNCH((write_input_gradient<T>), walk_blocks(count), kWalkThreads, stream, target, params, source, count);
}

template <typename T>
void launch_columns(const DeformConv2dParams& params, const T* weight, const Strided4& grad_input,
                    const DeformConv2dGradients& gradients, GpuStream stream) {
  using Tile = BackwardTile<RealOf<T>>;
  const DeformConv2dSizes sizes = sizes_of(params);
  const int64_t tiles = ceil_div(sizes.pixels, Tile::kColumns) * params.offset_groups * sizes.taps;
  MYVISION_LAUNCH((deform_conv2d_backward_columns<T, Tile>), blocks_for(tiles), Tile::kThreads, stream, params, sizes,
                  weight, grad_input, gradients.offset, gradients.mask, tiles);
}

template <typename T>
void launch_input_ordered(const DeformConv2dParams& params, const T* weight, const Strided4& grad_input,
                          GpuStream stream) {
  using Tile = OrderedTile<RealOf<T>>;
  const DeformConv2dSizes sizes = sizes_of(params);
  const int64_t tiles = params.batch * params.offset_groups * ceil_div(sizes.offset_channels, Tile::kRows);
  MYVISION_LAUNCH((deform_conv2d_backward_input_ordered<T, Tile>), blocks_for(tiles), Tile::kThreads, stream, params,
                  sizes, weight, grad_input, tiles);
}

// Gradients of input, offset and mask for a part of the batch. grad_input is of RealOf<T>, or absent.
template <typename T>
void backward_columns(const DeformConv2dParams& params, const DeformConv2dGradients& gradients,
                      const Strided4& grad_input, const T* weight, GpuStream stream) {
  if (grad_input.data) write_input<RealOf<T>>(params, grad_input, nullptr, stream);
  if (grad_input.data && gradients.deterministic) launch_input_ordered(params, weight, grad_input, stream);
  const Strided4 by_atomics = gradients.deterministic ? Strided4{} : grad_input;
  if (by_atomics.data || gradients.offset.data || gradients.mask.data) {
    launch_columns(params, weight, by_atomics, gradients, stream);
  }
}

template <typename T>
void backward_input_offset_mask(const DeformConv2dParams& params, const DeformConv2dGradients& gradients,
                                void* workspace, GpuStream stream) {
  using Real = RealOf<T>;
  T* weight = static_cast<T*>(workspace);
  auto* sums = reinterpret_cast<Real*>(static_cast<char*>(workspace) + packed_weight_bytes(params));
  pack<T, false>(params, sizes_of(params), weight, stream);
  const int64_t step = images_of_part(params, gradients);
  for (int64_t first = 0; first < params.batch; first += step) {
    const DeformConv2dParams part = images_of(params, first, std::min(step, params.batch - first));
    const DeformConv2dGradients wanted = images_of(params, gradients, first);
    if (accumulates_in_workspace(params, gradients)) {
      backward_columns(part, wanted, dense_input(part, sums), weight, stream);
      write_input<T>(part, wanted.input, sums, stream);
    } else {
      backward_columns(part, wanted, wanted.input, weight, stream);
    }
  }
}

template <typename T>
void backward_weight(const DeformConv2dParams& params, const Strided4& grad_weight, void* workspace, GpuStream stream) {
  using Real = RealOf<T>;
  using Tile = BackwardTile<Real>;
  const int64_t count = weight_count(params);
  const DeformConv2dSizes sizes = sizes_of(params);
  const int64_t splits = splits_of(params);
  const int64_t tiles =
      splits * params.groups * ceil_div(sizes.group_outputs, Tile::kRows) * ceil_div(sizes.depth, Tile::kColumns);
  auto* partial = static_cast<Real*>(workspace);
  MYVISION_LAUNCH((deform_conv2d_backward_weight<T, Tile>), blocks_for(tiles), Tile::kThreads, stream, params, sizes,
                  partial, ceil_div(sizes.pixels, splits), tiles);
  MYVISION_LAUNCH((sum_weight_gradient<T>), walk_blocks(count), kWalkThreads, stream, grad_weight, sizes,
                  static_cast<int>(params.kernel_w), partial, splits, count);
}

template <typename T>
void backward_bias(const DeformConv2dParams& params, const Strided4& grad_bias, GpuStream stream) {
  MYVISION_LAUNCH((deform_conv2d_backward_bias<T, kWalkThreads>), blocks_for(params.out_channels), kWalkThreads, stream,
                  params, sizes_of(params), grad_bias);
}

// The parts share the workspace: the stream runs one after the other.
template <typename T>
const char* backward(const DeformConv2dParams& params, const DeformConv2dGradients& gradients, void* workspace,
                     GpuStream stream) {
  if (needs_columns(gradients)) backward_input_offset_mask<T>(params, gradients, workspace, stream);
  if (gradients.weight.data) backward_weight<T>(params, gradients.weight, workspace, stream);
  if (gradients.bias.data) backward_bias<T>(params, gradients.bias, stream);
  return launch_error();
}

}  // namespace

int64_t deform_conv2d_forward_cuda_workspace(const DeformConv2dParams& params) { return packed_weight_bytes(params); }

int64_t deform_conv2d_backward_cuda_workspace(const DeformConv2dParams& params,
                                              const DeformConv2dGradients& gradients) {
  const int64_t columns =
      needs_columns(gradients) ? packed_weight_bytes(params) + input_gradient_bytes(params, gradients) : 0;
  const int64_t weight = gradients.weight.data ? splits_of(params) * weight_count(params) * real_size(params.dtype) : 0;
  return std::max(columns, weight);
}

const char* deform_conv2d_forward_cuda(const DeformConv2dParams& params, void* workspace, void* stream) {
  if (const char* error = check(params)) return error;
  return visit_floating(params.dtype, [&](auto element) {
    using T = decltype(element);
    return forward(params, static_cast<T*>(workspace), static_cast<GpuStream>(stream));
  });
}

const char* deform_conv2d_backward_cuda(const DeformConv2dParams& params, const DeformConv2dGradients& gradients,
                                        void* workspace, void* stream) {
  if (const char* error = check(params)) return error;
  return visit_floating(params.dtype, [&](auto element) {
    return backward<decltype(element)>(params, gradients, workspace, static_cast<GpuStream>(stream));
  });
}

}  // namespace myvision
