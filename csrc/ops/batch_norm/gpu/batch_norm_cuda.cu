// Launches batch_norm's kernels: chooses tiles and how sets are cut, lays out the workspace.
#include <initializer_list>

#include "ops/batch_norm/gpu/batch_norm_kernel.cuh"

namespace myvision {
using namespace gpu::batch_norm;
namespace {

constexpr int64_t kWantedBlocks = 1024;      // sets are cut until there are as many
constexpr int64_t kMaxPartLength = 1 << 18;  // of a part, so that floats count exactly
constexpr int kMaxSlotsAcross = 32;

// Whether packs lie across sets: channels are neighbours in memory, and pixels of a plane are not.
bool runs_across(const BatchNormParams& params) {
  const bool pixels_are_neighbours = params.input.stride[3] == 1 && params.width > 1;
  return params.input.stride[1] == 1 && !pixels_are_neighbours;
}

bool walks_by_packs(const BatchNormParams& params, std::initializer_list<Strided4> others) {
  const int dim = runs_across(params) ? 1 : 3, width = static_cast<int>(kVectorBytes / size_of(params.dtype));
  const int64_t sizes[] = {params.batch, params.channels, params.height, params.width};
  bool packs = params.input.stride[dim] == 1 && sizes[dim] % width == 0;
  for (const Strided4& tensor : others) packs = packs && holds_packs(tensor, dim, width, sizes);
  return packs && holds_packs(params.input, dim, width, sizes);
}

// How a call's tensors are walked.
struct Layout {
  bool packs;
  BatchNormPlan plan;
};

Tile tile_of(const BatchNormPlan& plan, bool across) {
  if (across) {
    const int slots = power_of_two(plan.sets, 1, kMaxSlotsAcross);
    return {kBatchNormThreads / slots, slots, true};
  }
  const int least = power_of_two(plan.length, 1, 8);  // members that fill what memory moves at once
  const int members = power_of_two(ceil_div(plan.length, kBatchNormLoads), least, kBatchNormThreads);
  return {members, kBatchNormThreads / members, false};
}

Layout layout_of(const BatchNormParams& params, std::initializer_list<Strided4> others) {
  const bool across = runs_across(params), packs = walks_by_packs(params, others);
  const int64_t width = packs ? kVectorBytes / size_of(params.dtype) : 1;
  BatchNormPlan plan{};
  plan.sets = (params.groups == 0 ? 1 : params.batch) * params.channels / (across ? width : 1);
  plan.plane = params.height * params.width / (across ? 1 : width);
  plan.length = (params.groups == 0 ? params.batch : 1) * plan.plane;
  plan.tile = tile_of(plan, across);
  const int64_t most = ceil_div(plan.length, plan.tile.members * kBatchNormLoads);
  const int64_t wanted = std::min(ceil_div(kWantedBlocks, plan.set_tiles()), most);
  plan.part_length = std::min(ceil_div(plan.length, wanted), kMaxPartLength);
  plan.parts = ceil_div(plan.length, plan.part_length);
  return {packs, plan};
}

Layout forward_layout(const BatchNormParams& params) { return layout_of(params, {params.residual, params.output}); }
Layout backward_layout(const BatchNormParams& params, const BatchNormGradients& gradients) {
  return layout_of(params, {params.residual, gradients.output, gradients.input, gradients.residual});
}

int64_t number_of_sets(const BatchNormParams& params) {
  return (params.groups == 0 ? 1 : params.batch) * params.channels;
}
int64_t numbers_of_group(const BatchNormParams& params) {
  return params.batch * params.channels * params.height * params.width / number_of_groups(params);
}

GroupParts group_parts(const BatchNormParams& params, const BatchNormPlan& plan) {
  const int64_t sets = number_of_sets(params), span = sets / number_of_groups(params);
  const int members = power_of_two(plan.parts * span, 1, kBatchNormThreads);
  const Tile tile = {members, kBatchNormThreads / members, false};
  return {tile, plan.parts, sets, span, numbers_of_group(params)};
}

unsigned blocks_of(const Tile& tile, int64_t sets) { return blocks_for(ceil_div(sets, tile.slots)); }
unsigned blocks_of(const BatchNormPlan& plan) { return blocks_for(plan.parts * plan.set_tiles()); }

// ---- forward --------------------------------------------------------------------------------------------------------

int64_t moments_bytes(const BatchNormParams& params, const BatchNormPlan& plan) {
  return plan.parts * number_of_sets(params) * sizeof(Moments);
}

template <typename T>
void compute_statistics(const BatchNormParams& params, const Layout& layout, Moments* partial, GpuStream stream) {
  const BatchNormPlan& plan = layout.plan;
  with_packs<T>(layout.packs, plan.tile.across, [&](auto width, auto sets) {
    MYVISION_LAUNCH((batch_norm_moments<T, width, sets>), blocks_of(plan), kBatchNormThreads, stream, params, plan,
                    partial);
  });
  const GroupParts parts = group_parts(params, plan);
  const int64_t owners = params.running_mean ? params.channels : number_of_groups(params);
  MYVISION_LAUNCH(batch_norm_merge<T>, blocks_of(parts.tile, owners), kBatchNormThreads, stream, params, parts, partial,
                  owners, number_of_groups(params) / owners);
}

template <typename T>
const char* forward(BatchNormParams params, void* workspace, GpuStream stream) {
  const Layout layout = forward_layout(params);
  if (params.statistics_from == StatisticsFrom::Input) {
    if (!params.statistics) params.statistics = static_cast<char*>(workspace) + moments_bytes(params, layout.plan);
    compute_statistics<T>(params, layout, static_cast<Moments*>(workspace), stream);
  } else if (params.statistics_from == StatisticsFrom::Running && params.statistics) {
    MYVISION_LAUNCH(batch_norm_running_statistics<RealOf<T>>, walk_blocks(params.channels), kWalkThreads, stream,
                    params);
  }
  if (params.output.data) {
    with_packs<T>(layout.packs, layout.plan.tile.across, [&](auto width, auto sets) {
      MYVISION_LAUNCH((batch_norm_apply<T, width, sets>), blocks_of(layout.plan), kBatchNormThreads, stream, params,
                      layout.plan);
    });
  }
  return launch_error();
}

// ---- backward -------------------------------------------------------------------------------------------------------

// The sums of sets take so many bytes; behind them stand those of groups.
int64_t sums_bytes(const BatchNormParams& params, const BatchNormPlan& plan) {
  return plan.parts * number_of_sets(params) * 2 * real_size(params.dtype);
}

bool needs_apply(const BatchNormGradients& gradients) { return gradients.input.data || gradients.residual.data; }

bool needs_sums(const BatchNormGradients& gradients) {
  if (gradients.stage == BackwardStage::Finish) return false;
  return gradients.stage == BackwardStage::Sums || gradients.weight || gradients.bias ||
         (gradients.training && gradients.input.data);
}

// Sums of sets, and from them those of weight, bias and groups.
template <typename T>
void compute_sums(const BatchNormParams& params, const BatchNormGradients& gradients, const Layout& layout,
                  Pair<RealOf<T>>* partial, RealOf<T>* group_sums, GpuStream stream) {
  const BatchNormPlan& plan = layout.plan;
  with_packs<T>(layout.packs, plan.tile.across, [&](auto width, auto sets) {
    MYVISION_LAUNCH((batch_norm_backward_sums<T, width, sets>), blocks_of(plan), kBatchNormThreads, stream, params,
                    gradients, plan, partial);
  });
  const int64_t rows = plan.parts * number_of_sets(params) / params.channels;
  RealOf<T>* channel_sums = params.groups == 0 ? group_sums : nullptr;
  if (channel_sums || gradients.weight || gradients.bias) {
    launch_sum_columns(partial, rows, params.channels, channel_sums, gradients.bias, gradients.weight, stream);
  }
  if (params.groups > 0 && gradients.training && gradients.input.data) {
    const GroupParts parts = group_parts(params, plan);
    MYVISION_LAUNCH(batch_norm_group_sums<RealOf<T>>, blocks_of(parts.tile, number_of_groups(params)),
                    kBatchNormThreads, stream, params, parts, partial, group_sums);
  }
}

template <typename T>
const char* backward(const BatchNormParams& params, const BatchNormGradients& gradients, void* workspace,
                     GpuStream stream) {
  using Real = RealOf<T>;
  const Layout layout = backward_layout(params, gradients);
  Real* sums = static_cast<Real*>(gradients.sums);
  if (gradients.stage == BackwardStage::Whole) {
    sums = reinterpret_cast<Real*>(static_cast<char*>(workspace) + sums_bytes(params, layout.plan));
  }
  if (needs_sums(gradients)) {
    compute_sums<T>(params, gradients, layout, static_cast<Pair<Real>*>(workspace), sums, stream);
  }
  if (gradients.stage != BackwardStage::Sums && needs_apply(gradients)) {
    const Real factor = gradients.stage == BackwardStage::Finish ? Real(1) : 1 / Real(numbers_of_group(params));
    with_packs<T>(layout.packs, layout.plan.tile.across, [&](auto width, auto sets) {
      MYVISION_LAUNCH((batch_norm_backward_apply<T, width, sets>), blocks_of(layout.plan), kBatchNormThreads, stream,
                      params, gradients, layout.plan, gradients.training ? sums : nullptr, factor);
    });
  }
  return launch_error();
}

}  // namespace

int64_t batch_norm_forward_cuda_workspace(const BatchNormParams& params) {
  if (params.statistics_from != StatisticsFrom::Input) return 0;
  const int64_t statistics = params.statistics ? 0 : 3 * number_of_groups(params) * real_size(params.dtype);
  return moments_bytes(params, forward_layout(params).plan) + statistics;
}

int64_t batch_norm_backward_cuda_workspace(const BatchNormParams& params, const BatchNormGradients& gradients) {
  if (!needs_sums(gradients)) return 0;
  return sums_bytes(params, backward_layout(params, gradients).plan) +
         2 * number_of_groups(params) * real_size(params.dtype);
}

const char* batch_norm_forward_cuda(const BatchNormParams& params, void* workspace, void* stream) {
  return visit_floating(params.dtype, [&](auto element) {
    return forward<decltype(element)>(params, workspace, static_cast<GpuStream>(stream));
  });
}

const char* batch_norm_backward_cuda(const BatchNormParams& params, const BatchNormGradients& gradients,
                                     void* workspace, void* stream) {
  return visit_floating(params.dtype, [&](auto element) {
    return backward<decltype(element)>(params, gradients, workspace, static_cast<GpuStream>(stream));
  });
}

}  // namespace myvision
