// attention's forward pass on the CPU. Compiled once per instruction set.
//
// A tile of queries meets the tiles of keys that it sees, one after the other, and panel by panel: scores = keys x
// queries, a step of an online softmax, sums += values^T x weights. A panel stays in L1, and a tile in L2. Keys and
// values are read where they lie, or packed once for all heads that share them.
#pragma once
#include "ops/attention/cpu/attention_few_queries.h"

namespace myvision::CPU_CAPABILITY::attention {

inline constexpr int64_t kForwardQueries = 96, kForwardKeys = 192;  // the largest tiles

template <typename S, typename T = Compute<S>>
class Forward {
  static constexpr int64_t kLanes = GemmTile<T>::kCols;

 public:
  Forward(const AttentionParams& params, const Lengths& lengths) : p(params), lengths_(lengths) {}

  void run() const {
    const int64_t tiles = queries_.count * group_ * cuts_;
    if (pack_first_) {
      parallel_tasks(num_threads(), units_ * keys_.count, [&](int64_t task, int64_t) {
        pack(head_of(task / keys_.count, 0), task % keys_.count, task / keys_.count);
      });
      parallel_tasks(workers_, units_ * tiles, [&](int64_t task, int64_t worker) {
        run_tile(task / tiles, task % tiles, key_tiles(task / tiles), scratch(worker));
      });
    } else {
      parallel_tasks(workers_, units_, [&](int64_t unit, int64_t worker) {
        for (int64_t tile = 0; tile < keys_.count; ++tile) pack(head_of(unit, 0), tile, worker);
        for (int64_t tile = 0; tile < tiles; ++tile) run_tile(unit, tile, key_tiles(worker), scratch(worker));
      });
    }
    results_.merge();
  }

 private:
  // A tile of a key head's keys and values.
  struct KeyTile {
    NearRows<T> keys;
    FiniteRows<T> values;
  };
  // The memory of a worker: a tile of queries with its sums, and the weights of a panel of queries.
  struct Scratch {
    T *queries, *sums, *peak, *total, *weights;
    Scores<T> modify;
  };
  // The n queries from `first` on of a head that are worked on together. They and their sums are columns.
  struct Panel {
    int64_t first, n;
    T *queries, *sums, *peak, *total;
  };

  Scratch carve_scratch(Carver& memory) const {
    return {memory.take<T>(queries_.size * p.width), memory.take<T>(queries_.size * p.value_width),
            memory.take<T>(queries_.size),           memory.take<T>(queries_.size),
            memory.take<T>(keys_.size * kLanes),     Scores<T>(p, keys_.size, memory)};
  }

  KeyTile* key_tiles(int64_t slot) const { return key_tiles_.template as<KeyTile>() + slot * keys_.count; }
  Scratch scratch(int64_t worker) const {
    Carver memory(scratches_.template as<char>() + worker * scratch_bytes_);
    return carve_scratch(memory);
  }
  Panel panel(int64_t q, int64_t n, int64_t lane, const Scratch& own) const {
    return {q + lane,
            std::min(kLanes, n - lane),
            own.queries + lane * p.width,
            own.sums + lane * p.value_width,
            own.peak + lane,
            own.total + lane};
  }

  // A unit is all heads that share a key head. This is the head that a tile of a unit belongs to.
  Head head_of(int64_t unit, int64_t tile) const {
    return Head(p, unit / p.key_heads, unit % p.key_heads * group_ + tile / (queries_.count * cuts_));
  }
  KeyRange keys_of_tile(const Head& head, int64_t tile) const {
    const int64_t first = tile * keys_.size;
    return {first, std::min(first + keys_.size, head.sequence.keys)};
  }

  void pack(const Head& head, int64_t tile, int64_t slot) const {
    const KeyRange range = keys_of_tile(head, tile);
    const int64_t n = range.last - range.first;
    if (n <= 0) return;
    T* const keys = packed_.template as<T>() + (slot * keys_.count + tile) * packed_size_;
    T* const values = keys + keys_.size * key_pitch_;
    const auto near = [&](const Strided4& tensor, int64_t width, T* buffer, int64_t pitch) {
      return near_rows(key_rows<const S>(tensor, head).from(range.first), n, width, buffer, pitch);
    };
    key_tiles(slot)[tile] = {
        near(p.key, p.width, keys, key_pitch_),
        finite_rows(near(p.value, p.value_width, values, value_pitch_), n, p.value_width, values, value_pitch_)};
  }

