// What the backward pass of attention on the CPU begins with: it computes the probabilities of a tile of queries and
// keys again, and the gradients of their scores. Compiled once per instruction set.
#pragma once
#include "ops/attention/cpu/attention_scores.h"
#include "ops/attention/cpu/attention_softmax.h"

namespace myvision::CPU_CAPABILITY::attention {

inline constexpr int64_t kBackwardQueries = 96, kBackwardKeys = 96;  // the largest tiles

// A tile of queries.
template <typename T>
struct QueryTile {
  T* scaled;            // the queries times the scale, as columns, or as rows where there are few
  T* gradient_columns;  // the gradients of the outputs
  T *peak, *log_total;  // a probability is e^(score - peak - log_total)
  T* delta;             // the gradient of a score is probability * (gradient of the probability - delta)
};

// The keys and values of a tile.
template <typename T>
struct KeyRows {
  NearRows<T> keys, values;
};

// The memory for keys and values that have to be packed.
template <typename T>
struct KeyBuffers {
  T *keys, *values;
};

// The scratch of a worker. `weights` are probabilities after dropout, `gradients` those of scores, both [key][query].
template <typename T>
struct PairScratch {
  T *weights, *gradients, *slopes, *line;
  Scores<T> modify;
};

template <typename S, typename T = Compute<S>>
class Pairs {
 public:
  static constexpr int64_t kLanes = GemmTile<T>::kCols;

  Pairs(const AttentionParams& params, const AttentionGradients& gradients)
      : lengths(params),
        width_pitch(padded_row(round_up(params.width, kLanes))),
        value_pitch(padded_row(round_up(params.value_width, kLanes))),
        p(params),
        grad_(gradients) {}

  QueryTile<T> carve_queries(Carver& memory) const {
    return {memory.take<T>(p.width * query_pitch), memory.take<T>(p.value_width * query_pitch),
            memory.take<T>(query_pitch), memory.take<T>(query_pitch), memory.take<T>(query_pitch)};
  }
  KeyBuffers<T> carve_keys(Carver& memory) const {
    return {memory.take<T>(keys.size * width_pitch), memory.take<T>(keys.size * value_pitch)};
  }
  PairScratch<T> carve_scratch(Carver& memory) const {
    const int64_t size = keys.size * query_pitch;
    return {memory.take<T>(size), memory.take<T>(size), p.softcap > 0 ? memory.take<T>(size) : nullptr,
            memory.take<T>(line_size()), Scores<T>(p, keys.size, memory)};
  }

  // Packs n queries from q on, and the gradients of their outputs.
  void pack_queries(const Head& head, int64_t q, int64_t n, NearRows<T> rows, NearRows<T> gradients,
                    const QueryTile<T>& to, const PairScratch<T>& own) const {
    fetch_rows(query_rows<const S>(p.output, head).from(q), n, p.value_width);
    if (lengths.has_few_queries())
      pack_scaled_rows(rows, n, to.scaled);
    else
      pack_columns(rows.all(), n, p.width, to.scaled, query_pitch, static_cast<T>(p.scale));
    pack_columns(gradients.all(), n, p.value_width, to.gradient_columns, query_pitch);
    for (int64_t i = 0; i < n; ++i) {
      const T* const statistics = static_cast<const T*>(p.statistics) + 2 * (head.first_row + q + i);
      const bool sees_keys = statistics[1] != kHidden<T>;  // a query that sees none gets probabilities of e^-inf = 0
      to.peak[i] = sees_keys ? statistics[0] : -kHidden<T>;
      to.log_total[i] = sees_keys ? statistics[1] : T(0);
      to.delta[i] = delta(head, q + i, gradients.data + i * gradients.pitch, own.line);
    }
  }

