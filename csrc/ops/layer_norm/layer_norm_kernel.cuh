// layer_norm on the GPU, and rms_norm, add_layer_norm and add_rms_norm. The members of a slot share a row. Packs lie
// along rows where channels are neighbours in memory, else across rows.
//
// Bandwidth is the limit of all. With e = sizeof(T) and r = sizeof(Real) they move, per element:
//   layer_norm_forward         e read (2 e with a residual or an addend), e written (2 e with a sum)
//   layer_norm_backward        2 e read (3 e with an activated residual or a gradient of the sum), e written for each
//                              gradient of a tensor
// and per channel, slot and part of the rows, for the gradients of weight and bias:
//   layer_norm_backward, sum_columns     2 r written, 2 r read
// A row that does not fit, in forward into shared memory, in backward into registers, costs more per element:
//   layer_norm_forward         what is normalised is read 3 times (2 times where there is no mean)
//   layer_norm_backward_sums   2 e read (3 e with an activated residual), before layer_norm_backward
#pragma once
#include <utility>

#include "common/extremes.h"
#include "common/norm.cuh"
#include "common/philox.h"
#include "ops/layer_norm/layer_norm.h"

namespace myvision::gpu::layer_norm {

inline constexpr int kMaxRowThreads = 512;

// How many packs of a row a thread of backward holds: few enough that nothing spills.
constexpr int64_t held_packs(int64_t real_bytes, int64_t width) {
  const int64_t packs = 32 / real_bytes / width;
  return packs > 0 ? packs : 1;
}
template <typename T, int kWidth>
inline constexpr int kHeld = held_packs(sizeof(RealOf<T>), kWidth);

struct LayerNormPlan {
  Tile tile;
  int64_t rows;    // in packs where the tile is across
  int64_t length;  // of a row: in packs, or in channels where the tile is across
  int kept_bytes;  // of forward: shared memory for all rows of a block, or 0
  // Backward alone has these:
  int64_t chunks;            // of a row, as long as what the members hold
  int64_t parts, part_rows;  // how the rows are cut
};

// A row, or kSets neighbouring ones, as a member of a tile sees it.
template <typename T, int kWidth, int kSets>
class Row {
 public:
  using Reals = Pack<RealOf<T>, kWidth>;
  static constexpr int kChannels = kWidth / kSets;  // of a pack

  __device__ __forceinline__ Row(const LayerNormParams& params, const LayerNormPlan& plan, int64_t row, int64_t end)
      : exists(row < end),
        index(exists ? row * kSets : 0),
        length_(exists ? plan.length : 0),
        params_(params),
        tile_(plan.tile) {
    const int64_t line = divide(index, params.width);
    x_ = index - line * params.width;
    batch_ = divide(line, params.height);
    y_ = line - batch_ * params.height;
  }

  // Calls visit(pack, channel) for the thread's packs of the row.
  template <int kUnroll, typename Visit>
  __device__ __forceinline__ void visit_packs(Visit visit) const {
#pragma unroll kUnroll
    for (int64_t pack = tile_.member(); pack < length_; pack += tile_.members) visit(pack, pack * kChannels);
  }

  // Returns the place of a pack among those of all rows of the block; neighbouring threads have neighbours.
  __device__ __forceinline__ int64_t place(int64_t pack) const {
    return tile_.across ? pack * tile_.slots + tile_.slot() : tile_.slot() * length_ + pack;
  }

  // Calls visit(i, channel) for the thread's packs of a chunk; i is a constant.
  template <typename Visit>
  __device__ __forceinline__ void visit_chunk(int64_t chunk, Visit visit) const {
#pragma unroll
    for (int i = 0; i < kHeld<T, kWidth>; ++i) {
      const int64_t pack = (chunk * kHeld<T, kWidth> + i) * tile_.members + tile_.member();
      if (pack < length_) visit(i, pack * kChannels);
    }
  }

