// attention's backward pass on the CPU. Compiled once per instruction set.
//
// A tile of keys meets the tiles of queries that see it. With their probabilities P and gradients of scores dS, both as
// [key][query],
//   grad value += P x grad output,  grad key += dS x query,  grad query^T += key^T x dS.
// The last is computed for each panel of queries, the others for runs of keys that the same panels see.
//
// A unit is all heads that share a key head. Where there are few units, each is cut into several tasks: tile k of the
// keys belongs to cut k % cuts. Each cut has sums of its own for the queries, which are added up in order. Where the
// mask's gradient is wanted, units that share elements of it belong to one task, or to one of few.
#pragma once
#include "ops/attention/cpu/attention_mask_gradient.h"

namespace myvision::CPU_CAPABILITY::attention {

inline constexpr int64_t kKeyChunk = 12;  // runs of keys are multiples of this, which are whole strips of a product

template <typename S, typename T = Compute<S>>
class Backward {
  static constexpr int64_t kLanes = GemmTile<T>::kCols;

 public:
  Backward(const AttentionParams& params, const AttentionGradients& gradients)
      : p(params), grad_(gradients), pairs_(params, gradients), mask_(params, gradients, pairs_) {}

  void run() const {
    const int64_t tiles = pairs_.queries.count;
    if (keeps_queries_)
      parallel_tasks(workers_, p.batch * p.heads * tiles, [&](int64_t task, int64_t worker) {
        const int64_t slot = task / tiles;
        pack_tile(Head(p, slot / p.heads, slot % p.heads), task % tiles, slot, scratch(worker));
      });
    for (int64_t phase = 0; phase < phases_; ++phase) {
      parallel_tasks(workers_, tasks_, [&](int64_t task, int64_t worker) {
        const int64_t set = task / cuts_ / mask_.parts(), part = task / cuts_ % mask_.parts();
        mask_.clear(set, part, task % cuts_, cuts_);
        for (int64_t i = part; i < mask_.units_of_set(); i += mask_.parts())
          run_unit(mask_.unit(set, i), part, phase, task % cuts_, worker);
      });
      mask_.store(phase * mask_.phase_tiles());
    }
    if (keeps_sums_ && grad_.query.data)
      parallel_tasks(workers_, p.batch * p.heads * tiles, [&](int64_t task, int64_t) {
        const int64_t slot = task / tiles;
        add_cuts(Head(p, slot / p.heads, slot % p.heads), task % tiles, slot);
      });
  }

 private:
  // A tile of a head's queries, ready for the products.
  struct Query {
    QueryTile<T> tile;
    FiniteRows<T> rows, gradients;
  };
  struct QueryBuffers {
    QueryTile<T> tile;
    T *rows, *gradients;
  };
  struct Scratch {
    PairScratch<T> pair;
    KeyBuffers<T> keys;
    T *finite_keys, *grad_key, *grad_value;  // the gradients are those of all keys of a cut
  };
  // All memory: QueryBuffers for every tile of queries, sums of the queries' gradients, a Scratch for every worker.
  struct Shares {
    char* queries;
    T* sums;
    char* scratches;
  };
  // Where the gradients of a tile of keys are summed up.
  struct KeySums {
    KeyRange range;
    T *grad_key, *grad_value;
  };
  // A tile of keys that is worked on.
  struct Keys : KeySums {
    KeyRows<T> rows;
    FiniteRows<T> finite;
  };