  void run_tile(int64_t unit, int64_t tile, const KeyTile* key_tiles, const Scratch& own) const {
    // The last queries come first, as they take the longest where the window is causal.
    const int64_t q = (queries_.count - 1 - tile / cuts_ % queries_.count) * queries_.size, cut = tile % cuts_;
    const Head head = head_of(unit, tile);
    const int64_t n = std::min(queries_.size, head.sequence.queries - q);
    if (n <= 0) return;
    const KeyRange keys =
        head.keys_of_any(p, q, n, keys_of_cut(cut, cuts_, lengths_.keys, keys_.size, head.sequence.keys));
    for (int64_t lane = 0; lane < n; lane += kLanes) start(head, panel(q, n, lane, own));
    for (int64_t k = keys.first / keys_.size; k * keys_.size < keys.last; ++k)
      for (int64_t lane = 0; lane < n; lane += kLanes) {
        const Panel panel = this->panel(q, n, lane, own);
        if ((k + 1) * keys_.size >= keys.last)
          fetch_rows(query_rows<S>(p.output, head).from(panel.first), panel.n, p.value_width);
        add_keys(head, panel, k, key_tiles[k], own);
      }
    for (int64_t lane = 0; lane < n; lane += kLanes) {
      const Panel panel = this->panel(q, n, lane, own);
      results_.put_panel(head, panel.first, panel.n, cut, panel.sums, panel.peak, panel.total);
    }
  }

  void start(const Head& head, const Panel& panel) const {
    pack_columns(query_rows<const S>(p.query, head).from(panel.first), panel.n, p.width, panel.queries, kLanes,
                 static_cast<T>(p.scale));
    std::fill_n(panel.sums, p.value_width * kLanes, T(0));
    std::fill_n(panel.peak, kLanes, kHidden<T>);
    std::fill_n(panel.total, kLanes, T(0));
  }

  // Adds a tile of keys to a panel of queries.
  void add_keys(const Head& head, const Panel& panel, int64_t number, const KeyTile& tile, const Scratch& own) const {
    const KeyRange keys = head.keys_of_any(p, panel.first, panel.n, keys_of_tile(head, number));
    const int64_t count = keys.last - keys.first, skipped = keys.first - number * keys_.size;
    if (count <= 0) return;
    T factor[kLanes];
    gemm_panel<T>(tile.keys.from(skipped), {panel.queries, kLanes}, count, p.width, own.weights, kLanes, false);
    own.modify.finish(head, panel.first, panel.n, keys, own.weights, kLanes, nullptr);
    softmax_panel(count, own.weights, kLanes, panel.peak, panel.total, factor);
    if (p.dropout_p > 0) own.modify.multiply(own.modify.dropout(head, panel.first, keys), count, own.weights, kLanes);
    if (std::any_of(factor, factor + kLanes, [](T x) { return x != 1; }))
      scale_panel(panel.sums, p.value_width, factor);
    gemm_panel<T>(tile.values.columns_from(skipped), {own.weights, kLanes}, p.value_width, count, panel.sums, kLanes,
                  true);
    if (tile.values.has_bad)
      add_bad_rows({own.weights, 1, kLanes}, key_rows<const S>(p.value, head).from(keys.first), panel.n, count,
                   p.value_width, Rows<T>{panel.sums, 1, kLanes},
                   [&](int64_t i, int64_t j) { return own.modify.sees(head, panel.first + i, keys.first + j); });
  }

  const AttentionParams& p;
  const Lengths& lengths_;
  const Tiling queries_{lengths_.queries, kForwardQueries, kLanes},
      keys_{lengths_.keys, kForwardKeys, GemmTile<T>::kRows};
  const int64_t key_pitch_ = padded_row(round_up(p.width, kLanes)),
                value_pitch_ = padded_row(round_up(p.value_width, kLanes));
  const int64_t group_ = p.heads / p.key_heads, units_ = p.batch * p.key_heads;
  const int64_t cuts_ = cuts_of_keys(units_ * group_ * queries_.count, lengths_.keys);
  // Where workers can have whole units, each packs and works on its own, and none waits for another.
  const bool pack_first_ = cuts_ > 1 || (units_ < 4 * num_threads() && units_ % num_threads() != 0);
  const int64_t workers_ = std::min(num_threads(), pack_first_ ? units_ * group_ * queries_.count * cuts_ : units_);
  const int64_t slots_ = pack_first_ ? units_ : workers_;
  const int64_t packed_size_ = keys_.size * (key_pitch_ + value_pitch_);
  const int64_t scratch_bytes_ = bytes_of([this](Carver& memory) { carve_scratch(memory); });
  const Workspace packed_{int64_t(slots_ * keys_.count * packed_size_ * sizeof(T))};
  const Workspace scratches_{workers_ * scratch_bytes_};
  const Workspace key_tiles_{int64_t(slots_ * keys_.count * sizeof(KeyTile))};
  const Results<S> results_{p, cuts_};
};

template <typename S>
void run_forward(const AttentionParams& p) {
  const Lengths lengths(p);
  if (lengths.queries == 0) return;
  if (lengths.has_few_queries())
    FewQueries<S>(p, lengths).run();
  else
    Forward<S>(p, lengths).run();
}

}  // namespace myvision::CPU_CAPABILITY::attention