  __device__ __forceinline__ Reals load(const Strided4& tensor, int64_t channel) const {
    return reals_of(load_pack<kWidth>(static_cast<const T*>(tensor.data) + offset(tensor, channel), stride(tensor)));
  }
  __device__ __forceinline__ void store(const Strided4& tensor, int64_t channel, const Reals& reals) const {
    store_pack(static_cast<T*>(tensor.data) + offset(tensor, channel), stride(tensor), rounded<T>(reals));
  }

  const bool exists;
  const int64_t index;  // of the first row

 private:
  __device__ __forceinline__ int64_t offset(const Strided4& tensor, int64_t channel) const {
    return batch_ * tensor.stride[0] + channel * tensor.stride[1] + y_ * tensor.stride[2] + x_ * tensor.stride[3];
  }
  static __device__ __forceinline__ int64_t stride(const Strided4& tensor) { return tensor.stride[kSets > 1 ? 3 : 1]; }

  const int64_t length_;
  const LayerNormParams& params_;
  const Tile& tile_;
  int64_t batch_, y_, x_;
};

// Loads the parameters of a pack's channels; data is Real[channels], or null for the preset.
template <int kWidth, int kSets, typename Real>
__device__ __forceinline__ Pack<Real, kWidth> load_parameters(const void* data, int64_t channel, Real preset) {
  constexpr int kChannels = kWidth / kSets, kMost = kVectorBytes / sizeof(Real);
  constexpr int kStep = kChannels < kMost ? kChannels : kMost;
  Pack<Real, kWidth> pack;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) pack.value[j] = preset;
  if (!data) return pack;
  const Real* parameters = static_cast<const Real*>(data) + channel;
#pragma unroll
  for (int j = 0; j < kChannels; j += kStep) {
    const Pack<Real, kStep> part = load_vector<kStep>(parameters + j);
#pragma unroll
    for (int i = 0; i < kStep * kSets; ++i) pack.value[j * kSets + i] = part.value[i / kSets];
  }
  return pack;
}

// ---- dropout --------------------------------------------------------------------------------------------------------

// Dropout multiplies numbers with 0, or with what keeps their mean.
template <typename T, int kWidth, int kSets>
__device__ __forceinline__ void drop(const LayerNormParams& params, const Row<T, kWidth, kSets>& row, int64_t channel,
                                     Pack<RealOf<T>, kWidth>& reals) {
  if (params.dropout_p == 0) return;
  const uint64_t seed = *params.seed, threshold = dropout_threshold(params.dropout_p);
  const auto scale = static_cast<RealOf<T>>(params.dropout_p < 1 ? 1 / (1 - params.dropout_p) : 0);
  PhiloxWords words{};
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const int64_t element = (row.index + j % kSets) * params.channels + channel + j / kSets;
    if (j == 0 || kSets > 1 || element % 4 == 0) words = philox(seed, element / 4);
    reals.value[j] *= word_of(words, element) < threshold ? 0 : scale;
  }
}

// ---- forward --------------------------------------------------------------------------------------------------------

// What is normalised: the input, or the sum of addend and dropped input, which the first visit writes. A row that fits
// is kept in shared memory, each pack in a place that its thread alone uses.
template <typename T, int kWidth, int kSets>
class Source {
 public:
  using TheRow = Row<T, kWidth, kSets>;
  using Reals = Pack<RealOf<T>, kWidth>;
  using Kept = Pack<T, kWidth>;

  __device__ __forceinline__ Source(const LayerNormParams& params, const Row<T, kWidth, kSets>& row, Kept* kept)
      : params_(params), row_(row), kept_(kept) {}

  // Calls visit(channel, numbers) for the thread's packs of the row.
  template <int kUnroll, typename Visit>
  __device__ __forceinline__ void visit(Visit visit) {
    row_.template visit_packs<kUnroll>([&](int64_t pack, int64_t channel) {
      visit(channel, load(kept_ ? kept_ + row_.place(pack) : nullptr, channel));
    });
    visited_ = true;
  }