  // ---- memory
  QueryBuffers carve_query(Carver& memory) const {
    return {pairs_.carve_queries(memory), memory.take<T>(pairs_.queries.size * pairs_.width_pitch),
            memory.take<T>(pairs_.queries.size * pairs_.value_pitch)};
  }
  Scratch carve_scratch(Carver& memory) const {
    return {pairs_.carve_scratch(memory), pairs_.carve_keys(memory),
            memory.take<T>(pairs_.keys.size * pairs_.width_pitch), memory.take<T>(cut_keys() * pairs_.width_pitch),
            memory.take<T>(cut_keys() * pairs_.value_pitch)};
  }
  Shares carve_shares(Carver& memory) const {
    return {memory.take<char>(query_slots_ * pairs_.queries.count * query_bytes_),
            memory.take<T>(sums_slots_ * cuts_ * sums_size()), memory.take<char>(workers_ * scratch_bytes_)};
  }
  int64_t cut_keys() const { return ceil_div(mask_.phase_tiles(), cuts_) * pairs_.keys.size; }
  int64_t sums_size() const { return pairs_.queries.count * pairs_.queries.size * p.width; }

  Scratch scratch(int64_t worker) const {
    Carver memory(shares_.scratches + worker * scratch_bytes_);
    return carve_scratch(memory);
  }
  Query* queries(int64_t slot) const { return queries_.template as<Query>() + slot * pairs_.queries.count; }
  // The sums of a cut for the gradients of a head's queries, which are columns of panels.
  T* query_sums(int64_t slot, int64_t cut) const { return shares_.sums + (slot * cuts_ + cut) * sums_size(); }

  // ---- work
  void pack_tile(const Head& head, int64_t tile, int64_t slot, const Scratch& own) const {
    const int64_t q = tile * pairs_.queries.size, n = pairs_.queries_of_tile(head, tile);
    if (n <= 0) return;
    Carver memory(shares_.queries + (slot * pairs_.queries.count + tile) * query_bytes_);
    const QueryBuffers to = carve_query(memory);
    const auto near = [&](const Strided4& tensor, int64_t width, T* buffer, int64_t pitch) {
      return near_rows(query_rows<const S>(tensor, head).from(q), n, width, buffer, pitch);
    };
    const NearRows<T> rows = near(p.query, p.width, to.rows, pairs_.width_pitch),
                      gradients = near(grad_.output, p.value_width, to.gradients, pairs_.value_pitch);
    pairs_.pack_queries(head, q, n, rows, gradients, to.tile, own.pair);
    pairs_.sum_delta(head, q, n, to.tile, own.keys, own.pair);
    queries(slot)[tile] = {to.tile, finite_rows(rows, n, p.width, to.rows, pairs_.width_pitch),
                           finite_rows(gradients, n, p.value_width, to.gradients, pairs_.value_pitch)};
  }

  void run_unit(int64_t unit, int64_t part, int64_t phase, int64_t cut, int64_t worker) const {
    const Scratch own = scratch(worker);
    const int64_t b = unit / p.key_heads, first_head = unit % p.key_heads * group_;
    const int64_t first_tile = phase * mask_.phase_tiles() + cut;
    const int64_t last_tile = std::min((phase + 1) * mask_.phase_tiles(), pairs_.keys.count);
    std::fill_n(own.grad_key, cut_keys() * pairs_.width_pitch, T(0));
    std::fill_n(own.grad_value, cut_keys() * pairs_.value_pitch, T(0));
    for (int64_t h = first_head; h < first_head + group_; ++h) {
      const Head head(p, b, h);
      const int64_t slot = keeps_queries_ ? b * p.heads + h : worker;
      if (!keeps_queries_)
        for (int64_t tile = 0; tile < pairs_.queries.count; ++tile) pack_tile(head, tile, slot, own);
      T* const sums = query_sums(keeps_sums_ ? b * p.heads + h : worker, cut);
      if (phase == 0) std::fill_n(sums, sums_size(), T(0));
      for (int64_t tile = first_tile; tile < last_tile; tile += cuts_)
        add_keys(head, key_sums(head, tile, own), slot, part, sums, own);
      if (!keeps_sums_) store_queries(head, 0, head.sequence.queries, sums);
    }
    const Head head(p, b, first_head);
    for (int64_t tile = first_tile; tile < last_tile; tile += cuts_) {
      const KeySums sums = key_sums(head, tile, own);
      store_keys(head, sums.range, sums.grad_key, pairs_.width_pitch, p.width, p.scale, grad_.key);
      store_keys(head, sums.range, sums.grad_value, pairs_.value_pitch, p.value_width, 1, grad_.value);
    }
  }