  // delta is the gradient of the output times the output. Where the output was rounded to a half type, the gradient of
  // a mask would show that. Then this sums delta from the gradients of the probabilities of n queries from q on.
  void sum_delta(const Head& head, int64_t q, int64_t n, const QueryTile<T>& query, const KeyBuffers<T>& near,
                 const PairScratch<T>& own) const {
    if (!sums_delta_) return;
    T sums[kBackwardQueries] = {};
    for (int64_t tile = 0; tile < keys.count; ++tile) {
      const KeyRange range = keys_of_tile(head, tile), seen = head.keys_of_any(p, q, n, range);
      if (seen.first >= seen.last) continue;
      const KeyRows<T> rows = near_keys(head, range, near);
      for (int64_t lane = 0; lane < n; lane += kLanes)
        add_row_sums(head, q, n, lane, range, query, rows, own, sums + lane);
    }
    std::copy_n(sums, n, query.delta);
  }

  KeyRows<T> near_keys(const Head& head, KeyRange range, const KeyBuffers<T>& own) const {
    const int64_t n = range.last - range.first;
    fetch_rows(key_rows<const S>(p.value, head).from(range.first), n, p.value_width);
    return {near_rows(key_rows<const S>(p.key, head).from(range.first), n, p.width, own.keys, width_pitch),
            near_rows(key_rows<const S>(p.value, head).from(range.first), n, p.value_width, own.values, value_pitch)};
  }

  KeyRange keys_of_tile(const Head& head, int64_t tile) const {
    const int64_t first = tile * keys.size;
    return {first, std::max(std::min(first + keys.size, head.sequence.keys), first)};
  }
  int64_t queries_of_tile(const Head& head, int64_t tile) const {
    return std::clamp(head.sequence.queries - tile * queries.size, int64_t(0), queries.size);
  }

  // Computes for a panel of queries, from `lane` of their tile on, and the keys that it sees: probabilities after
  // dropout, the gradients of scores, and the slopes of the softcap.
  void run(const Head& head, int64_t q, int64_t n, int64_t lane, KeyRange seen, int64_t first_key,
           const QueryTile<T>& query, const KeyRows<T>& rows, const PairScratch<T>& own) const {
    const int64_t count = seen.last - seen.first, skipped = seen.first - first_key, lanes = std::min(kLanes, n - lane);
    T* const s = own.weights + skipped * query_pitch + lane;
    T* const g = own.gradients + skipped * query_pitch + lane;
    T* const slopes = own.slopes ? own.slopes + skipped * query_pitch + lane : nullptr;
    if (lengths.has_few_queries()) {
      make_scores_of_few(head, q, lanes, seen, query.scaled, rows.keys, skipped, s, slopes, own);
    } else {
      gemm_panel<T>(rows.keys.from(skipped), {query.scaled + lane, query_pitch}, count, p.width, s, query_pitch, false);
      own.modify.finish(head, q + lane, lanes, seen, s, query_pitch, slopes);
    }
    gemm_panel<T>(rows.values.from(skipped), {query.gradient_columns + lane, query_pitch}, count, p.value_width, g,
                  query_pitch, false);
    if (p.dropout_p > 0)
      differentiate<true>(count, s, g, query, lane, own.modify.dropout(head, q + lane, seen));
    else
      differentiate<false>(count, s, g, query, lane, nullptr);
  }

  // Turns the gradients of scores into those of the softcap's arguments. 0 stays 0 even where the slope is NaN, as it
  // may be for keys that are not seen.
  void uncap(int64_t lane, KeyRange seen, int64_t first_key, const PairScratch<T>& own) const {
    if (!own.slopes) return;
    for (int64_t j = seen.first - first_key; j < seen.last - first_key; ++j)
      for (int64_t i = j * query_pitch + lane; i < j * query_pitch + lane + kLanes; ++i)
        own.gradients[i] = own.gradients[i] == 0 ? T(0) : own.gradients[i] * own.slopes[i];
  }

  const Lengths lengths;
  const Tiling queries{lengths.queries, kBackwardQueries, kLanes},
      keys{lengths.keys, kBackwardKeys, GemmTile<T>::kRows};
  const int64_t query_pitch = padded_row(queries.size), width_pitch, value_pitch;

 private:
  // A line holds a row of the output, or the scores and slopes of one query.
  int64_t line_size() const { return std::max(p.value_width, 2 * keys.size); }

