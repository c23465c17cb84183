// How the CPU kernels of attention cut up and pack their matrices. Compiled once per instruction set.
#pragma once
#include <algorithm>
#include <limits>

#include "common/gemm.h"
#include "common/rounding.h"
#include "common/vec_io.h"
#include "common/workspace.h"
#include "ops/attention/attention_math.h"

namespace myvision::CPU_CAPABILITY::attention {

template <typename T>
inline constexpr T kHidden = -std::numeric_limits<T>::infinity();  // the score of a key that a query does not see

// Cuts a length into tiles of about equal size, a multiple of `grain` and at most `most`.
struct Tiling {
  int64_t length, size, count;

  Tiling(int64_t n, int64_t most, int64_t grain)
      : length(n),
        size(round_up(ceil_div(n, std::max(ceil_div(n, most), int64_t(1))), grain)),
        count(ceil_div(n, size)) {}
};

// A head of a sequence.
struct Head {
  int64_t b, head, key_head;
  AttentionSequence sequence;
  int64_t first_row;  // the number of its first query among the queries of all heads

  Head(const AttentionParams& p, int64_t b, int64_t head)
      : b(b),
        head(head),
        key_head(head / (p.heads / p.key_heads)),
        sequence(sequence_of(p, b)),
        first_row(row_of(p, sequence, b, head, 0)) {}

  // The keys of `within` that the window leaves to any of the n queries from q on.
  KeyRange keys_of_any(const AttentionParams& p, int64_t q, int64_t n, KeyRange within) const {
    return {std::max(within.first, keys_of(p, sequence, q).first),
            std::min(within.last, keys_of(p, sequence, q + n - 1).last)};
  }
  // Whether the window hides the keys after these from all of the n queries from q on.
  bool all_seen(const AttentionParams& p, int64_t q, int64_t n, KeyRange keys) const {
    return keys_of(p, sequence, q + n - 1).last <= keys.last;
  }
  // Whether the window leaves all these keys to all of the n queries from q on.
  bool all_see(const AttentionParams& p, int64_t q, int64_t n, KeyRange keys) const {
    return keys_of(p, sequence, q + n - 1).first <= keys.first && keys.last <= keys_of(p, sequence, q).last;
  }
};

inline constexpr int64_t kFewQueries = 4;

// The length of the longest sequence, in queries and in keys.
struct Lengths {
  int64_t queries = 0, keys = 0;

  // Scores of few queries are summed by `dot`, and others in the products of panels, which add in another order. Both
  // passes ask this, so that they compute the same scores.
  bool has_few_queries() const { return queries <= kFewQueries; }

  explicit Lengths(const AttentionParams& p) {
    for (int64_t b = 0; b < (p.query_starts ? p.batch : 1); ++b) {
      const AttentionSequence sequence = sequence_of(p, b);
      queries = std::max(queries, sequence.queries);
      keys = std::max(keys, sequence.keys);
    }
  }
};

// ------------------------------------------------------------------------------------------------ packing
// A matrix in memory, whose rows are `row` elements apart and whose columns are `step` apart.
template <typename S>
struct Rows {
  S* data;
  int64_t row, step;

  Rows from(int64_t i) const { return {data + i * row, row, step}; }
};

template <typename S>
inline Rows<S> rows_of(const Strided4& tensor, int64_t b, int64_t head, int64_t first) {
  const int64_t* stride = tensor.stride;
  return {static_cast<S*>(tensor.data) + b * stride[0] + head * stride[1] + first * stride[2], stride[2], stride[3]};
}
template <typename S>
inline Rows<S> query_rows(const Strided4& tensor, const Head& head) {
  return rows_of<S>(tensor, head.b, head.head, head.sequence.first_query);
}
template <typename S>
inline Rows<S> key_rows(const Strided4& tensor, const Head& head) {
  return rows_of<S>(tensor, head.b, head.key_head, head.sequence.first_key);
}

// The first row where it lies, or a copy in the buffer.
template <typename T, typename S>
inline const T* first_row(Rows<const S> from, int64_t width, T* buffer) {
  if constexpr (std::is_same_v<S, T>) {
    if (from.step == 1) return from.data;
  }
  copy_row<T>(from.data, from.step, width, buffer, 1);
  return buffer;
}

// Prefetches n rows that will be read or written soon.
template <typename S>
inline void fetch_rows(Rows<S> rows, int64_t n, int64_t width) {
  constexpr int64_t kLine = 64 / sizeof(S);
  if (rows.step != 1) return;
  for (int64_t i = 0; i < n; ++i)
    for (int64_t e = 0; e < width; e += kLine) __builtin_prefetch(rows.data + i * rows.row + e, 0, 2);
}

// to[i * pitch + e] = from[i][e], with zeros up to the width of a whole panel.
template <typename T, typename S>
inline void pack_rows(Rows<S> from, int64_t n, int64_t width, T* to, int64_t pitch) {
  load_pixels(from.data, from.step, from.row, width, n, to, pitch);
  const int64_t columns = round_up(width, GemmTile<T>::kCols);
  if (columns > width)
    for (int64_t i = 0; i < n; ++i) std::fill(to + i * pitch + width, to + i * pitch + columns, T(0));
}

// Rows of a matrix `pitch` apart, whose elements lie next to each other.
template <typename T>
struct NearRows {
  const T* data;
  int64_t pitch;

