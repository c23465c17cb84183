// The softmax of the CPU kernels of attention, computed step by step, and where its results go. Compiled once per
// instruction set.
#pragma once
#include <cmath>

#include "common/parallel.h"
#include "common/vec_math.h"
#include "common/workspace.h"
#include "ops/attention/cpu/attention_tiles.h"

namespace myvision::CPU_CAPABILITY::attention {

// Turns a panel of n scores of each query into weights e^(score - peak). It updates each query's peak, the largest
// score so far, and total, the sum of weights so far. What was summed up before has to be multiplied by `factor`.
template <typename T>
[[gnu::flatten]] inline void softmax_panel(int64_t n, T* s, int64_t ld, T* peak, T* total, T* factor) {
  constexpr int64_t kSize = Vec<T>::size();
  const Vec<T> before[2] = {Vec<T>::loadu(peak), Vec<T>::loadu(peak + kSize)};
  Vec<T> most[2] = {before[0], before[1]};
  for (int64_t j = 0; j < n; ++j)
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half)  // clamp_min may pass over a NaN, but the weight of one is NaN as well
      most[half] = at::vec::clamp_min(most[half], Vec<T>::loadu(s + j * ld + half * kSize));
  Vec<T> center[2], sum[2];
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    most[half].store(peak + half * kSize);
    center[half] = Vec<T>::blendv(most[half], Vec<T>(T(0)), most[half] == Vec<T>(kHidden<T>));
    const Vec<T> shrink = exp_of_negative(before[half] - center[half]);
    shrink.store(factor + half * kSize);
    sum[half] = Vec<T>::loadu(total + half * kSize) * shrink;
  }
  for (int64_t j = 0; j < n; ++j)
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      T* const at = s + j * ld + half * kSize;
      const Vec<T> weight = exp_of_negative(Vec<T>::loadu(at) - center[half]);
      weight.store(at);
      sum[half] = sum[half] + weight;
    }
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) sum[half].store(total + half * kSize);
}