  void pack_scaled_rows(NearRows<T> rows, int64_t n, T* to) const {
    for (int64_t i = 0; i < n; ++i) {
      std::copy_n(rows.data + i * rows.pitch, p.width, to + i * p.width);
      scale_row(to + i * p.width, p.width, static_cast<T>(p.scale));
    }
  }

  // Computes the scores of n queries from q on as FewQueries does, but writes them as [key][query].
  void make_scores_of_few(const Head& head, int64_t q, int64_t n, KeyRange seen, const T* queries, NearRows<T> keys,
                          int64_t first, T* s, T* slopes, const PairScratch<T>& own) const {
    const int64_t count = seen.last - seen.first;
    T *const line = own.line, *const line_slopes = slopes ? line + this->keys.size : nullptr;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < count; ++j)
        line[j] = dot(queries + i * p.width, keys.data + (first + j) * keys.pitch, p.width);
      own.modify.finish_line(head, q + i, seen, line, line_slopes);
      for (int64_t j = 0; j < count; ++j) s[j * query_pitch + i] = line[j];
      if (!slopes) continue;
      for (int64_t j = 0; j < count; ++j) slopes[j * query_pitch + i] = line_slopes[j];
    }
  }

  // Returns the gradient of the output times the output, less the gradient of lse; or, where sum_delta computes that,
  // the gradient of lse alone.
  T delta(const Head& head, int64_t i, const T* gradient, T* line) const {
    const T of_lse = grad_.lse ? static_cast<const T*>(grad_.lse)[head.first_row + i] : T(0);
    if (sums_delta_) return of_lse;
    const T* const output = first_row(query_rows<const S>(p.output, head).from(i), p.value_width, line);
    return dot(gradient, output, p.value_width) - of_lse;
  }

  // Adds to the sums of a panel of queries the gradients of its scores with the keys of a tile. These are
  // probability * (gradient - of_lse), and probabilities add up to 1, so that the sum over all keys is delta.
  void add_row_sums(const Head& head, int64_t q, int64_t n, int64_t lane, KeyRange tile, const QueryTile<T>& query,
                    const KeyRows<T>& rows, const PairScratch<T>& own, T* sums) const {
    const KeyRange seen = head.keys_of_any(p, q + lane, std::min(kLanes, n - lane), tile);
    if (seen.first >= seen.last) return;
    run(head, q, n, lane, seen, tile.first, query, rows, own);
    for (int64_t j = seen.first - tile.first; j < seen.last - tile.first; ++j)
      for (int64_t i = 0; i < kLanes; ++i) sums[i] += own.gradients[j * query_pitch + lane + i];
  }

  // Turns the scores s into probabilities after dropout, and their gradients g into the gradients of scores.
  template <bool DROPOUT>
  [[gnu::flatten]] void differentiate(int64_t count, T* s, T* g, const QueryTile<T>& query, int64_t lane,
                                      const T* factors) const {
    constexpr int64_t kSize = Vec<T>::size();
    for (int64_t half = 0; half < kLanes; half += kSize) {
      const Vec<T> peak = Vec<T>::loadu(query.peak + lane + half),
                   log_total = Vec<T>::loadu(query.log_total + lane + half),
                   delta = Vec<T>::loadu(query.delta + lane + half), zero(T(0));
      for (int64_t j = 0; j < count; ++j) {
        const int64_t at = j * query_pitch + half;
        const Vec<T> probability = exp_of_negative(Vec<T>::loadu(s + at) - peak - log_total);
        Vec<T> dropped = probability, gradient = Vec<T>::loadu(g + at);
        if constexpr (DROPOUT) {
          const Vec<T> factor = Vec<T>::loadu(factors + j * kLanes + half);
          dropped = probability * factor;
          gradient = gradient * factor;
        }
        dropped.store(s + at);
        // The gradient of a key that is not seen is 0, even where its value holds NaN.
        Vec<T>::blendv(probability * (gradient - delta), zero, probability == zero).store(g + at);
      }
    }
  }

  const AttentionParams& p;
  const AttentionGradients& grad_;
  const bool sums_delta_ = sizeof(S) < sizeof(T) && grad_.mask.data;
};

}  // namespace myvision::CPU_CAPABILITY::attention
