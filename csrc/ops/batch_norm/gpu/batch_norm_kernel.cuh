// batch_norm on the GPU, and instance_norm and group_norm. A set is what is reduced on its own: a channel of the batch,
// or of one image where groups > 0; what shares a mean is one set or several. Sets are cut into parts, so that there
// are blocks enough; what blocks found is merged in a fixed order.
//
// Bandwidth is the limit of all. With e = sizeof(T) and r = sizeof(Real) they move, per element:
//   batch_norm_moments          e read
//   batch_norm_apply            e read (2 e with a residual), e written
//   batch_norm_backward_sums    2 e read (3 e where an activation follows a residual)
//   batch_norm_backward_apply   the same read, e written (2 e with the residual's gradient)
// and per part of a set:
//   batch_norm_moments, batch_norm_merge                                24 bytes written, read; again from a cache
//   batch_norm_backward_sums, sum_columns or batch_norm_group_sums      2 r written, 2 r read
#pragma once
#include "common/extremes.h"
#include "common/norm.cuh"
#include "ops/batch_norm/batch_norm.h"

namespace myvision::gpu::batch_norm {

inline constexpr int kBatchNormThreads = 256;
inline constexpr int kBatchNormLoads = 4;  // packs that a thread reads before it needs the first

struct BatchNormPlan {
  Tile tile;
  int64_t sets;                // in packs where the tile is across
  int64_t length;              // of a set: in packs, or in pixels where the tile is across
  int64_t plane;               // one image's share of it
  int64_t parts, part_length;  // how a set is cut

  MYVISION_HOST_DEVICE int64_t set_tiles() const { return (sets + tile.slots - 1) / tile.slots; }
};

// A thread's way through its share of a tile: of one part of a set, or of kSets neighbouring sets.
template <typename T, int kWidth, int kSets>
class Walk {
 public:
  using Reals = Pack<RealOf<T>, kWidth>;

  __device__ __forceinline__ Walk(const BatchNormParams& params, const BatchNormPlan& plan, int64_t tile)
      : params_(params), plan_(plan), part(divide(tile, plan.set_tiles())) {
    const int64_t set_in_tiles = (tile - part * plan.set_tiles()) * plan.tile.slots + plan.tile.slot();
    exists = set_in_tiles < plan.sets;
    set = exists ? set_in_tiles * kSets : 0;
    set_image_ = divide(set, params.channels);
    channel = set - set_image_ * params.channels;
    step_images_ = divide(plan.tile.members, plan.plane);
    step_ = plan.tile.members - step_images_ * plan.plane;
    end_ = min((part + 1) * plan.part_length, plan.length);
    go_to(part * plan.part_length);
  }

  // How many numbers the members find in each set.
  __device__ __forceinline__ int64_t count() const { return (end_ - part * plan_.part_length) * (kWidth / kSets); }

  // Returns the group of the set that is `which` after the first.
  __device__ __forceinline__ int64_t group(int which) const {
    return params_.groups == 0 ? channel + which : divide(set + which, params_.channels / params_.groups);
  }

  // The part's first pack, the same for all members.
  __device__ __forceinline__ Reals load_first(const Strided4& tensor) {
    go_to(part * plan_.part_length);
    return load(tensor);
  }

  __device__ __forceinline__ void start() { go_to(part * plan_.part_length + plan_.tile.member()); }
  __device__ __forceinline__ bool has_pack() const { return exists && index_ < end_; }
  __device__ __forceinline__ void next() {
    index_ += plan_.tile.members;
    image_ += step_images_;
    position_ += step_;
    if (position_ < plan_.plane) return;
    position_ -= plan_.plane;
    ++image_;
  }

  __device__ __forceinline__ Reals load(const Strided4& tensor) const {
    return reals_of(load_pack<kWidth>(static_cast<const T*>(tensor.data) + offset(tensor), stride(tensor)));
  }
  __device__ __forceinline__ void store(const Strided4& tensor, const Reals& reals) const {
    store_pack(static_cast<T*>(tensor.data) + offset(tensor), stride(tensor), rounded<T>(reals));
  }

 private:
  __device__ __forceinline__ void go_to(int64_t index) {
    index_ = index;
    image_ = divide(index, plan_.plane);
    position_ = index - image_ * plan_.plane;
  }

