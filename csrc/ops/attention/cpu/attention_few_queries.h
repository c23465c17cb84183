// attention's forward pass on the CPU for few queries, as in decoding. Memory limits it, so keys and values are read
// once, where they lie, for all heads that share them. Compiled once per instruction set.
#pragma once
#include "ops/attention/cpu/attention_scores.h"
#include "ops/attention/cpu/attention_softmax.h"

namespace myvision::CPU_CAPABILITY::attention {

inline constexpr int64_t kFewRows = 16;  // how many queries, of all heads that share a key, read it together

template <typename T>
[[gnu::flatten]] inline void add_row(T factor, const T* from, int64_t n, T* to) {
  for_each_vector<T, 4>(n, [&](int, int64_t i, int64_t count) {
    store(at::vec::fmadd(Vec<T>(factor), load<T>(from + i, count), load<T>(to + i, count)), to + i, count);
  });
}

template <typename S, typename T = Compute<S>>
class FewQueries {
 public:
  FewQueries(const AttentionParams& params, const Lengths& lengths) : p(params), lengths_(lengths) {}

  void run() const {
    parallel_tasks(workers_, tasks_, [&](int64_t task, int64_t worker) {
      const int64_t unit = task / cuts_ / batches_, first = task / cuts_ % batches_ * heads_;
      run(unit / p.key_heads, unit % p.key_heads * group_ + first, std::min(heads_, group_ - first), task % cuts_,
          scratch(worker));
    });
    results_.merge();
  }

 private:
  // The memory of a worker: for each query the query itself, a line of scores and the sum of values; and a row of key
  // or value that had to be converted.
  struct Scratch {
    T *queries, *scores, *sums, *row;
    Scores<T> modify;
  };
  Scratch carve_scratch(Carver& memory) const {
    return {memory.take<T>(rows_ * p.width), memory.take<T>(rows_ * kLineKeys), memory.take<T>(rows_ * p.value_width),
            memory.take<T>(std::max(p.width, p.value_width)), Scores<T>(p, kLineKeys, memory)};
  }
  Scratch scratch(int64_t worker) const {
    Carver memory(memory_.template as<char>() + worker * scratch_bytes_);
    return carve_scratch(memory);
  }

  // Computes the queries of `heads` heads of sequence b, which share a key head, for a cut of the keys.
  void run(int64_t b, int64_t first_head, int64_t heads, int64_t cut, const Scratch& own) const {
    const Head head(p, b, first_head);
    const int64_t n = head.sequence.queries, rows = heads * n;
    if (n == 0) return;
    RowSums<T> softmax[kFewRows];
    std::fill_n(softmax, rows, RowSums<T>{kHidden<T>, 0});
    std::fill_n(own.sums, rows * p.value_width, T(0));
    for (int64_t r = 0; r < rows; ++r) {
      const Rows<const S> from = query_rows<const S>(p.query, Head(p, b, first_head + r / n)).from(r % n);
      copy_row<T>(from.data, from.step, p.width, own.queries + r * p.width, 1);
      scale_row(own.queries + r * p.width, p.width, static_cast<T>(p.scale));
    }
    const KeyRange keys =
        head.keys_of_any(p, 0, n, keys_of_cut(cut, cuts_, lengths_.keys, kLineKeys, head.sequence.keys));
    for (int64_t first = keys.first; first < keys.last; first += kLineKeys) {
      const KeyRange block{first, std::min(first + kLineKeys, keys.last)};
      multiply(head, block, own.queries, rows, own.scores, own.row);
      for (int64_t r = 0; r < rows; ++r) {
        T* const s = own.scores + r * kLineKeys;
        const Head of_row(p, b, first_head + r / n);
        own.modify.finish_line(of_row, r % n, block, s, nullptr);
        const T factor = softmax_line(block.last - block.first, s, softmax[r]);
        if (factor != 1) scale_row(own.sums + r * p.value_width, p.value_width, factor);
        if (p.dropout_p > 0) drop(own.modify.dropout_line(of_row, r % n, block), block.last - block.first, s);
      }
      add_values(head, block, own.scores, rows, own.sums, own.row);
    }
    for (int64_t r = 0; r < rows; ++r)
      results_.put(Head(p, b, first_head + r / n), r % n, cut, own.sums + r * p.value_width, softmax[r]);
  }

  void multiply(const Head& head, KeyRange keys, const T* queries, int64_t rows, T* scores, T* buffer) const {
    const Rows<const S> from = key_rows<const S>(p.key, head).from(keys.first);
    for (int64_t j = 0; j < keys.last - keys.first; ++j) {
      const T* const key = first_row(from.from(j), p.width, buffer);
      for (int64_t r = 0; r < rows; ++r) scores[r * kLineKeys + j] = dot(queries + r * p.width, key, p.width);
    }
  }

  // Multiplies the weights by dropout's factors, but for those of hidden keys, which are -1.
  static void drop(const T* factors, int64_t n, T* weights) {
    for (int64_t j = 0; j < n; ++j) weights[j] *= weights[j] < 0 ? T(1) : factors[j];
  }

  void add_values(const Head& head, KeyRange keys, const T* weights, int64_t rows, T* sums, T* buffer) const {
    const Rows<const S> from = key_rows<const S>(p.value, head).from(keys.first);
    for (int64_t j = 0; j < keys.last - keys.first; ++j) {
      const T* const value = first_row(from.from(j), p.value_width, buffer);
      for (int64_t r = 0; r < rows; ++r) {
        const T weight = weights[r * kLineKeys + j];
        if (!(weight < 0)) add_row(weight, value, p.value_width, sums + r * p.value_width);
      }
    }
  }

  const AttentionParams& p;
  const Lengths& lengths_;
  const int64_t group_ = p.heads / p.key_heads, heads_ = std::min(group_, kFewRows / lengths_.queries);
  const int64_t batches_ = ceil_div(group_, heads_), rows_ = heads_ * lengths_.queries;
  const int64_t cuts_ = cuts_of_keys(p.batch * p.key_heads * batches_, lengths_.keys);
  const int64_t tasks_ = p.batch * p.key_heads * batches_ * cuts_, workers_ = std::min(num_threads(), tasks_);
  const int64_t scratch_bytes_ = bytes_of([this](Carver& memory) { carve_scratch(memory); });
  const Workspace memory_{workers_ * scratch_bytes_};
  const Results<S> results_{p, cuts_};
};

}  // namespace myvision::CPU_CAPABILITY::attention
