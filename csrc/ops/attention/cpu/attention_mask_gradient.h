// The gradient of the mask on the CPU. Compiled once per instruction set.
//
// An element of it is the sum over all scores that share it. Where the mask is repeated along batch or heads, these
// belong to several units, which are all heads that share a key head. Units that share elements are a set, which is
// dealt out to parts. Each part has sums of its own, which are added up in order. So that these sums take little
// memory, the keys are gone through in phases.
#pragma once
#include <numeric>

#include "ops/attention/cpu/attention_pairs.h"

namespace myvision::CPU_CAPABILITY::attention {

template <typename S, typename T = Compute<S>>
class MaskGradient {
  static constexpr int64_t kLanes = GemmTile<T>::kCols;

 public:
  MaskGradient(const AttentionParams& params, const AttentionGradients& gradients, const Pairs<S>& pairs)
      : p(params), grad_(gradients.mask), pairs_(pairs) {}

  // Whether tiles of keys have elements of their own, and may be worked on at the same time.
  bool has_keys() const { return owns_[3]; }
  // How many tiles of keys make a phase.
  int64_t phase_tiles() const { return phase_tiles_; }
  int64_t sets() const { return (owns_[0] ? p.batch : 1) * (owns_[1] ? p.key_heads : 1); }
  int64_t parts() const { return parts_; }
  int64_t units_of_set() const { return p.batch * p.key_heads / sets(); }
  int64_t unit(int64_t set, int64_t i) const {
    const int64_t heads = owns_[1] ? 1 : p.key_heads;  // key heads of a set
    const int64_t b = owns_[0] ? set * heads / p.key_heads : i / heads;
    return b * p.key_heads + (owns_[1] ? set % p.key_heads : i % heads);
  }

  // Clears the sums of a part for the tiles of keys of a phase that belong to a cut.
  void clear(int64_t set, int64_t part, int64_t cut, int64_t cuts) const {
    if (!grad_.data) return;
    const int64_t heads = p.heads / p.key_heads, first = unit(set, 0);
    const int64_t slice = slice_of(first / p.key_heads, first % p.key_heads * heads);
    for (int64_t i = 0; i < (owns_[1] ? heads : 1); ++i)
      for (int64_t key_tile = cut; key_tile < key_tiles_; key_tile += cuts)
        std::fill_n(tile(part, slice + i, 0, key_tile), query_tiles_ * tile_size_, T(0));
  }

  // Adds the gradients of the scores of a panel of n queries, from number i on, and keys of one tile. A row of
  // gradients, for one key, is query_pitch apart from the next.
  void add(const Head& head, int64_t part, int64_t i, int64_t n, KeyRange keys, const T* gradients) const {
    if (!grad_.data) return;
    const int64_t query_tile = i / pairs_.queries.size, lane = i % pairs_.queries.size;
    const int64_t key_tile = keys.first / pairs_.keys.size % phase_tiles_, key = keys.first % pairs_.keys.size;
    T* to = tile(part, slice_of(head.b, head.head), owns_[2] ? query_tile : 0, owns_[3] ? key_tile : 0) +
            (owns_[3] ? key * pitch_ : 0) + (owns_[2] ? lane : 0);
    const int64_t step = owns_[3] ? pitch_ : 0;
    const T* from = gradients;
    for (int64_t j = keys.first; j < keys.last; ++j, from += pairs_.query_pitch) {
      if (owns_[2])
        for (int64_t half = 0; half < kLanes; half += Vec<T>::size())
          (Vec<T>::loadu(to + half) + Vec<T>::loadu(from + half)).store(to + half);
      else
        *to += std::accumulate(from, from + n, T(0));
      to += step;
    }
  }

  // Writes the gradients of a phase of keys, which begins with this tile.
  void store(int64_t first_tile) const {
    if (!grad_.data) return;
    const int64_t key_tiles = owns_[3] ? std::min(key_tiles_, pairs_.keys.count - first_tile) : 1;
    parallel_tasks(num_threads(), slice_count() * query_tiles_ * key_tiles, [&](int64_t task, int64_t) {
      const int64_t slice = task / query_tiles_ / key_tiles, query_tile = task % query_tiles_,
                    key_tile = task / query_tiles_ % key_tiles;
      T* const sums = tile(0, slice, query_tile, key_tile);
      for (int64_t part = 1; part < parts_; ++part) {
        const T* const from = tile(part, slice, query_tile, key_tile);
        for (int64_t i = 0; i < tile_size_; ++i) sums[i] += from[i];
      }
      store_tile(slice, query_tile, first_tile + key_tile, sums);
    });
  }