  Rows<const T> all() const { return {data, pitch, 1}; }
  // The left side of a product: the rows from number i on, or, transposed, the columns that they are.
  GemmLeft<T> from(int64_t i) const { return {data + i * pitch, pitch, 1}; }
  GemmLeft<T> columns_from(int64_t i) const { return {data + i * pitch, 1, pitch}; }
};

// n rows where they lie, if they follow each other without gaps, or a packed copy in the buffer.
template <typename T, typename S>
inline NearRows<T> near_rows(Rows<const S> from, int64_t n, int64_t width, T* buffer, int64_t pitch) {
  if constexpr (std::is_same_v<S, T>) {
    if (from.step == 1 && from.row == width && width % GemmTile<T>::kCols == 0) return {from.data, width};
  }
  pack_rows(from, n, width, buffer, pitch);
  return {buffer, pitch};
}

// to[e * pitch + i] = from[i][e] * factor
template <typename T, typename S>
inline void pack_columns(Rows<S> from, int64_t n, int64_t width, T* to, int64_t pitch, T factor = 1) {
  load_pixels(from.data, from.row, from.step, n, width, to, pitch);
  if (factor == T(1)) return;
  for (int64_t e = 0; e < width; ++e)
    for (int64_t i = 0; i < n; ++i) to[e * pitch + i] *= factor;
}

// to[i][e] = from[i * pitch + e]
template <typename T, typename S>
inline void unpack_rows(const T* from, int64_t pitch, int64_t n, int64_t width, Rows<S> to) {
  store_pixels(from, pitch, width, n, to.data, to.step, to.row);
}

// to[i][e] = from[e * pitch + i]
template <typename T, typename S>
inline void unpack_columns(const T* from, int64_t pitch, int64_t n, int64_t width, Rows<S> to) {
  store_pixels(from, pitch, n, width, to.data, to.row, to.step);
}

// ------------------------------------------------------------------------------------------------ NaN and infinity
// In a product, 0 * NaN would spread a row to queries that do not see it. So rows that are not finite are zeros in the
// product, and are then added one by one to the results that see them.

// Whether all n numbers of a row are finite.
template <typename T>
inline bool is_finite(const T* row, int64_t n) {
  Vec<T> sum(T(0));  // becomes NaN at the first number that is not finite
  for (int64_t i = 0; i < n; i += Vec<T>::size()) sum = at::vec::fmadd(load<T>(row + i, n - i), Vec<T>(T(0)), sum);
  return sum_lanes(sum) == 0;
}

// Rows; where has_bad, those that are not finite are replaced with zeros.
template <typename T>
struct FiniteRows : NearRows<T> {
  bool has_bad;
};

// The rows themselves if all are finite, or else a copy in the buffer.
template <typename T>
inline FiniteRows<T> finite_rows(NearRows<T> rows, int64_t n, int64_t width, T* buffer, int64_t pitch) {
  const auto is_good = [&](int64_t i) { return is_finite(rows.data + i * rows.pitch, width); };
  int64_t good = 0;
  while (good < n && is_good(good)) ++good;
  if (good == n) return {rows, false};
  pack_rows(rows.all(), n, width, buffer, pitch);
  for (int64_t i = good; i < n; ++i)
    if (!is_good(i)) std::fill_n(buffer + i * pitch, width, T(0));
  return {{buffer, pitch}, true};
}

// c[i] += a[i][j] * b[j] for the rows j of b that are not finite, where sees(i, j).
template <typename T, typename S, typename Sees>
inline void add_bad_rows(GemmLeft<T> a, Rows<S> b, int64_t rows, int64_t depth, int64_t width, Rows<T> c,
                         const Sees& sees) {
  for (int64_t j = 0; j < depth; ++j) {
    const auto element = [&](int64_t e) { return static_cast<T>(b.data[j * b.row + e * b.step]); };
    T sum = 0;
    for (int64_t e = 0; e < width; ++e) sum += element(e) * T(0);
    if (sum == 0) continue;
    for (int64_t i = 0; i < rows; ++i) {
      if (!sees(i, j)) continue;
      const T left = a.data[i * a.row + j * a.step];
      for (int64_t e = 0; e < width; ++e) c.data[i * c.row + e * c.step] += left * element(e);
    }
  }
}

}  // namespace myvision::CPU_CAPABILITY::attention