template <typename T>
[[gnu::flatten]] inline T dot(const T* a, const T* b, int64_t n) {
  Vec<T> sum[4] = {Vec<T>(T(0)), Vec<T>(T(0)), Vec<T>(T(0)), Vec<T>(T(0))};
  for_each_vector<T, 4>(n, [&](int stream, int64_t i, int64_t count) {
    sum[stream] = at::vec::fmadd(load<T>(a + i, count), load<T>(b + i, count), sum[stream]);
  });
  return sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

inline constexpr int64_t kLineKeys = 256;  // how many scores of a query are computed at a time, at most

// The largest score of a query so far, and the sum of e^(score - peak).
template <typename T>
struct RowSums {
  T peak, total;
};

// Does the same as softmax_panel for n scores of one query, and returns the factor. Hidden keys get the weight -1.
template <typename T>
inline T softmax_line(int64_t n, T* s, RowSums<T>& row) {
  constexpr int64_t kSize = Vec<T>::size();
  const T before = row.peak;
  for (int64_t j = 0; j < n; ++j) row.peak = s[j] > row.peak ? s[j] : row.peak;
  const T center = row.peak == kHidden<T> ? T(0) : row.peak;
  Vec<T> sum(T(0));
  for (int64_t j = 0; j < n; j += kSize) {
    const int64_t count = std::min(kSize, n - j);
    const Vec<T> x = load<T>(s + j, count), weight = exp_of_negative(x - Vec<T>(center));
    sum = sum + keep(weight, count);
    store(Vec<T>::blendv(weight, Vec<T>(T(-1)), x == Vec<T>(kHidden<T>)), s + j, count);
  }
  const T factor = before == kHidden<T> ? T(0) : std::exp(before - center);
  row.total = row.total * factor + sum_lanes(sum);
  return factor;
}

template <typename T>
inline void scale_row(T* row, int64_t n, T factor) {
  for (int64_t e = 0; e < n; ++e) row[e] *= factor;
}

// Multiplies every row of a panel by a factor for each lane.
template <typename T>
[[gnu::flatten]] inline void scale_panel(T* panel, int64_t rows, const T* factors) {
  constexpr int64_t kSize = Vec<T>::size();
  const Vec<T> first = Vec<T>::loadu(factors), second = Vec<T>::loadu(factors + kSize);
  for (T* row = panel; row < panel + rows * 2 * kSize; row += 2 * kSize) {
    (Vec<T>::loadu(row) * first).store(row);
    (Vec<T>::loadu(row + kSize) * second).store(row + kSize);
  }
}

// Turns sums of weighted values into rows of the output. Where the keys are cut, each cut has sums of its own, which
// are merged in order.
template <typename S, typename T = Compute<S>>
class Results {
 public:
  Results(const AttentionParams& params, int64_t cuts)
      : p(params), cuts_(cuts), sums_(cuts > 1 ? cuts * rows_ * size_ * sizeof(T) : 0) {}

  // Takes the sums of query i over the keys of a cut.
  void put(const Head& head, int64_t i, int64_t cut, T* sums, RowSums<T> row) const {
    if (cuts_ == 1) return finish(head, i, sums, row);
    std::copy_n(sums, p.value_width, sums_of(head, i, cut));
    put_row_sums(head, i, cut, row);
  }

  // Takes the same for a panel of n queries from i on.
  void put_panel(const Head& head, int64_t i, int64_t n, int64_t cut, T* sums, const T* peak, const T* total) const {
    constexpr int64_t kLanes = GemmTile<T>::kCols;
    if (cuts_ > 1) {
      unpack_columns(sums, kLanes, n, p.value_width, Rows<T>{sums_of(head, i, cut), size_, 1});
      for (int64_t lane = 0; lane < n; ++lane) put_row_sums(head, i + lane, cut, {peak[lane], total[lane]});
      return;
    }
    T factor[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) factor[lane] = total[lane] == 0 ? T(0) : 1 / total[lane];
    scale_panel(sums, p.value_width, factor);
    unpack_columns(sums, kLanes, n, p.value_width, query_rows<S>(p.output, head).from(i));
    for (int64_t lane = 0; lane < n; ++lane) put_row(head, i + lane, {peak[lane], total[lane]});
  }

  void merge() const {
    if (cuts_ == 1) return;
    parallel_tasks(num_threads(), p.batch * p.heads, [&](int64_t task, int64_t) {
      const Head head(p, task / p.heads, task % p.heads);
      for (int64_t i = 0; i < head.sequence.queries; ++i) merge(head, i);
    });
  }

 private:
  T* sums_of(const Head& head, int64_t i, int64_t cut) const {
    return sums_.template as<T>() + (cut * rows_ + head.first_row + i) * size_;
  }

  void put_row_sums(const Head& head, int64_t i, int64_t cut, RowSums<T> row) const {
    T* const to = sums_of(head, i, cut) + p.value_width;
    to[0] = row.peak;
    to[1] = row.total;
  }

  void merge(const Head& head, int64_t i) const {
    RowSums<T> row{kHidden<T>, 0};
    for (int64_t cut = 0; cut < cuts_; ++cut) row.peak = std::max(row.peak, sums_of(head, i, cut)[p.value_width]);
    T* const sum = sums_of(head, i, 0);
    for (int64_t cut = 0; cut < cuts_; ++cut) {
      const T* const from = sums_of(head, i, cut);
      const T peak = from[p.value_width], factor = peak == kHidden<T> ? T(0) : std::exp(peak - row.peak);
      row.total += factor * from[p.value_width + 1];
      for (int64_t e = 0; e < p.value_width; ++e) sum[e] = (cut ? sum[e] : T(0)) + factor * from[e];
    }
    finish(head, i, sum, row);
  }

  void finish(const Head& head, int64_t i, T* sums, RowSums<T> row) const {
    scale_row(sums, p.value_width, row.total == 0 ? T(0) : 1 / row.total);
    unpack_rows(sums, 0, 1, p.value_width, query_rows<S>(p.output, head).from(i));
    put_row(head, i, row);
  }

  // Both peak and log_total are -inf where the query sees no key.
  void put_row(const Head& head, int64_t i, RowSums<T> row) const {
    if (!p.lse && !p.statistics) return;
    const T log_total = std::log(row.total);
    if (p.lse) static_cast<T*>(p.lse)[head.first_row + i] = row.peak + log_total;
    if (!p.statistics) return;
    T* const to = static_cast<T*>(p.statistics) + 2 * (head.first_row + i);
    to[0] = row.peak;
    to[1] = log_total;
  }

  const AttentionParams& p;
  const int64_t cuts_, size_ = p.value_width + 2, rows_ = (p.query_starts ? 1 : p.batch) * p.heads * p.queries;
  const Workspace sums_;
};

// Into how many cuts the keys go where there are so many tasks. It depends on shapes alone, not on the number of
// threads.
inline int64_t cuts_of_keys(int64_t tasks, int64_t keys) {
  constexpr int64_t kEnoughTasks = 64, kLeastKeys = 512;
  return std::max(std::min(kEnoughTasks / std::max(tasks, int64_t(1)), keys / kLeastKeys), int64_t(1));
}

// The keys of a cut of a sequence with so many keys. Cuts start at multiples of `grain`, at the same keys in all
// sequences, of which the longest has `longest` keys.
inline KeyRange keys_of_cut(int64_t cut, int64_t cuts, int64_t longest, int64_t grain, int64_t keys) {
  const int64_t size = round_up(ceil_div(longest, cuts), grain);
  return {std::min(cut * size, keys), std::min((cut + 1) * size, keys)};
}

}  // namespace myvision::CPU_CAPABILITY::attention