  KeySums key_sums(const Head& head, int64_t tile, const Scratch& own) const {
    const int64_t first = tile % mask_.phase_tiles() / cuts_ * pairs_.keys.size;
    return {pairs_.keys_of_tile(head, tile), own.grad_key + first * pairs_.width_pitch,
            own.grad_value + first * pairs_.value_pitch};
  }

  void store_keys(const Head& head, KeyRange range, T* sums, int64_t pitch, int64_t width, double factor,
                  const Strided4& to) const {
    const int64_t n = range.last - range.first;
    if (!to.data) return;
    if (factor != 1) scale_row(sums, n * pitch, static_cast<T>(factor));
    unpack_rows(sums, pitch, n, width, key_rows<S>(to, head).from(range.first));
  }

  // Writes the gradients of n queries from q on.
  void store_queries(const Head& head, int64_t q, int64_t n, T* sums) const {
    if (!grad_.query.data) return;
    for (int64_t lane = 0; lane < n; lane += kLanes) {
      T* const panel = sums + lane * p.width;
      scale_row(panel, kLanes * p.width, static_cast<T>(p.scale));
      unpack_columns(panel, kLanes, std::min(kLanes, n - lane), p.width,
                     query_rows<S>(grad_.query, head).from(q + lane));
    }
  }

  // Adds what a tile of keys gives to all gradients, with all queries that see it.
  void add_keys(const Head& head, const KeySums& to, int64_t slot, int64_t part, T* sums, const Scratch& own) const {
    const int64_t count = to.range.last - to.range.first;
    if (count <= 0) return;
    const KeyRows<T> rows = pairs_.near_keys(head, to.range, own.keys);
    const Keys keys{to, rows, finite_rows(rows.keys, count, p.width, own.finite_keys, pairs_.width_pitch)};
    if (grad_.key.data) fetch_rows(key_rows<S>(grad_.key, head).from(keys.range.first), count, p.width);
    if (grad_.value.data) fetch_rows(key_rows<S>(grad_.value, head).from(keys.range.first), count, p.value_width);
    for (int64_t t = 0; t < pairs_.queries.count; ++t) {
      const int64_t q = t * pairs_.queries.size, n = pairs_.queries_of_tile(head, t);
      if (n <= 0) break;
      const KeyRange seen = head.keys_of_any(p, q, n, keys.range);
      if (seen.first < seen.last) add_pairs(head, q, n, keys, queries(slot)[t], part, sums + q * p.width, own);
    }
  }

  void add_pairs(const Head& head, int64_t q, int64_t n, const Keys& keys, const Query& query, int64_t part, T* sums,
                 const Scratch& own) const {
    KeyRange seen[kBackwardQueries / kLanes];  // the keys that each panel of queries sees, rounded to whole chunks
    const int64_t panels = ceil_div(n, kLanes);
    for (int64_t panel = 0; panel < panels; ++panel) {
      const int64_t lane = panel * kLanes, lanes = std::min(kLanes, n - lane);
      const KeyRange range = head.keys_of_any(p, q + lane, lanes, keys.range);
      seen[panel] = {0, 0};
      if (range.first >= range.last) continue;
      if (grad_.query.data && head.all_seen(p, q + lane, lanes, keys.range))
        fetch_rows(query_rows<S>(grad_.query, head).from(q + lane), lanes, p.width);
      pairs_.run(head, q, n, lane, range, keys.range.first, query.tile, keys.rows, own.pair);
      mask_.add(head, part, q + lane, lanes, range,
                own.pair.gradients + (range.first - keys.range.first) * pairs_.query_pitch + lane);
      pairs_.uncap(lane, range, keys.range.first, own.pair);
      add_to_queries(head, q + lane, lane, lanes, range, keys, sums + lane * p.width, own);
      seen[panel] = fill_chunks(range, lane, keys, own);
    }
    // The keys [first, last) are seen by the same panels.
    const int64_t count = keys.range.last - keys.range.first;
    for (int64_t first = 0, last; first < count; first = last) {
      const PanelRange by = panels_that_see(seen, panels, first);
      for (last = first + kKeyChunk; last < count && panels_that_see(seen, panels, last) == by;) last += kKeyChunk;
      last = std::min(last, count);
      const int64_t lane = by.first * kLanes;
      add_to_keys(head, q + lane, lane, std::min(by.last * kLanes, n) - lane, {first, last}, keys, query, own);
    }
  }