  __device__ __forceinline__ int64_t offset(const Strided4& tensor) const {
    const int64_t pixel = position_ * (kWidth / kSets);
    const int64_t y = params_.height == 1 ? 0 : divide(pixel, params_.width);
    return (set_image_ + image_) * tensor.stride[0] + channel * tensor.stride[1] + y * tensor.stride[2] +
           (pixel - y * params_.width) * tensor.stride[3];
  }
  static __device__ __forceinline__ int64_t stride(const Strided4& tensor) { return tensor.stride[kSets > 1 ? 1 : 3]; }

  const BatchNormParams& params_;
  const BatchNormPlan& plan_;
  int64_t set_image_, step_images_, step_, end_, index_, image_, position_;

 public:
  const int64_t part;
  int64_t set, channel;  // the first of kSets
  bool exists;
};

// Calls visit with the walk of each tile of the block.
template <typename T, int kWidth, int kSets, typename Visit>
__device__ __forceinline__ void visit_tiles(const BatchNormParams& params, const BatchNormPlan& plan, Visit visit) {
  for (int64_t tile = blockIdx.x; tile < plan.parts * plan.set_tiles(); tile += gridDim.x) {
    visit(Walk<T, kWidth, kSets>(params, plan, tile));
  }
}

// ---- statistics -----------------------------------------------------------------------------------------------------

// `count` numbers are summed up by their mean and the sum of the squares of their distances from it.
struct Moments {
  double count, mean, squares;
};

// A thread gathers the moments of kSets sets, chunk by chunk (Chan, Golub and LeVeque).
template <typename Real, int kSets>
struct Gathered {
  Real count, mean[kSets], squares[kSets];

  // `packs` of a chunk count, the others are 0.
  template <int kWidth, int kPacks>
  __device__ __forceinline__ void add(const Pack<Real, kWidth> (&chunk)[kPacks], int packs) {
    const Real chunk_count = packs * (kWidth / kSets), total = count + chunk_count, share = chunk_count / total;
#pragma unroll
    for (int s = 0; s < kSets; ++s) {
      Real sum = 0, chunk_squares = 0;
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
#pragma unroll
        for (int j = s; j < kWidth; j += kSets) sum += chunk[i].value[j];
      }
      const Real chunk_mean = sum / chunk_count;
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
#pragma unroll
        for (int j = s; j < kWidth; j += kSets) {
          const Real distance = i < packs ? chunk[i].value[j] - chunk_mean : Real(0);
          chunk_squares += distance * distance;
        }
      }
      const Real step = chunk_mean - mean[s];
      mean[s] += step * share;
      squares[s] += chunk_squares + step * step * count * share;
    }
    count = total;
  }
};

// Writes partial[parts][sets]. Numbers are taken as their distances from one of the set, so that nothing cancels.
template <typename T, int kWidth, int kSets>
__global__ void MYVISION_LAUNCH_BOUNDS(kBatchNormThreads, 2)
    batch_norm_moments(const BatchNormParams params, const BatchNormPlan plan, Moments* partial) {
  using Real = RealOf<T>;
  visit_tiles<T, kWidth, kSets>(params, plan, [&](auto walk) {
    const Pack<Real, kWidth> first = walk.load_first(params.input);
    Gathered<Real, kSets> gathered{};
    for (walk.start(); walk.has_pack();) {
      Pack<Real, kWidth> chunk[kBatchNormLoads] = {};
      int packs = 0;
#pragma unroll
      for (int i = 0; i < kBatchNormLoads; ++i) {
        if (!walk.has_pack()) continue;
        chunk[i] = walk.load(params.input);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) chunk[i].value[j] -= first.value[j % kSets];
        walk.next();
        ++packs;
      }
      gathered.add(chunk, packs);
    }
    const int64_t count = walk.count();
#pragma unroll
    for (int s = 0; s < kSets; ++s) {
      const Real mean = plan.tile.sum(gathered.count * gathered.mean[s]) / Real(count), step = gathered.mean[s] - mean;
      const Real squares = plan.tile.sum(gathered.squares[s] + gathered.count * step * step);
      if (walk.exists && plan.tile.member() == 0) {
        partial[walk.part * (plan.sets * kSets) + walk.set + s] = {double(count), double(first.value[s]) + double(mean),
                                                                   double(squares)};
      }
    }
  });
}

template <typename Real>
__device__ __forceinline__ Statistics<Real> statistics_of(double mean, double variance, double eps) {
  const Real rounded_mean = static_cast<Real>(mean);
  return {rounded_mean, static_cast<Real>(mean - rounded_mean), static_cast<Real>(rstd_of(variance, eps))};
}