 private:
  int64_t slice_count() const { return (owns_[0] ? p.batch : 1) * (owns_[1] ? p.heads : 1); }
  int64_t slice_of(int64_t b, int64_t head) const {
    return (owns_[0] ? b * (owns_[1] ? p.heads : 1) : 0) + (owns_[1] ? head : 0);
  }
  T* tile(int64_t part, int64_t slice, int64_t query_tile, int64_t key_tile) const {
    return sums_.template as<T>() +
           (((part * slice_count() + slice) * key_tiles_ + key_tile) * query_tiles_ + query_tile) * tile_size_;
  }

  void store_tile(int64_t slice, int64_t query_tile, int64_t key_tile, const T* sums) const {
    const int64_t q = query_tile * pairs_.queries.size, k = key_tile * pairs_.keys.size;
    const int64_t n = owns_[2] ? std::min(pairs_.queries.size, p.queries - q) : 1;
    const int64_t count = owns_[3] ? std::min(pairs_.keys.size, p.keys - k) : 1;
    const int64_t heads = owns_[1] ? p.heads : 1, *stride = grad_.stride;
    with_type(p.mask_dtype, [&](auto* type) {
      using M = std::remove_pointer_t<decltype(type)>;
      M* const to = static_cast<M*>(grad_.data) + slice / heads * stride[0] + slice % heads * stride[1] +
                    q * stride[2] + k * stride[3];
      if constexpr (std::is_same_v<T, Compute<M>>) {
        unpack_columns(sums, pitch_, n, count, Rows<M>{to, stride[2], stride[3]});
      } else {
        for (int64_t i = 0; i < n; ++i)
          for (int64_t j = 0; j < count; ++j) to[i * stride[2] + j * stride[3]] = static_cast<M>(sums[j * pitch_ + i]);
      }
    });
  }

  // Parts and phases depend on shapes alone, not on the number of threads.
  int64_t number_of_parts() const {
    constexpr int64_t kEnoughTasks = 16;
    return std::clamp(ceil_div(kEnoughTasks, sets()), int64_t(1), std::max(units_of_set(), int64_t(1)));
  }
  int64_t number_of_phase_tiles() const {
    constexpr int64_t kBytes = int64_t(32) << 20, kLeastTiles = 4;  // enough to be worked on at the same time
    const int64_t all = std::max(pairs_.keys.count, int64_t(1));
    if (!grad_.data || !owns_[3]) return all;
    const int64_t bytes = parts_ * slice_count() * query_tiles_ * tile_size_ * int64_t(sizeof(T));
    const int64_t most = std::clamp(kBytes / std::max(bytes, int64_t(1)), std::min(kLeastTiles, all), all);
    return ceil_div(all, ceil_div(all, most));  // so that phases are of about equal size
  }
  bool owns(int dim) const { return !grad_.data || grad_.stride[dim] != 0; }

  const AttentionParams& p;
  const Strided4& grad_;
  const Pairs<S>& pairs_;
  // Whether the mask has elements of its own along batch, heads, queries and keys, or is repeated.
  const bool owns_[4] = {owns(0), owns(1), owns(2), owns(3)};
  const int64_t query_tiles_ = owns_[2] ? pairs_.queries.count : 1;
  // The sums of a tile are [key][query].
  const int64_t pitch_ = owns_[2] ? pairs_.query_pitch : 1;
  const int64_t tile_size_ = round_up((owns_[3] ? pairs_.keys.size : 1) * pitch_, 16);
  const int64_t parts_ = number_of_parts(), phase_tiles_ = number_of_phase_tiles();
  const int64_t key_tiles_ = owns_[3] ? phase_tiles_ : 1;  // how many tiles of keys have sums
  const Workspace sums_{
      grad_.data ? int64_t(parts_ * slice_count() * key_tiles_ * query_tiles_ * tile_size_ * sizeof(T)) : 0};
};

}  // namespace myvision::CPU_CAPABILITY::attention