  struct PanelRange {
    int64_t first, last;
    bool operator==(const PanelRange&) const = default;
  };
  static PanelRange panels_that_see(const KeyRange* seen, int64_t panels, int64_t key) {
    const auto sees = [&](int64_t panel) { return seen[panel].first <= key && key < seen[panel].last; };
    PanelRange range{0, panels};
    while (range.first < panels && !sees(range.first)) ++range.first;
    while (range.last > range.first && !sees(range.last - 1)) --range.last;
    return range;
  }
  // Rounds the keys that a panel sees to whole chunks, and clears what they have too many. The result counts from the
  // first key of the tile.
  KeyRange fill_chunks(KeyRange range, int64_t lane, const Keys& keys, const Scratch& own) const {
    const int64_t first = range.first - keys.range.first, last = range.last - keys.range.first;
    const KeyRange whole{first / kKeyChunk * kKeyChunk, std::min(round_up(last, kKeyChunk), pairs_.keys.size)};
    const auto clear = [&](int64_t from, int64_t to) {
      for (int64_t j = from; j < to; ++j) {
        std::fill_n(own.pair.weights + j * pairs_.query_pitch + lane, kLanes, T(0));
        std::fill_n(own.pair.gradients + j * pairs_.query_pitch + lane, kLanes, T(0));
      }
    };
    clear(whole.first, first);
    clear(last, whole.last);
    return whole;
  }

  // Adds to the gradients of a panel of n queries: the first is number i of the head, and `lane` of its tile.
  void add_to_queries(const Head& head, int64_t i, int64_t lane, int64_t n, KeyRange range, const Keys& keys, T* sums,
                      const Scratch& own) const {
    const int64_t count = range.last - range.first, skipped = range.first - keys.range.first;
    if (!grad_.query.data) return;
    const T* const gradients = own.pair.gradients + skipped * pairs_.query_pitch + lane;
    gemm_panel<T>(keys.finite.columns_from(skipped), {gradients, pairs_.query_pitch}, p.width, count, sums, kLanes,
                  true);
    if (keys.finite.has_bad)
      add_bad_rows({gradients, 1, pairs_.query_pitch}, key_rows<const S>(p.key, head).from(range.first), n, count,
                   p.width, Rows<T>{sums, 1, kLanes}, [&](int64_t query, int64_t key) {
                     return own.pair.modify.sees(head, i + query, range.first + key);
                   });
  }

  // Adds to the gradients of the keys in `range` what n queries give: the first is number i of the head, and `lane` of
  // its tile.
  void add_to_keys(const Head& head, int64_t i, int64_t lane, int64_t n, KeyRange range, const Keys& keys,
                   const Query& query, const Scratch& own) const {
    const int64_t at = range.first * pairs_.query_pitch + lane, count = range.last - range.first;
    if (n <= 0) return;
    const auto add = [&](const T* left, const FiniteRows<T>& rows, const Strided4& tensor, int64_t width, T* sums,
                         int64_t pitch) {
      const GemmLeft<T> a{left + at, pairs_.query_pitch, 1};
      T* const to = sums + range.first * pitch;
      for (int64_t e = 0; e < width; e += kLanes)
        gemm_panel<T>(a, {rows.data + lane * rows.pitch + e, rows.pitch}, count, n, to + e, pitch, true);
      if (rows.has_bad)
        add_bad_rows(a, query_rows<const S>(tensor, head).from(i), count, n, width, Rows<T>{to, pitch, 1},
                     [&](int64_t key, int64_t query) {
                       return own.pair.modify.sees(head, i + query, keys.range.first + range.first + key);
                     });
    };
    if (grad_.value.data)
      add(own.pair.weights, query.gradients, grad_.output, p.value_width, keys.grad_value, pairs_.value_pitch);
    if (grad_.key.data) add(own.pair.gradients, query.rows, p.query, p.width, keys.grad_key, pairs_.width_pitch);
  }