template <typename Real>
__device__ __forceinline__ void write_statistics(const BatchNormParams& params, int64_t group,
                                                 const Statistics<Real>& of_group) {
  const int64_t groups = number_of_groups(params);
  Real* statistics = static_cast<Real*>(params.statistics);
  statistics[group] = of_group.mean;
  statistics[groups + group] = of_group.rest;
  statistics[2 * groups + group] = of_group.rstd;
}

template <typename Real>
__device__ __forceinline__ void move_towards(void* running, int64_t channel, double momentum, double value) {
  Real& target = static_cast<Real*>(running)[channel];
  target = static_cast<Real>((1 - momentum) * target + momentum * value);
}

// How the parts of sets make up groups.
struct GroupParts {
  Tile tile;
  int64_t parts;
  int64_t sets;   // of all groups
  int64_t span;   // sets of a group
  int64_t count;  // numbers of a group

  // Calls visit(set, index in partial[parts][sets]) for the thread's share of a group.
  template <typename Visit>
  __device__ __forceinline__ void visit(int64_t group, Visit visit) const {
    for (int64_t i = tile.member(); i < parts * span; i += tile.members) {
      const int64_t part = divide(i, span), set = group * span + (i - part * span);
      visit(set, part * sets + set);
    }
  }
};

// Returns the number `i` of a group, counted in some fixed order.
template <typename T>
__device__ __forceinline__ double number_of_group(const BatchNormParams& params, int64_t group, int64_t i) {
  const int64_t plane = params.height * params.width, which = divide(i, plane), pixel = i - which * plane;
  const int64_t y = divide(pixel, params.width), x = pixel - y * params.width;
  const int64_t image = params.groups == 0 ? which : divide(group, params.groups);
  const int64_t first_channel =
      (group - image * params.groups) * divide(params.channels, max(params.groups, int64_t(1)));
  const int64_t channel = params.groups == 0 ? group : first_channel + which, *stride = params.input.stride;
  const T* input = static_cast<const T*>(params.input.data);
  return to_real(input[image * stride[0] + channel * stride[1] + y * stride[2] + x * stride[3]]);
}

// The members of a tile's slot take the moments together.
template <typename T>
__device__ __forceinline__ ExtremeMoments extreme_moments_of_group(const BatchNormParams& params, const Tile& tile,
                                                                   int64_t group, int64_t count) {
  return extreme_moments<RealOf<T>>(
      static_cast<double>(count), number_of_group<T>(params, group, 0), true,
      [&](const auto& visit) {
        for (int64_t i = tile.member(); i < count; i += tile.members) visit(number_of_group<T>(params, group, i));
      },
      [&](double sum) { return tile.sum(sum); });
}

// Merges the parts to the groups' statistics. `images` groups, `owners` apart, update the same running statistics.
template <typename T>
__global__ void MYVISION_LAUNCH_BOUNDS(kBatchNormThreads, 2)
    batch_norm_merge(const BatchNormParams params, const GroupParts from, const Moments* partial, int64_t owners,
                     int64_t images) {
  using Real = RealOf<T>;
  const Tile tile = from.tile;
  for (int64_t start = int64_t(blockIdx.x) * tile.slots; start < owners; start += int64_t(gridDim.x) * tile.slots) {
    const bool exists = start + tile.slot() < owners, writes = exists && tile.member() == 0;
    const int64_t owner = exists ? start + tile.slot() : 0;
    double mean_of_images = 0, variance_of_images = 0;
    for (int64_t image = 0; image < images; ++image) {
      const int64_t group = image * owners + owner;
      const double first = partial[group * from.span].mean;
      double sum = 0, squares = 0;
      from.visit(group, [&](int64_t, int64_t i) { sum += partial[i].count * (partial[i].mean - first); });
      double mean = first + tile.sum(sum) / from.count;
      from.visit(group, [&](int64_t, int64_t i) {
        const double step = partial[i].mean - mean;
        squares += partial[i].squares + partial[i].count * step * step;
      });
      double variance = tile.sum(squares) / from.count;
      Statistics<Real> statistics = statistics_of<Real>(mean, variance, params.eps);
      // The block's threads go the slow way together, as they wait for one another there.
      if (strided_sum(std::isfinite(variance) ? 0.0 : 1.0, 1, tile.members * tile.slots) > 0) {
        const ExtremeMoments extreme = extreme_moments_of_group<T>(params, tile, group, from.count);
        if (!std::isfinite(variance)) {
          mean = unscaled_mean<Real>(extreme), variance = unscaled_variance<Real>(extreme);
          statistics = extreme_statistics<Statistics<Real>>(extreme, params.eps);
        }
      }
      if (writes) write_statistics(params, group, statistics);
      mean_of_images += mean / images;
      variance_of_images += variance * (double(from.count) / (from.count - 1)) / images;
    }
    if (!writes || !params.running_mean) continue;
    move_towards<Real>(params.running_mean, owner, params.momentum, mean_of_images);
    move_towards<Real>(params.running_var, owner, params.momentum, variance_of_images);
  }
}