  // Calls visit(number) for all numbers of one of the rows, whoever's they are: slow, and without waiting for anyone.
  template <typename Visit>
  __device__ __forceinline__ void visit_row(int set, Visit visit) const {
    for (int64_t channel = 0; row_.exists && channel < params_.channels; channel += TheRow::kChannels) {
      Reals numbers = row_.load(params_.input, channel);
      if (params_.addend.data) {
        drop(params_, row_, channel, numbers);
        numbers = plus_addend(numbers, channel);
      }
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        if (j % kSets == set) visit(static_cast<double>(numbers.value[j]));
      }
    }
  }

  // The row's first numbers or, where there is dropout, others like them.
  __device__ __forceinline__ Reals pivot() const {
    const Reals first = row_.load(params_.input, 0);
    return params_.addend.data ? plus_addend(first, 0) : first;
  }

 private:
  __device__ __forceinline__ Reals load(Kept* kept, int64_t channel) const {
    if (visited_) return kept ? reals_of(*kept) : row_.load(params_.addend.data ? params_.sum : params_.input, channel);
    Reals numbers = row_.load(params_.input, channel);
    if (params_.addend.data) {
      drop(params_, row_, channel, numbers);
      numbers = plus_addend(numbers, channel);
      row_.store(params_.sum, channel, numbers);
    }
    if (kept) *kept = rounded<T>(numbers);
    return numbers;
  }

  // The sum is rounded, as it is written and as backward will read it.
  __device__ __forceinline__ Reals plus_addend(Reals numbers, int64_t channel) const {
    const Reals addend = row_.load(params_.addend, channel);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) numbers.value[j] += addend.value[j];
    return reals_of(rounded<T>(numbers));
  }

  const LayerNormParams& params_;
  const Row<T, kWidth, kSets>& row_;
  Kept* const kept_;
  bool visited_ = false;
};

// a + b, rounded, and what rounding took from it (Knuth).
template <typename Real>
__device__ __forceinline__ Pair<Real> exact_sum(Real a, Real b) {
  const Real sum = a + b, b_part = sum - a;
  return {sum, (a - (sum - b_part)) + (b - b_part)};
}

// Each thread reads the whole row for itself, so that rows that come here do not hold up the others of their block.
template <int kSet, typename T, int kWidth, int kSets>
__device__ __forceinline__ Statistics<RealOf<T>> extreme_statistics_of_row(const LayerNormParams& params,
                                                                           const Source<T, kWidth, kSets>& source) {
  const ExtremeMoments moments = extreme_moments<RealOf<T>>(
      static_cast<double>(params.channels), static_cast<double>(source.pivot().value[kSet]), params.centered,
      [&](const auto& visit) { source.visit_row(kSet, visit); }, [](double sum) { return sum; });
  return extreme_statistics<Statistics<RealOf<T>>>(moments, params.eps);
}

// The mean comes from distances to a pivot, the variance from distances to that mean, whose own sum corrects both.
template <typename T, int kWidth, int kSets>
__device__ __forceinline__ void compute_statistics(const LayerNormParams& params, const Tile& tile,
                                                   Source<T, kWidth, kSets>& source,
                                                   Statistics<RealOf<T>> (&of_rows)[kSets]) {
  using Reals = Pack<RealOf<T>, kWidth>;
  const auto count = static_cast<RealOf<T>>(params.channels);
  RealOf<T> means[kSets] = {};
  if (params.centered) {
    const Reals pivot = source.pivot();
    source.template visit<2>([&](int64_t, const Reals& x) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) means[j % kSets] += x.value[j] - pivot.value[j % kSets];
    });
#pragma unroll
    for (int s = 0; s < kSets; ++s) means[s] = pivot.value[s] + tile.sum(means[s]) / count;
  }
  Pair<RealOf<T>> sums[kSets] = {};
  source.template visit<1>([&](int64_t, const Reals& x) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const RealOf<T> distance = x.value[j] - means[j % kSets];
      sums[j % kSets] += {distance, distance * distance};
    }
  });
  unsigned extreme = 0;  // a bit for each row whose sums are not finite