  void add_cuts(const Head& head, int64_t tile, int64_t slot) const {
    const int64_t q = tile * pairs_.queries.size, n = pairs_.queries_of_tile(head, tile);
    if (n <= 0) return;
    T* const sums = query_sums(slot, 0) + q * p.width;
    const int64_t size = round_up(n, kLanes) * p.width;
    for (int64_t cut = 1; cut < cuts_; ++cut) {
      const T* const from = query_sums(slot, cut) + q * p.width;
      for (int64_t i = 0; i < size; ++i) sums[i] += from[i];
    }
    store_queries(head, q, n, sums);
  }

  // It depends on shapes alone, not on the number of threads. Each cut takes memory for its sums of the queries.
  int64_t number_of_cuts() const {
    constexpr int64_t kEnoughTasks = 16, kSumsBytes = int64_t(16) << 20, kLeastCuts = 4;
    if (!mask_.has_keys()) return 1;
    const int64_t bytes = p.batch * p.heads * sums_size() * int64_t(sizeof(T));
    return std::clamp(std::min(kEnoughTasks / (mask_.sets() * mask_.parts()),
                               std::max(kSumsBytes / std::max(bytes, int64_t(1)), kLeastCuts)),
                      int64_t(1), mask_.phase_tiles());
  }

  const AttentionParams& p;
  const AttentionGradients& grad_;
  const Pairs<S> pairs_;
  const MaskGradient<S> mask_;
  const int64_t group_ = p.heads / p.key_heads;
  const int64_t cuts_ = number_of_cuts(), tasks_ = mask_.sets() * mask_.parts() * cuts_;
  const int64_t workers_ = std::min(num_threads(), tasks_);
  const int64_t phases_ = std::max(ceil_div(pairs_.keys.count, mask_.phase_tiles()), int64_t(1));
  // Whether packed queries, which several tasks read, and the sums of their gradients are kept for all heads at once.
  const bool keeps_queries_ = cuts_ > 1, keeps_sums_ = cuts_ > 1 || phases_ > 1;
  const int64_t query_slots_ = keeps_queries_ ? p.batch * p.heads : workers_;
  const int64_t sums_slots_ = keeps_sums_ ? p.batch * p.heads : workers_;
  const int64_t query_bytes_ = bytes_of([this](Carver& memory) { carve_query(memory); });
  const int64_t scratch_bytes_ = bytes_of([this](Carver& memory) { carve_scratch(memory); });
  const Workspace memory_{bytes_of([this](Carver& memory) { carve_shares(memory); })};
  const Shares shares_ = memory_.carve([this](Carver& memory) { return carve_shares(memory); });
  const Workspace queries_{int64_t(query_slots_ * pairs_.queries.count * sizeof(Query))};
};

template <typename S>
void run_backward(const AttentionParams& p, const AttentionGradients& gradients) {
  const Strided4* const wanted[] = {&gradients.query, &gradients.key, &gradients.value, &gradients.mask};
  if (std::ranges::any_of(wanted, [](const Strided4* gradient) { return gradient->data; }))
    Backward<S>(p, gradients).run();
}

}  // namespace myvision::CPU_CAPABILITY::attention
