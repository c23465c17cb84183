// Launches attention's kernels: it chooses between those of the tensor cores and the others, splits the keys and lays
// out the workspace.
#include <algorithm>

#include "ops/attention/gpu/attention_mma.cuh"
#include "ops/attention/gpu/attention_simt.cuh"

namespace myvision {
using namespace gpu::attention;
namespace {

// How keys are split depends on shapes alone, so that results are the same on every GPU.
constexpr int64_t kWantedBlocks = 256;  // about as many as large GPUs run at once
constexpr int64_t kLeastKeys = 256;     // the fewest keys of a split
constexpr int64_t kMostSplits = 64;

int64_t rows_of(const AttentionParams& params) {
  return (params.query_starts ? 1 : params.batch) * params.heads * params.queries;
}

int64_t splits_of(const AttentionParams& params, int64_t blocks) {
  const int64_t sequences = params.key_starts ? std::max<int64_t>(params.batch, 1) : 1;
  const int64_t most = std::min(params.keys / sequences / kLeastKeys, kMostSplits);
  return std::max<int64_t>(std::min(ceil_div(kWantedBlocks, std::max<int64_t>(blocks, 1)), most), 1);
}

Cut small_cut(const AttentionParams& params) { return {query_tiles(params, kRowTile), params.heads, 1, 1}; }

// ---- what the tensor cores take -------------------------------------------------------------------------------------

template <typename T>
inline constexpr bool kIsHalf = std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>;

// Whether rows can be copied 16 bytes at a time.
bool has_aligned_rows(const Strided4& tensor) {
  const int64_t* stride = tensor.stride;
  return is_vector_aligned(tensor.data) && stride[0] % kMmaPack == 0 && stride[1] % kMmaPack == 0 &&
         stride[2] % kMmaPack == 0 && stride[3] == 1;
}

template <typename T>
bool takes_mma(const AttentionParams& params) {
  if constexpr (kHasMma && kIsHalf<T>) {
    const auto fits = [](int64_t width) { return width > 0 && width <= kMmaWidth && width % kMmaPack == 0; };
    return fits(params.width) && fits(params.value_width) && has_aligned_rows(params.query) &&
           has_aligned_rows(params.key) && has_aligned_rows(params.value) &&
           device_has_mma(attention_forward_mma<T, 64>);  // what holds for one of this file's kernels holds for all
  }
  return false;
}

// Calls visit with the width, as a constant, that the kernels compute with.
template <typename Visit>
void with_mma_width(const AttentionParams& params, Visit visit) {
  const int64_t width = std::max(params.width, params.value_width);
  if (width <= 64) return visit(std::integral_constant<int, 64>{});
  if (width <= 128) return visit(std::integral_constant<int, 128>{});
  visit(std::integral_constant<int, kMmaWidth>{});
}

// ---- forward --------------------------------------------------------------------------------------------------------

template <typename T>
Cut forward_cut(const AttentionParams& params) {
  using Tile = SimtTile<T>;
  Cut cut{query_tiles(params, kMmaRows), params.heads, 1, ceil_div(params.value_width, kMmaChunk<kMmaWidth>)};
  if (!takes_mma<T>(params)) {
    cut.tiles.size = Tile::kRows;
    cut.chunks = std::max<int64_t>(ceil_div(params.value_width, Tile::template kChunk<Tile::kMostGroups>), 1);
  }
  cut.splits = splits_of(params, cut.count());
  return cut;
}

template <typename T>
int64_t forward_workspace(const AttentionParams& params) {
  const int64_t splits = forward_cut<T>(params).splits;
  return splits == 1 ? 0 : splits * rows_of(params) * (params.value_width + 2) * sizeof(RealOf<T>);
}

template <typename T>
void forward_mma(const AttentionParams& params, const Partials<RealOf<T>>& partials, const Cut& cut, GpuStream stream) {
  if constexpr (kHasMma && kIsHalf<T>) {
    with_mma_width(params, [&](auto width) {
      constexpr int kBytes = kForwardShared<width> * sizeof(T);
      MYVISION_LAUNCH_WITH_SHARED((attention_forward_mma<T, width>), blocks_for(cut.count()), kMmaThreads, kBytes,
                                  stream, params, partials, cut);
    });
  }
}

template <typename T>
const char* forward(const AttentionParams& params, void* workspace, GpuStream stream) {
  using Real = RealOf<T>;
  const Cut cut = forward_cut<T>(params);
  Partials<Real> partials{nullptr, nullptr, rows_of(params)};
  if (cut.splits > 1) {
    partials.sums = static_cast<RowSums<Real>*>(workspace);
    partials.output = reinterpret_cast<Real*>(partials.sums + cut.splits * partials.rows);
  }
  if (takes_mma<T>(params)) {
    forward_mma<T>(params, partials, cut, stream);
  } else {
    MYVISION_LAUNCH(attention_forward_simt<T>, blocks_for(cut.count()), SimtTile<T>::kThreads, stream, params, partials,
                    cut);
  }
  if (cut.splits > 1) {
    const Cut rows = small_cut(params);
    MYVISION_LAUNCH(attention_merge<T>, blocks_for(rows.count()), kRowThreads, stream, params, partials, cut.splits,
                    rows);
  }
  return launch_error();
}

// ---- backward -------------------------------------------------------------------------------------------------------

template <typename T, bool kOfKeys>
void backward_simt(const AttentionParams& params, const AttentionGradients& gradients,
                   const RowStatistics<RealOf<T>>* statistics, int64_t width, GpuStream stream) {
  using Tile = SimtTile<T>;
  const int64_t chunks = ceil_div(width, Tile::template kChunk<kBackwardGroups<T, kOfKeys>>);
  const Cut cut{kOfKeys ? key_tiles(params, Tile::kRows) : query_tiles(params, Tile::kRows),
                kOfKeys ? params.key_heads : params.heads, 1, chunks};
  MYVISION_LAUNCH((attention_backward_simt<T, kOfKeys>), blocks_for(cut.count()), Tile::kThreads, stream, params,
                  gradients, statistics, cut);
}

template <typename T, bool kOfKeys>
void backward_mma(const AttentionParams& params, const AttentionGradients& gradients,
                  const RowStatistics<RealOf<T>>* statistics, int64_t computed_width, GpuStream stream) {
  if constexpr (kHasMma && kIsHalf<T>) {
    with_mma_width(params, [&](auto width) {
      constexpr int kBytes = kBackwardShared<width> * sizeof(T);
      const Cut cut{kOfKeys ? key_tiles(params, kMmaRows) : query_tiles(params, kMmaRows),
                    kOfKeys ? params.key_heads : params.heads, 1, ceil_div(computed_width, kMmaChunk<width>)};
      MYVISION_LAUNCH_WITH_SHARED((attention_backward_mma<T, width, kOfKeys>), blocks_for(cut.count()), kMmaThreads,
                                  kBytes, stream, params, gradients, statistics, cut);
    });
  }
}

// `width` is that of the results that are wanted.
template <typename T, bool kOfKeys>
void backward_rows(const AttentionParams& params, const AttentionGradients& gradients,
                   const RowStatistics<RealOf<T>>* statistics, int64_t width, GpuStream stream) {
  if (takes_mma<T>(params)) {
    backward_mma<T, kOfKeys>(params, gradients, statistics, width, stream);
  } else {
    backward_simt<T, kOfKeys>(params, gradients, statistics, width, stream);
  }
}

template <typename T>
void backward_mask(const AttentionParams& params, const AttentionGradients& gradients,
                   const RowStatistics<RealOf<T>>* statistics, const MaskTarget& target, GpuStream stream) {
  if constexpr (kHasMma && kIsHalf<T>) {
    if (takes_mma<T>(params)) {
      return with_mma_width(params, [&](auto width) {
        constexpr int kBytes = kBackwardShared<width> * sizeof(T);
        const MmaMaskCut<width> cut(params, target.mask);
        MYVISION_LAUNCH_WITH_SHARED((attention_backward_mask_mma<T, width>), blocks_for(cut.count()), kMmaThreads,
                                    kBytes, stream, params, gradients, statistics, target, cut);
      });
    }
  }
  const SimtMaskCut<T> cut(params, target.mask);
  MYVISION_LAUNCH(attention_backward_mask_simt<T>, blocks_for(cut.count()), SimtTile<T>::kThreads, stream, params,
                  gradients, statistics, target, cut);
}

// Replaces dot of all rows, which so far is the gradient of lse, with the sum of the gradients of the row's scores. As
// probabilities add up to 1, that is dot. It is computed as the gradient of a mask that has one number for each row.
template <typename T>
void sum_dots(const AttentionParams& params, const AttentionGradients& gradients, RowStatistics<RealOf<T>>* statistics,
              GpuStream stream) {
  constexpr int64_t kRow = sizeof(*statistics) / sizeof(statistics->dot);
  const Strided4 dots{&statistics->dot, {params.heads * params.queries * kRow, params.queries * kRow, kRow, 0}};
  backward_mask<T>(params, gradients, statistics, {dots, true}, stream);
}

template <typename T>
const char* backward(const AttentionParams& params, const AttentionGradients& gradients, void* workspace,
                     GpuStream stream) {
  auto* statistics = static_cast<RowStatistics<RealOf<T>>*>(workspace);
  const Cut rows = small_cut(params);
  MYVISION_LAUNCH(attention_backward_rows<T>, blocks_for(rows.count()), kRowThreads, stream, params, gradients,
                  statistics, rows);
  if (sums_dot<T>(gradients)) sum_dots<T>(params, gradients, statistics, stream);
  if (gradients.query.data) backward_rows<T, false>(params, gradients, statistics, params.width, stream);
  if (gradients.key.data || gradients.value.data) {
    const int64_t width =
        std::max(gradients.key.data ? params.width : 0, gradients.value.data ? params.value_width : 0);
    backward_rows<T, true>(params, gradients, statistics, width, stream);
  }
  if (gradients.mask.data) {
    backward_mask<T>(params, gradients, statistics, {gradients.mask, params.mask_dtype != params.dtype}, stream);
  }
  return launch_error();
}

}  // namespace

int64_t attention_forward_cuda_workspace(const AttentionParams& params) {
  switch (params.dtype) {
    case Dtype::Float64:
      return forward_workspace<double>(params);
    case Dtype::Float32:
      return forward_workspace<float>(params);
    default:
      return forward_workspace<Half>(params);
  }
}

bool attention_backward_cuda_takes(const AttentionParams& params, const Strided4& grad_output) {
  return has_aligned_rows(grad_output) ||
         !(params.dtype == Dtype::Float16 ? takes_mma<Half>(params)
                                          : params.dtype == Dtype::BFloat16 && takes_mma<BFloat16>(params));
}

int64_t attention_backward_cuda_workspace(const AttentionParams& params, const AttentionGradients&) {
  return rows_of(params) * 3 * real_size(params.dtype);
}

const char* attention_forward_cuda(const AttentionParams& params, void* workspace, void* stream) {
  return visit_floating(params.dtype, [&](auto element) {
    return forward<decltype(element)>(params, workspace, static_cast<GpuStream>(stream));
  });
}

const char* attention_backward_cuda(const AttentionParams& params, const AttentionGradients& gradients, void* workspace,
                                    void* stream) {
  return visit_floating(params.dtype, [&](auto element) {
    return backward<decltype(element)>(params, gradients, workspace, static_cast<GpuStream>(stream));
  });
}

}  // namespace myvision
