// attention's forward pass on the CPU. Compiled once per instruction set.
//
// A tile of queries meets the tiles of keys that it sees, one after the other: scores = keys x queries, a step of an
// online softmax, sums += weights^T x values. Keys (as columns) and values are packed once for all heads that share
// them.
#pragma once
#include "ops/attention/attention_few_queries.h"

namespace myvision::CPU_CAPABILITY {

inline constexpr int64_t kForwardQueries = 96, kForwardKeys = 192;  // of a tile, at most

template <typename S, typename T = Compute<S>>
class Forward {
  static constexpr int64_t kLanes = GemmTile<T>::kCols;

 public:
  Forward(const AttentionParams& params, const Lengths& lengths) : p(params), lengths_(lengths) {}

  void run() const {
    const int64_t tiles = queries_.count * group_ * cuts_;
    if (pack_first_) {
      parallel_tasks(num_threads(), units_ * keys_.count, [&](int64_t task, int64_t) {
        pack(head_of(task / keys_.count, 0), task % keys_.count, packed(task / keys_.count));
      });
      parallel_tasks(workers_, units_ * tiles, [&](int64_t task, int64_t worker) {
        run_tile(task / tiles, task % tiles, packed(task / tiles), scratch(worker));
      });
    } else {
      parallel_tasks(workers_, units_, [&](int64_t unit, int64_t worker) {
        for (int64_t tile = 0; tile < keys_.count; ++tile) pack(head_of(unit, 0), tile, packed(worker));
        for (int64_t tile = 0; tile < tiles; ++tile) run_tile(unit, tile, packed(worker), scratch(worker));
      });
    }
    results_.merge();
  }

 private:
  // The keys and values of a key head, tile after tile.
  struct Packed {
    T *keys, *values;
    bool* is_bad;  // of a tile: some value is not finite
  };
  // Memory of a worker.
  struct Scratch {
    T *queries, *scores, *sums, *peak, *total, *factor;
    Scores<T> modify;
  };

  int64_t packed_size() const { return keys_.count * (p.width * key_pitch_ + keys_.size * value_pitch_); }
  Packed packed(int64_t slot) const {
    T* const keys = memory_.template as<T>() + slot * packed_size();
    return {keys, keys + keys_.count * p.width * key_pitch_, flags_.template as<bool>() + slot * keys_.count};
  }
  int64_t scratch_size() const {
    return (p.width + keys_.size + 3) * query_pitch_ + queries_.size * value_pitch_ +
           Scores<T>::scratch_size(p, keys_.size);
  }
  Scratch scratch(int64_t worker) const {
    T* const queries = memory_.template as<T>() + slots_ * packed_size() + worker * scratch_size();
    T* const scores = queries + p.width * query_pitch_;
    T* const sums = scores + keys_.size * query_pitch_;
    T* const peak = sums + queries_.size * value_pitch_;
    return {queries,
            scores,
            sums,
            peak,
            peak + query_pitch_,
            peak + 2 * query_pitch_,
            Scores<T>(p, keys_.size, peak + 3 * query_pitch_)};
  }

  // The head that a tile of a unit, all that share a key head, belongs to.
  Head head_of(int64_t unit, int64_t tile) const {
    return Head(p, unit / p.key_heads, unit % p.key_heads * group_ + tile / (queries_.count * cuts_));
  }
  KeyRange keys_of_tile(const Head& head, int64_t tile) const {
    const int64_t first = tile * keys_.size;
    return {first, std::min(first + keys_.size, head.sequence.keys)};
  }

  void pack(const Head& head, int64_t tile, const Packed& to) const {
    const KeyRange range = keys_of_tile(head, tile);
    const int64_t n = range.last - range.first;
    if (n <= 0) return;
    T* const values = to.values + range.first * value_pitch_;
    pack_columns(key_rows<const S>(p.key, head).from(range.first), n, p.width, to.keys + tile * p.width * key_pitch_,
                 key_pitch_);
    pack_rows(key_rows<const S>(p.value, head).from(range.first), n, p.value_width, values, value_pitch_);
    to.is_bad[tile] = clear_bad_rows(values, value_pitch_, n, p.value_width);
  }

  void run_tile(int64_t unit, int64_t tile, const Packed& packed, const Scratch& own) const {
    // The last ones first: where the window is causal they take the longest.
    const int64_t q = (queries_.count - 1 - tile / cuts_ % queries_.count) * queries_.size, cut = tile % cuts_;
    const Head head = head_of(unit, tile);
    const int64_t n = std::min(queries_.size, head.sequence.queries - q);
    if (n <= 0) return;
    pack_columns(query_rows<const S>(p.query, head).from(q), n, p.width, own.queries, query_pitch_,
                 static_cast<T>(p.scale));
    std::fill_n(own.peak, queries_.size, kHidden<T>);
    std::fill_n(own.total, queries_.size, T(0));
    std::fill_n(own.sums, n * value_pitch_, T(0));
    const KeyRange keys =
        head.keys_of_any(p, q, n, keys_of_cut(cut, cuts_, lengths_.keys, keys_.size, head.sequence.keys));
    for (int64_t k = keys.first / keys_.size; k * keys_.size < keys.last; ++k) add_keys(head, q, n, k, packed, own);
    for (int64_t i = 0; i < n; ++i)
      results_.put(head, q + i, cut, own.sums + i * value_pitch_, {own.peak[i], own.total[i]});
  }