template <typename Real>
__global__ void batch_norm_running_statistics(const BatchNormParams params) {
  for (int64_t channel = global_thread(); channel < params.channels; channel += global_threads()) {
    write_statistics(params, channel,
                     statistics_of<Real>(static_cast<const Real*>(params.running_mean)[channel],
                                         static_cast<const Real*>(params.running_var)[channel], params.eps));
  }
}

template <typename Real>
__device__ __forceinline__ Statistics<Real> statistics_of(const BatchNormParams& params, int64_t group) {
  if (params.statistics_from == StatisticsFrom::Running) {
    const Real variance = static_cast<const Real*>(params.running_var)[group];
    return {static_cast<const Real*>(params.running_mean)[group], 0, rstd_of(variance, static_cast<Real>(params.eps))};
  }
  const int64_t groups = number_of_groups(params);
  const Real* statistics = static_cast<const Real*>(params.statistics);
  return {statistics[group], statistics[groups + group], statistics[2 * groups + group]};
}

// ---- forward --------------------------------------------------------------------------------------------------------

// All numbers of a set are treated with these constants.
template <typename Real>
struct SetConstants {
  Statistics<Real> statistics;
  Real scale, shift;

  // Before residual and activation.
  __device__ __forceinline__ Real affine(Real x) const { return (x - statistics.mean) * scale + shift; }
};

template <typename Real>
__device__ __forceinline__ Real parameter(const void* data, int64_t channel, Real preset) {
  return data ? static_cast<const Real*>(data)[channel] : preset;
}

template <typename Real>
__device__ __forceinline__ SetConstants<Real> set_constants(const BatchNormParams& params, int64_t group,
                                                            int64_t channel) {
  const Statistics<Real> statistics = statistics_of<Real>(params, group);
  const Real scale = statistics.rstd * parameter(params.weight, channel, Real(1));
  return {statistics, scale, parameter(params.bias, channel, Real(0)) - statistics.rest * scale};
}

template <typename T, int kWidth, int kSets>
__global__ void MYVISION_LAUNCH_BOUNDS(kBatchNormThreads, 2)
    batch_norm_apply(const BatchNormParams params, const BatchNormPlan plan) {
  using Real = RealOf<T>;
  visit_tiles<T, kWidth, kSets>(params, plan, [&](auto walk) {
    SetConstants<Real> constants[kSets];
#pragma unroll
    for (int s = 0; s < kSets; ++s) constants[s] = set_constants<Real>(params, walk.group(s), walk.channel + s);
    for (walk.start(); walk.has_pack(); walk.next()) {
      Pack<Real, kWidth> x = walk.load(params.input), residual{};
      if (params.residual.data) residual = walk.load(params.residual);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        x.value[j] = activate(params.activation, constants[j % kSets].affine(x.value[j]) + residual.value[j]);
      }
      walk.store(params.output, x);
    }
  });
}

// ---- backward -------------------------------------------------------------------------------------------------------

// The gradient before the activation, and the normalised numbers.
template <typename Reals>
struct BackwardPack {
  Reals gradient, normalized;
};

template <typename T, int kWidth, int kSets>
__device__ __forceinline__ BackwardPack<Pack<RealOf<T>, kWidth>> load_backward(
    const BatchNormParams& params, const BatchNormGradients& gradients, const Walk<T, kWidth, kSets>& walk,
    const SetConstants<RealOf<T>> (&constants)[kSets]) {
  Pack<RealOf<T>, kWidth> x = walk.load(params.input), gradient = walk.load(gradients.output), residual{};
  const bool activated = params.activation.kind != ActivationKind::None;
  if (activated && params.residual.data) residual = walk.load(params.residual);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const SetConstants<RealOf<T>>& set = constants[j % kSets];
    if (activated) {
      gradient.value[j] *= activation_derivative(params.activation, set.affine(x.value[j]) + residual.value[j]);
    }
    x.value[j] = set.statistics.normalize(x.value[j]);
  }
  return {gradient, x};
}

