// What the backward pass of attention on the CPU begins with: the probabilities of a tile of queries and keys, made
// again, and the gradients of its scores. Compiled once per instruction set.
#pragma once
#include "ops/attention/cpu/attention_scores.h"
#include "ops/attention/cpu/attention_softmax.h"

namespace myvision::CPU_CAPABILITY::attention {

inline constexpr int64_t kBackwardQueries = 96, kBackwardKeys = 96;  // of a tile, at most

// A tile of queries: as columns, multiplied by the scale; the gradients of their outputs; what makes probabilities of
// scores, e^(score - peak - log_total); and what is taken off the gradients of probabilities.
template <typename T>
struct QueryTile {
  T *columns, *gradient_columns, *peak, *log_total, *delta;
};

// A tile of keys and of their values.
template <typename T>
struct KeyRows {
  NearRows<T> keys, values;
};

// Memory for those that do not lie next to each other.
template <typename T>
struct KeyBuffers {
  T *keys, *values;
};

// Scratch of a worker: dropped probabilities and gradients of scores as [key][query].
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

  QueryTile<T> carve_queries(Carver<T>& memory) const {
    return {memory.take(p.width * query_pitch), memory.take(p.value_width * query_pitch), memory.take(query_pitch),
            memory.take(query_pitch), memory.take(query_pitch)};
  }
  KeyBuffers<T> carve_keys(Carver<T>& memory) const {
    return {memory.take(keys.size * width_pitch), memory.take(keys.size * value_pitch)};
  }
  PairScratch<T> carve_scratch(Carver<T>& memory) const {
    const int64_t size = keys.size * query_pitch;
    T *const weights = memory.take(size), *const gradients = memory.take(size),
             *const slopes = p.softcap > 0 ? memory.take(size) : nullptr, *const line = memory.take(line_size());
    return {weights, gradients, slopes, line,
            Scores<T>(p, kLineKeys, memory.take(Scores<T>::scratch_size(p, kLineKeys)))};
  }

  // n queries from q on, and the gradients of their outputs.
  void pack_queries(const Head& head, int64_t q, int64_t n, NearRows<T> rows, NearRows<T> gradients,
                    const QueryTile<T>& to, const PairScratch<T>& own) const {
    fetch_rows(query_rows<const S>(p.output, head).from(q), n, p.value_width);
    pack_columns(rows.all(), n, p.width, to.columns, query_pitch, static_cast<T>(p.scale));
    pack_columns(gradients.all(), n, p.value_width, to.gradient_columns, query_pitch);
    for (int64_t i = 0; i < n; ++i) {
      const RowSums<T> row = sums_of(head, q + i, own);
      to.peak[i] = row.peak;
      to.log_total[i] = row.total;
      to.delta[i] = delta(head, q + i, gradients.data + i * gradients.pitch, own.line);
    }
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

  // For the panel of queries from `lane` of a tile on, and keys of a tile: dropped probabilities, the gradients of
  // scores, and the slopes of the softcap.
  void run(const Head& head, int64_t q, int64_t n, int64_t lane, KeyRange seen, int64_t first_key,
           const QueryTile<T>& query, const KeyRows<T>& rows, const PairScratch<T>& own) const {
    const int64_t count = seen.last - seen.first, skipped = seen.first - first_key, lanes = std::min(kLanes, n - lane);
    T* const s = own.weights + skipped * query_pitch + lane;
    T* const g = own.gradients + skipped * query_pitch + lane;
    T* const slopes = own.slopes ? own.slopes + skipped * query_pitch + lane : nullptr;
    gemm_panel<T>(rows.keys.from(skipped), {query.columns + lane, query_pitch}, count, p.width, s, query_pitch, false);
    gemm_panel<T>(rows.values.from(skipped), {query.gradient_columns + lane, query_pitch}, count, p.value_width, g,
                  query_pitch, false);
    own.modify.finish(head, q + lane, lanes, seen, s, query_pitch, slopes);
    if (p.dropout_p > 0)
      differentiate<true>(count, s, g, query, lane, own.modify.dropout(head, q + lane, seen));
    else
      differentiate<false>(count, s, g, query, lane, nullptr);
  }

  // Turns the gradients of scores into those of what the softcap gets: 0 stays 0, even where the slope is NaN, as of
  // what is not seen.
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
  static constexpr T kPreciseLse = 1 << 14;  // beyond, probabilities made of it are off by 0.1 %

  int64_t line_size() const { return std::max(p.value_width, 2 * p.width + kLineKeys); }

  // The gradient of the output times the output, less the gradient of lse.
  T delta(const Head& head, int64_t i, const T* gradient, T* line) const {
    const T* const output = first_row(query_rows<const S>(p.output, head).from(i), p.value_width, line);
    const T product = dot(gradient, output, p.value_width);
    return grad_.lse ? product - static_cast<const T*>(grad_.lse)[head.first_row + i] : product;
  }

  // The peak and the logarithm of the total of a row: lse and 0 will do, unless a mask as large as finfo.min left no
  // digits for the total. infinity, so that probabilities are 0, where it sees no key.
  RowSums<T> sums_of(const Head& head, int64_t i, const PairScratch<T>& own) const {
    const T lse = static_cast<const T*>(p.lse)[head.first_row + i];
    if (lse == kHidden<T>) return {-kHidden<T>, 0};
    if (p.mask_kind != AttentionMask::Additive || !(std::abs(lse) > kPreciseLse)) return {lse, 0};
    T *const query = own.line, *const key = query + p.width, *const scores = key + p.width;
    const Rows<const S> from = query_rows<const S>(p.query, head).from(i), rows = key_rows<const S>(p.key, head);
    copy_row<T>(from.data, from.step, p.width, query, 1);
    scale_row(query, p.width, static_cast<T>(p.scale));
    RowSums<T> sums{kHidden<T>, 0};
    const KeyRange seen = keys_of(p, head.sequence, i);
    for (int64_t first = seen.first; first < seen.last; first += kLineKeys) {
      const KeyRange block{first, std::min(first + kLineKeys, seen.last)};
      for (int64_t j = block.first; j < block.last; ++j) {
        copy_row<T>(rows.from(j).data, rows.step, p.width, key, 1);
        scores[j - first] = dot(query, key, p.width);
      }
      own.modify.finish_line(head, i, block, scores);
      softmax_line(block.last - block.first, scores, sums);
    }
    return {sums.peak, std::log(sums.total)};
  }

  // Turns scores into dropped probabilities, and the gradients of those into the gradients of scores.
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
        // What is not seen may hold NaN.
        Vec<T>::blendv(probability * (gradient - delta), zero, probability == zero).store(g + at);
      }
    }
  }

  const AttentionParams& p;
  const AttentionGradients& grad_;
};

}  // namespace myvision::CPU_CAPABILITY::attention