#pragma unroll
  for (int s = 0; s < kSets; ++s) {
    const auto sum = tile.sum(sums[s]);
    const RealOf<T> shift = params.centered ? sum.first / count : 0;
    const RealOf<T> correction = params.centered ? sum.first * shift : 0;  // an infinite sum times 0 would be NaN
    const RealOf<T> variance = (sum.second - correction) / count;
    const auto mean = exact_sum(means[s], shift);
    of_rows[s] = {mean.first, mean.second, rstd_of(variance < 0 ? 0 : variance, static_cast<RealOf<T>>(params.eps))};
    extreme |= unsigned(!std::isfinite(sum.second)) << s;
  }
  // A loop of this length would not be unrolled, and so would index its arrays in memory.
  const auto replace_extremes = [&]<int... kSet>(std::integer_sequence<int, kSet...>) {
    ((extreme >> kSet & 1 ? void(of_rows[kSet] = extreme_statistics_of_row<kSet>(params, source)) : void()), ...);
  };
  replace_extremes(std::make_integer_sequence<int, kSets>{});
}

template <typename T, int kWidth, int kSets>
__device__ __forceinline__ void write_statistics(const LayerNormParams& params, const Row<T, kWidth, kSets>& row,
                                                 const Tile& tile, const Statistics<RealOf<T>> (&of_rows)[kSets]) {
  if (!params.statistics || !row.exists || tile.member() != 0) return;
  auto* rstd = static_cast<RealOf<T>*>(params.statistics) + row.index;
  if (params.centered) {
#pragma unroll
    for (int s = 0; s < kSets; ++s) rstd[s] = of_rows[s].mean;
    rstd += number_of_rows(params);
#pragma unroll
    for (int s = 0; s < kSets; ++s) rstd[s] = of_rows[s].rest;
    rstd += number_of_rows(params);
  }
#pragma unroll
  for (int s = 0; s < kSets; ++s) rstd[s] = of_rows[s].rstd;
}

// Of shared memory, in the sums of layer_norm_forward, beside the row that it keeps.
template <typename Real>
inline constexpr int kForwardVariableBytes = kStridedSumBytes<Real> + kStridedSumBytes<Pair<Real>>;

template <typename T, int kWidth, int kSets>
__global__ void MYVISION_LAUNCH_BOUNDS(kMaxRowThreads, 1)
    layer_norm_forward(const LayerNormParams params, const LayerNormPlan plan) {
  using Real = RealOf<T>;
  using Kept = Pack<T, kWidth>;
  MYVISION_DYNAMIC_SHARED(Kept, kept, kForwardVariableBytes<Real>);
  for (int64_t start = int64_t(blockIdx.x) * plan.tile.slots; start < plan.rows;
       start += int64_t(gridDim.x) * plan.tile.slots) {
    const Row<T, kWidth, kSets> row(params, plan, start + plan.tile.slot(), plan.rows);
    Source<T, kWidth, kSets> source(params, row, plan.kept_bytes > 0 ? kept : nullptr);
    Statistics<Real> statistics[kSets];
    compute_statistics(params, plan.tile, source, statistics);
    write_statistics(params, row, plan.tile, statistics);
    source.template visit<1>([&](int64_t channel, const Pack<Real, kWidth>& x) {
      const auto weight = load_parameters<kWidth, kSets>(params.weight, channel, Real(1));
      const auto bias = load_parameters<kWidth, kSets>(params.bias, channel, Real(0));
      Pack<Real, kWidth> output{};
      if (params.residual.data) output = row.load(params.residual, channel);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const Real affine = statistics[j % kSets].normalize(x.value[j]) * weight.value[j] + bias.value[j];
        output.value[j] = activate(params.activation, affine + output.value[j]);
      }
      row.store(params.output, channel, output);
    });
  }
}

// ---- backward -------------------------------------------------------------------------------------------------------