// Writes partial[parts][sets]: the sums of the gradient, and of the gradient times the normalised.
template <typename T, int kWidth, int kSets>
__global__ void MYVISION_LAUNCH_BOUNDS(kBatchNormThreads, 2)
    batch_norm_backward_sums(const BatchNormParams params, const BatchNormGradients gradients, const BatchNormPlan plan,
                             Pair<RealOf<T>>* partial) {
  using Real = RealOf<T>;
  visit_tiles<T, kWidth, kSets>(params, plan, [&](auto walk) {
    SetConstants<Real> constants[kSets];
    Pair<Real> sums[kSets] = {};
#pragma unroll
    for (int s = 0; s < kSets; ++s) constants[s] = set_constants<Real>(params, walk.group(s), walk.channel + s);
    for (walk.start(); walk.has_pack(); walk.next()) {
      const auto [gradient, normalized] = load_backward(params, gradients, walk, constants);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        sums[j % kSets] += {gradient.value[j], gradient.value[j] * normalized.value[j]};
      }
    }
#pragma unroll
    for (int s = 0; s < kSets; ++s) {
      const Pair<Real> sum = plan.tile.sum(sums[s]);
      if (walk.exists && plan.tile.member() == 0) partial[walk.part * (plan.sets * kSets) + walk.set + s] = sum;
    }
  });
}

// sums[2][groups], of the sets' sums times their weights.
template <typename Real>
__global__ void MYVISION_LAUNCH_BOUNDS(kBatchNormThreads, 2)
    batch_norm_group_sums(const BatchNormParams params, const GroupParts from, const Pair<Real>* partial, Real* sums) {
  const Tile tile = from.tile;
  const int64_t groups = number_of_groups(params);
  for (int64_t start = int64_t(blockIdx.x) * tile.slots; start < groups; start += int64_t(gridDim.x) * tile.slots) {
    const int64_t group = min(start + tile.slot(), groups - 1);
    Pair<Real> sum{};
    from.visit(group, [&](int64_t set, int64_t i) {
      const Real weight = parameter(params.weight, set % params.channels, Real(1));
      sum += {weight * partial[i].first, weight * partial[i].second};
    });
    sum = tile.sum(sum);
    if (tile.member() != 0 || start + tile.slot() >= groups) continue;
    sums[group] = sum.first;
    sums[groups + group] = sum.second;
  }
}

// sums is [2][groups], without the weight where a group is a channel; factor makes them means. Null: not the input's
// own statistics.
template <typename T, int kWidth, int kSets>
__global__ void MYVISION_LAUNCH_BOUNDS(kBatchNormThreads, 2)
    batch_norm_backward_apply(const BatchNormParams params, const BatchNormGradients gradients,
                              const BatchNormPlan plan, const RealOf<T>* sums, RealOf<T> factor) {
  using Real = RealOf<T>;
  visit_tiles<T, kWidth, kSets>(params, plan, [&](auto walk) {
    SetConstants<Real> constants[kSets];
    Pair<Real> means[kSets] = {};
#pragma unroll
    for (int s = 0; s < kSets; ++s) {
      const int64_t group = walk.group(s);
      constants[s] = set_constants<Real>(params, group, walk.channel + s);
      const Real by = factor * (params.groups == 0 ? constants[s].scale : constants[s].statistics.rstd);
      if (sums) means[s] = {by * sums[group], by * sums[number_of_groups(params) + group]};
    }
    for (walk.start(); walk.has_pack(); walk.next()) {
      auto [gradient, normalized] = load_backward(params, gradients, walk, constants);
      if (gradients.residual.data) walk.store(gradients.residual, gradient);
      if (!gradients.input.data) continue;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        gradient.value[j] *= constants[j % kSets].scale;
        const Pair<Real>& mean = means[j % kSets];
        if (sums) gradient.value[j] -= mean.first + normalized.value[j] * mean.second;
      }
      walk.store(gradients.input, gradient);
    }
  });
}

}  // namespace myvision::gpu::batch_norm