  // Adds a tile of keys to n queries from q on.
  void add_keys(const Head& head, int64_t q, int64_t n, int64_t tile, const Packed& packed, const Scratch& own) const {
    const KeyRange all = keys_of_tile(head, tile);
    KeyRange seen[kForwardQueries / kLanes];
    bool is_whole = true;
    for (int64_t lane = 0; lane < n; lane += kLanes) {
      KeyRange& keys = seen[lane / kLanes];
      keys = head.keys_of_any(p, q + lane, std::min(kLanes, n - lane), all);
      is_whole = is_whole && keys.first == all.first && keys.last == all.last;
      weigh(head, q, n, lane, keys, tile, packed, own);
    }
    for (int64_t i = 0; i < n; ++i)
      if (own.factor[i] != 1) scale_row(own.sums + i * value_pitch_, value_columns_, own.factor[i]);
    if (is_whole) {
      add_values(head, q, n, 0, all, tile, packed, own);
    } else {
      for (int64_t lane = 0; lane < n; lane += kLanes)
        add_values(head, q, std::min(kLanes, n - lane), lane, seen[lane / kLanes], tile, packed, own);
    }
  }

  // The weights of these keys, for the panel of queries from `lane` of the tile on.
  void weigh(const Head& head, int64_t q, int64_t n, int64_t lane, KeyRange keys, int64_t tile, const Packed& packed,
             const Scratch& own) const {
    std::fill_n(own.factor + lane, kLanes, T(1));
    const int64_t count = keys.last - keys.first, lanes = std::min(kLanes, n - lane),
                  skipped = keys.first - tile * keys_.size;
    if (count <= 0) return;
    T* const s = own.scores + skipped * query_pitch_ + lane;
    gemm_panel<T>({packed.keys + tile * p.width * key_pitch_ + skipped, 1, key_pitch_},
                  {own.queries + lane, query_pitch_}, count, p.width, s, query_pitch_, false);
    own.modify.finish(head, q + lane, lanes, keys, s, query_pitch_, nullptr);
    softmax_panel(count, s, query_pitch_, own.peak + lane, own.total + lane, own.factor + lane);
    if (p.dropout_p > 0) own.modify.multiply(own.modify.dropout(head, q + lane, lanes, keys), count, s, query_pitch_);
  }

  // sums += weights^T x values, of n queries from `lane` of the tile on and these keys.
  void add_values(const Head& head, int64_t q, int64_t n, int64_t lane, KeyRange keys, int64_t tile,
                  const Packed& packed, const Scratch& own) const {
    const int64_t depth = keys.last - keys.first;
    if (depth <= 0) return;
    const GemmLeft<T> weights{own.scores + (keys.first - tile * keys_.size) * query_pitch_ + lane, 1, query_pitch_};
    T* const sums = own.sums + lane * value_pitch_;
    for (int64_t e = 0; e < value_columns_; e += kLanes)
      gemm_panel<T>(weights, {packed.values + keys.first * value_pitch_ + e, value_pitch_}, n, depth, sums + e,
                    value_pitch_, true);
    if (packed.is_bad[tile])
      add_bad_rows(weights, key_rows<const S>(p.value, head).from(keys.first), n, depth, p.value_width, sums,
                   value_pitch_,
                   [&](int64_t i, int64_t j) { return own.modify.sees(head, q + lane + i, keys.first + j); });
  }

  const AttentionParams& p;
  const Lengths& lengths_;
  const Tiling queries_{lengths_.queries, kForwardQueries, kLanes}, keys_{lengths_.keys, kForwardKeys, 4};
  const int64_t value_columns_ = round_up(p.value_width, kLanes);
  const int64_t query_pitch_ = padded_row(queries_.size), key_pitch_ = padded_row(keys_.size),
                value_pitch_ = padded_row(value_columns_);
  const int64_t group_ = p.heads / p.key_heads, units_ = p.batch * p.key_heads;
  const int64_t cuts_ = cuts_of_keys(units_ * group_ * queries_.count, lengths_.keys);
  // Where each worker has units of its own to pack and work on, none waits for another.
  const bool pack_first_ = cuts_ > 1 || (units_ < 4 * num_threads() && units_ % num_threads() != 0);
  const int64_t workers_ = std::min(num_threads(), pack_first_ ? units_ * group_ * queries_.count * cuts_ : units_);
  const int64_t slots_ = pack_first_ ? units_ : workers_;
  const Workspace memory_{int64_t((slots_ * packed_size() + workers_ * scratch_size()) * sizeof(T))};
  const Workspace flags_{slots_ * keys_.count};
  const Results<S> results_{p, cuts_};
};

template <typename S>
void run_forward(const AttentionParams& p) {
  const Lengths lengths(p);
  if (lengths.queries == 0) return;
  if (lengths.queries <= kFewQueries)
    FewQueries<S>(p, lengths).run();
  else
    Forward<S>(p, lengths).run();
}

}  // namespace myvision::CPU_CAPABILITY