template <typename T, int kWidth, int kSets>
__device__ __forceinline__ void read_statistics(const LayerNormParams& params, const Row<T, kWidth, kSets>& row,
                                                Statistics<RealOf<T>> (&of_rows)[kSets]) {
  const auto* statistics = static_cast<const RealOf<T>*>(params.statistics) + row.index;
  const int64_t rows = number_of_rows(params);
#pragma unroll
  for (int s = 0; s < kSets; ++s) {
    of_rows[s] = params.centered ? Statistics<RealOf<T>>{statistics[s], statistics[rows + s], statistics[2 * rows + s]}
                                 : Statistics<RealOf<T>>{0, 0, statistics[s]};
  }
}

// The gradient before the activation, and the normalised numbers.
template <typename Reals>
struct RowGradient {
  Reals gradient, normalized;
};

template <typename T, int kWidth, int kSets>
__device__ __forceinline__ RowGradient<Pack<RealOf<T>, kWidth>> load_gradient(
    const LayerNormParams& params, const LayerNormGradients& gradients, const Row<T, kWidth, kSets>& row,
    const Statistics<RealOf<T>> (&statistics)[kSets], int64_t channel) {
  using Real = RealOf<T>;
  Pack<Real, kWidth> x = row.load(params.input, channel), gradient = row.load(gradients.output, channel);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) x.value[j] = statistics[j % kSets].normalize(x.value[j]);
  if (params.activation.kind == ActivationKind::None) return {gradient, x};
  const auto weight = load_parameters<kWidth, kSets>(params.weight, channel, Real(1));
  const auto bias = load_parameters<kWidth, kSets>(params.bias, channel, Real(0));
  Pack<Real, kWidth> residual{};
  if (params.residual.data) residual = row.load(params.residual, channel);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const Real affine = x.value[j] * weight.value[j] + bias.value[j];
    gradient.value[j] *= activation_derivative(params.activation, affine + residual.value[j]);
  }
  return {gradient, x};
}

// Adds a pack's part of the sums of a row: of the weighted gradient, and of it times the normalised.
template <int kSets, int kWidth, typename Real>
__device__ __forceinline__ void add_to_sums(const LayerNormParams& params, const RowGradient<Pack<Real, kWidth>>& pack,
                                            int64_t channel, Pair<Real> (&sums)[kSets]) {
  const auto weight = load_parameters<kWidth, kSets>(params.weight, channel, Real(1));
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const Real weighted = pack.gradient.value[j] * weight.value[j];
    sums[j % kSets] += {weighted, weighted * pack.normalized.value[j]};
  }
}

// For rows that do not fit: row_sums[rows].
template <typename T, int kWidth, int kSets>
__global__ void MYVISION_LAUNCH_BOUNDS(kMaxRowThreads, 1)
    layer_norm_backward_sums(const LayerNormParams params, const LayerNormGradients gradients, const LayerNormPlan plan,
                             Pair<RealOf<T>>* row_sums) {
  for (int64_t start = int64_t(blockIdx.x) * plan.tile.slots; start < plan.rows;
       start += int64_t(gridDim.x) * plan.tile.slots) {
    const Row<T, kWidth, kSets> row(params, plan, start + plan.tile.slot(), plan.rows);
    Statistics<RealOf<T>> statistics[kSets];
    read_statistics(params, row, statistics);
    Pair<RealOf<T>> sums[kSets] = {};
    row.template visit_packs<1>([&](int64_t, int64_t channel) {
      add_to_sums(params, load_gradient(params, gradients, row, statistics, channel), channel, sums);
    });
#pragma unroll
    for (int s = 0; s < kSets; ++s) {
      const Pair<RealOf<T>> sum = plan.tile.sum(sums[s]);
      if (row.exists && plan.tile.member() == 0) row_sums[row.index + s] = sum;
    }
  }
}

