// Launches layer_norm's kernels: chooses tiles, and how backward cuts the rows.
#include <initializer_list>

#include "ops/layer_norm/layer_norm_kernel.cuh"

namespace myvision {
using namespace gpu::layer_norm;
namespace {

constexpr int kRowThreads = 256;         // of a block, unless a row takes more
constexpr int64_t kForwardPacks = 4;     // of a row that a thread takes, as far as threads suffice
constexpr int64_t kWantedBlocks = 1024;  // of backward: more would only make more partial sums
constexpr int64_t kLeastSteps = 4;       // rows of a slot in a part, so that partial sums are few beside the rows

bool runs_across(const LayerNormParams& params) { return params.input.stride[1] != 1 && params.channels > 1; }

bool walks_by_packs(const LayerNormParams& params, std::initializer_list<Strided4> others) {
  const int dim = runs_across(params) ? 3 : 1, width = static_cast<int>(kVectorBytes / size_of(params.dtype));
  const int64_t sizes[] = {params.batch, params.channels, params.height, params.width};
  bool packs = params.input.stride[dim] == 1 && sizes[dim] % width == 0 && is_vector_aligned(params.weight) &&
               is_vector_aligned(params.bias) && holds_packs(params.input, dim, width, sizes);
  for (const Strided4& tensor : others) packs = packs && holds_packs(tensor, dim, width, sizes);
  return packs;
}

// How a call's tensors are walked.
struct Layout {
  bool across;
  int64_t width;  // of packs
  LayerNormPlan plan;
};

Layout layout_of(const LayerNormParams& params, std::initializer_list<Strided4> others) {
  Layout layout{runs_across(params), 1, {}};
  if (walks_by_packs(params, others)) layout.width = kVectorBytes / size_of(params.dtype);
  layout.plan.rows = number_of_rows(params) / (layout.across ? layout.width : 1);
  layout.plan.length = params.channels / (layout.across ? 1 : layout.width);
  return layout;
}

// Neighbouring rows of a block: as many as memory moves at once, or fewer where only so all can be held.
int slots_across(const Layout& layout, int64_t capacity) {
  const int most = power_of_two(layout.plan.rows, 1, layout.width > 1 ? 8 : 16);
  for (int slots = most; slots > most / 8; slots /= 2) {
    if (layout.plan.length * slots <= capacity) return slots;
  }
  return most;
}

// capacity: how many packs a block can hold.
Tile tile_of(const Layout& layout, int64_t packs_of_member, int64_t capacity) {
  const int64_t length = layout.plan.length, members = ceil_div(length, packs_of_member);
  if (layout.across) {
    const int slots = slots_across(layout, capacity);
    return {power_of_two(members, kRowThreads / slots, kMaxRowThreads / slots), slots, true};
  }
  const int least = power_of_two(length, 1, 8);  // as many as memory moves at once
  const int power = power_of_two(members, least, kMaxRowThreads);
  return {power, std::max(kRowThreads / power, 1), false};
}

int threads_of(const Tile& tile) { return tile.members * tile.slots; }
unsigned row_blocks(const LayerNormPlan& plan) { return blocks_for(ceil_div(plan.rows, plan.tile.slots)); }

// ---- forward --------------------------------------------------------------------------------------------------------

// Of a block's rows: without asking for more shared memory than a kernel has unasked, so that blocks run side by side.
int64_t most_kept_bytes(Dtype dtype) {
  return kUnaskedSharedBytes - (dtype == Dtype::Float64 ? kForwardVariableBytes<double> : kForwardVariableBytes<float>);
}

Layout forward_layout(const LayerNormParams& params) {
  Layout layout = layout_of(params, {params.addend, params.sum, params.residual, params.output});
  LayerNormPlan& plan = layout.plan;
  const int64_t pack_bytes = layout.width * size_of(params.dtype), most_bytes = most_kept_bytes(params.dtype);
  plan.tile = tile_of(layout, kForwardPacks, most_bytes / pack_bytes);
  const int64_t bytes = plan.length * plan.tile.slots * pack_bytes;
  if (bytes <= most_bytes) plan.kept_bytes = static_cast<int>(bytes);
  return layout;
}

template <typename T>
const char* forward(const LayerNormParams& params, GpuStream stream) {
  const Layout layout = forward_layout(params);
  const LayerNormPlan& plan = layout.plan;
  with_packs<T>(layout.width > 1, layout.across, [&](auto width, auto sets) {
    MYVISION_LAUNCH_WITH_SHARED((layer_norm_forward<T, width, sets>), row_blocks(plan), threads_of(plan.tile),
                                plan.kept_bytes, stream, params, plan);
  });
  return launch_error();
}

// ---- backward -------------------------------------------------------------------------------------------------------

Layout backward_layout(const LayerNormParams& params, const LayerNormGradients& gradients) {
  Layout layout = layout_of(params, {params.residual, gradients.output, gradients.sum, gradients.input,
                                     gradients.dropped, gradients.residual});
  LayerNormPlan& plan = layout.plan;
  const int64_t held = held_packs(real_size(params.dtype), layout.width);
  plan.tile = tile_of(layout, held, kMaxRowThreads * held);
  plan.chunks = ceil_div(plan.length, plan.tile.members * held);
  const int64_t steps = ceil_div(plan.rows, plan.tile.slots);
  plan.part_rows = std::max(ceil_div(steps * plan.chunks, kWantedBlocks), kLeastSteps) * plan.tile.slots;
  plan.parts = ceil_div(plan.rows, plan.part_rows);
  return layout;
}

// Pairs of sums in the workspace: those of channels, behind them those of rows.
int64_t channel_sums(const LayerNormParams& params, const LayerNormGradients& gradients, const LayerNormPlan& plan) {
  return gradients.weight || gradients.bias ? plan.parts * plan.tile.slots * params.channels : 0;
}
int64_t row_sums(const LayerNormParams& params, const LayerNormPlan& plan) {
  return plan.chunks > 1 ? number_of_rows(params) : 0;
}

template <typename T>
const char* backward(const LayerNormParams& params, const LayerNormGradients& gradients, void* workspace,
                     GpuStream stream) {
  const Layout layout = backward_layout(params, gradients);
  const LayerNormPlan& plan = layout.plan;
  auto* partial = static_cast<Pair<RealOf<T>>*>(workspace);
  auto* of_rows = row_sums(params, plan) ? partial + channel_sums(params, gradients, plan) : nullptr;
  if (!channel_sums(params, gradients, plan)) partial = nullptr;
  with_packs<T>(layout.width > 1, layout.across, [&](auto width, auto sets) {
    if (of_rows) {
      MYVISION_LAUNCH((layer_norm_backward_sums<T, width, sets>), row_blocks(plan), threads_of(plan.tile), stream,
                      params, gradients, plan, of_rows);
    }
    MYVISION_LAUNCH((layer_norm_backward<T, width, sets>), blocks_for(plan.parts * plan.chunks), threads_of(plan.tile),
                    stream, params, gradients, plan, of_rows, partial);
  });
  if (partial) {
    launch_sum_columns(partial, plan.parts * plan.tile.slots, params.channels, nullptr, gradients.bias,
                       gradients.weight, stream);
  }
  return launch_error();
}

}  // namespace

int64_t layer_norm_backward_cuda_workspace(const LayerNormParams& params, const LayerNormGradients& gradients) {
  const LayerNormPlan plan = backward_layout(params, gradients).plan;
  return (channel_sums(params, gradients, plan) + row_sums(params, plan)) * 2 * real_size(params.dtype);
}

const char* layer_norm_forward_cuda(const LayerNormParams& params, void* stream) {
  return visit_floating(
      params.dtype, [&](auto element) { return forward<decltype(element)>(params, static_cast<GpuStream>(stream)); });
}

const char* layer_norm_backward_cuda(const LayerNormParams& params, const LayerNormGradients& gradients,
                                     void* workspace, void* stream) {
  return visit_floating(params.dtype, [&](auto element) {
    return backward<decltype(element)>(params, gradients, workspace, static_cast<GpuStream>(stream));
  });
}

}  // namespace myvision