// Writes the gradients of what was normalised and of what dropout was given.
template <typename T, int kWidth, int kSets>
__device__ __forceinline__ void write_gradients(const LayerNormParams& params, const LayerNormGradients& gradients,
                                                const Row<T, kWidth, kSets>& row,
                                                const RowGradient<Pack<RealOf<T>, kWidth>>& pack, int64_t channel,
                                                const Statistics<RealOf<T>> (&statistics)[kSets],
                                                const Pair<RealOf<T>> (&means)[kSets]) {
  using Real = RealOf<T>;
  const auto weight = load_parameters<kWidth, kSets>(params.weight, channel, Real(1));
  Pack<Real, kWidth> gradient{};
  if (gradients.sum.data) gradient = row.load(gradients.sum, channel);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const Pair<Real>& mean = means[j % kSets];
    const Real centered =
        pack.gradient.value[j] * weight.value[j] - mean.first - pack.normalized.value[j] * mean.second;
    gradient.value[j] += statistics[j % kSets].rstd * centered;
  }
  if (gradients.input.data) row.store(gradients.input, channel, gradient);
  if (!gradients.dropped.data) return;
  drop(params, row, channel, gradient);
  row.store(gradients.dropped, channel, gradient);
}

// A block takes a chunk of the rows of a part. Rows that fit are one chunk, whose sums it takes itself: row_sums is
// null. Each slot writes partial[parts][slots][channels], the sums of the gradient and of it times the normalised;
// null: not wanted.
template <typename T, int kWidth, int kSets>
__global__ void MYVISION_LAUNCH_BOUNDS(kMaxRowThreads, 1)
    layer_norm_backward(const LayerNormParams params, const LayerNormGradients gradients, const LayerNormPlan plan,
                        const Pair<RealOf<T>>* row_sums, Pair<RealOf<T>>* partial) {
  using Real = RealOf<T>;
  using TheRow = Row<T, kWidth, kSets>;
  const bool flows_on = gradients.input.data || gradients.dropped.data;
  for (int64_t tile = blockIdx.x; tile < plan.parts * plan.chunks; tile += gridDim.x) {
    const int64_t part = divide(tile, plan.chunks), chunk = tile - part * plan.chunks;
    const int64_t first = part * plan.part_rows, end = min(first + plan.part_rows, plan.rows);
    Pair<Real> of_channels[kHeld<T, kWidth>][TheRow::kChannels] = {};
    for (int64_t start = first; start < end; start += plan.tile.slots) {
      const TheRow row(params, plan, start + plan.tile.slot(), end);
      Statistics<Real> statistics[kSets];
      read_statistics(params, row, statistics);
      RowGradient<Pack<Real, kWidth>> held[kHeld<T, kWidth>];
      Pair<Real> means[kSets] = {};
      row.visit_chunk(chunk, [&](int i, int64_t channel) {
        held[i] = load_gradient(params, gradients, row, statistics, channel);
        if (gradients.residual.data) row.store(gradients.residual, channel, held[i].gradient);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          of_channels[i][j / kSets] +=
              {held[i].gradient.value[j], held[i].gradient.value[j] * held[i].normalized.value[j]};
        }
        if (!row_sums) add_to_sums(params, held[i], channel, means);
      });
      if (!flows_on) continue;
#pragma unroll
      for (int s = 0; s < kSets; ++s) {
        const Pair<Real> sum = row_sums ? row_sums[row.index + s] : plan.tile.sum(means[s]);
        means[s] = {params.centered ? sum.first / Real(params.channels) : 0, sum.second / Real(params.channels)};
      }
      row.visit_chunk(chunk, [&](int i, int64_t channel) {
        write_gradients(params, gradients, row, held[i], channel, statistics, means);
      });
    }
    if (!partial) continue;
    const TheRow any(params, plan, 0, 1);
    any.visit_chunk(chunk, [&](int i, int64_t channel) {
      Pair<Real>* target = partial + (part * plan.tile.slots + plan.tile.slot()) * params.channels + channel;
#pragma unroll
      for (int j = 0; j < TheRow::kChannels; ++j) target[j] = of_channels[i][j];
    });
  }
}

}  // namespace myvision::gpu::layer_norm
