// From products of queries and keys to scores, for the CPU kernels: softcap, ALiBi, mask, window; and dropout.
// Compiled once per instruction set.
//
// Scores stand as [key][query]: in panels as wide as those of a product, along whose lanes are the queries.
#pragma once
#include <cmath>
#include <type_traits>

#include "common/philox_vec.h"
#include "common/vec_math.h"
#include "ops/attention/cpu/attention_tiles.h"

namespace myvision::CPU_CAPABILITY::attention {

// Makes of n elements of a mask what is added to scores.
template <typename T, typename M>
inline void load_mask(const M* from, int64_t stride, int64_t n, T* to) {
  if constexpr (std::is_same_v<M, bool>) {
    for (int64_t j = 0; j < n; ++j) to[j] = from[j * stride] ? T(0) : kHidden<T>;
  } else if constexpr (std::is_same_v<T, Compute<M>>) {
    copy_row<T>(from, stride, n, to, 1);
  } else {
    for (int64_t j = 0; j < n; ++j) to[j] = static_cast<T>(from[j * stride]);
  }
}

template <typename T>
class Scores {
 public:
  static constexpr int64_t kLanes = GemmTile<T>::kCols;

  // Only a mask and dropout need memory.
  Scores(const AttentionParams& params, int64_t most_keys, Carver& memory)
      : p(params),
        pitch_(p.mask_kind != AttentionMask::None || p.dropout_p > 0 ? padded_row(most_keys) : 0),
        lines_(memory.take<T>(kLanes * pitch_)),
        panel_(memory.take<T>(kLanes * pitch_)),
        words_(memory.take<uint32_t>(pitch_ + 4 + 4 * kPhiloxCounters)) {}

  // Turns the products of n queries from q on with these keys into scores, and writes the softcap's slopes where they
  // are wanted. It is not inlined, so that forward and backward get the same bits of the same code.
  [[gnu::noinline]] void finish(const Head& head, int64_t q, int64_t n, KeyRange keys, T* s, int64_t ld,
                                T* slopes) const {
    const int64_t count = keys.last - keys.first;
    if (p.softcap > 0) cap(count, s, ld, slopes);
    if (p.alibi_slopes) add_alibi(head, q, keys, s, ld);
    if (p.mask_kind != AttentionMask::None) add_mask(head, q, n, keys, s, ld);
    if (!head.all_see(p, q, n, keys)) hide(head, q, keys, s, ld);
  }

  // The factors by which dropout multiplies the probabilities, [key][query]. They are valid until the next call.
  const T* dropout(const Head& head, int64_t q, KeyRange keys) const {
    constexpr int64_t kBlock = 32;
    alignas(64) uint32_t words[kBlock * kLanes];
    for (int64_t block = keys.first / 4 * 4; block < keys.last; block += kBlock) {
      const int64_t first = std::max(block, keys.first), last = std::min(block + kBlock, keys.last);
      uint64_t counters[kLanes];
      for (int64_t lane = 0; lane < kLanes; ++lane)
        counters[lane] = dropout_counter(p, head.first_row + q + lane) + static_cast<uint64_t>(block / 4);
      philox_columns<kLanes>(static_cast<uint64_t>(*p.seed), counters, ceil_div(last - block, 4), words);
      const uint32_t* const from = words + (first - block) * kLanes;
      to_factors(from, (last - first) * kLanes, panel_ + (first - keys.first) * kLanes);
    }
    return panel_;
  }

  // s[key][query] *= factors[key][query], whose rows are ld and kLanes apart.
  static void multiply(const T* factors, int64_t count, T* s, int64_t ld) {
    update(count, s, ld, [&](const Vec<T>& x, int64_t j, int half) {
      return x * Vec<T>::loadu(factors + j * kLanes + half * Vec<T>::size());
    });
  }

  // Does the same as `finish` for one query, whose products lie side by side.
  [[gnu::noinline]] void finish_line(const Head& head, int64_t i, KeyRange keys, T* s, T* slopes) const {
    const int64_t n = keys.last - keys.first;
    if (p.softcap > 0)
      for (int64_t j = 0; j < n; ++j) {
        const T t = std::tanh(s[j] * T(1 / p.softcap));
        if (slopes) slopes[j] = 1 - t * t;
        s[j] = T(p.softcap) * t;
      }
    if (p.alibi_slopes) {
      const T slope = alibi_slope(head);
      const int64_t center = i + head.sequence.shift(p) - keys.first;
      for (int64_t j = 0; j < n; ++j) s[j] -= slope * static_cast<T>(std::abs(j - center));
    }
    if (p.mask_kind != AttentionMask::None) {
      load_mask_line(head, i, keys, lines_);
      for (int64_t j = 0; j < n; ++j) s[j] = lines_[j] == kHidden<T> ? kHidden<T> : s[j] + lines_[j];
    }
    const KeyRange seen = keys_of(p, head.sequence, i);
    std::fill(s, s + std::clamp(seen.first - keys.first, int64_t(0), n), kHidden<T>);
    std::fill(s + std::clamp(seen.last - keys.first, int64_t(0), n), s + n, kHidden<T>);
  }

  // Does the same as `dropout` for one query.
  const T* dropout_line(const Head& head, int64_t i, KeyRange keys) const {
    const int64_t n = keys.last - keys.first, skipped = keys.first % 4;
    philox(static_cast<uint64_t>(*p.seed),
           dropout_counter(p, head.first_row + i) + static_cast<uint64_t>(keys.first / 4), ceil_div(skipped + n, 4),
           words_);
    to_factors(words_ + skipped, n, lines_);
    return lines_;
  }

  bool sees(const Head& head, int64_t i, int64_t j) const {
    if (!head.all_see(p, i, 1, {j, j + 1})) return false;
    if (p.mask_kind == AttentionMask::None) return true;
    T value;
    load_mask_line(head, i, {j, j + 1}, &value);
    return value != kHidden<T>;
  }

 private:
  T alibi_slope(const Head& head) const {
    return static_cast<T>(p.alibi_slopes[head.b * p.alibi_batch_stride + head.head]);
  }

  // s = f(s, key, half) for each vector, of which a row of the panel has two halves.
  template <typename F>
  [[gnu::always_inline]] static void update(int64_t count, T* s, int64_t ld, const F& f) {
    for (int64_t j = 0; j < count; ++j)
      for (int half = 0; half < 2; ++half) {
        T* const at = s + j * ld + half * Vec<T>::size();
        f(Vec<T>::loadu(at), j, half).store(at);
      }
  }

  void cap(int64_t count, T* s, int64_t ld, T* slopes) const {
    const Vec<T> most(static_cast<T>(p.softcap)), inverse(static_cast<T>(1 / p.softcap)), one(T(1));
    update(count, s, ld, [&](const Vec<T>& x, int64_t j, int half) {
      const Vec<T> t = tanh(x * inverse);
      if (slopes) (one - t * t).store(slopes + j * ld + half * Vec<T>::size());
      return most * t;
    });
  }

  void add_alibi(const Head& head, int64_t q, KeyRange keys, T* s, int64_t ld) const {
    const Vec<T> slope(alibi_slope(head));
    const int64_t distance = keys.first - q - head.sequence.shift(p);
    update(keys.last - keys.first, s, ld, [&](const Vec<T>& x, int64_t j, int half) {
      const T first = static_cast<T>(distance + j - half * Vec<T>::size());
      return x - slope * Vec<T>::arange(first, T(-1)).abs();
    });
  }

  // A mask of -inf hides a key even where its score is NaN.
  void add_mask(const Head& head, int64_t q, int64_t n, KeyRange keys, T* s, int64_t ld) const {
    const int64_t count = keys.last - keys.first;
    if (p.mask.stride[2] == 0) {
      load_mask_line(head, q, keys, lines_);
      for (int64_t j = 0; j < count; ++j) std::fill_n(panel_ + j * kLanes, kLanes, lines_[j]);
    } else {
      for (int64_t lane = 0; lane < n; ++lane) load_mask_line(head, q + lane, keys, lines_ + lane * pitch_);
      transpose<T>(lines_, pitch_, n, count, panel_, kLanes);
    }
    const Vec<T> hidden(kHidden<T>);
    update(count, s, ld, [&](const Vec<T>& x, int64_t j, int half) {
      const Vec<T> bias = Vec<T>::loadu(panel_ + j * kLanes + half * Vec<T>::size());
      return Vec<T>::blendv(x + bias, hidden, bias == hidden);
    });
  }

  // Hides the keys outside of the window.
  void hide(const Head& head, int64_t q, KeyRange keys, T* s, int64_t ld) const {
    const Vec<T> hidden(kHidden<T>);
    const auto lane = [](int64_t x) { return Vec<T>(static_cast<T>(std::clamp(x, int64_t(-1), kLanes))); };
    const int64_t distance = keys.first - q - head.sequence.shift(p);
    update(keys.last - keys.first, s, ld, [&](const Vec<T>& x, int64_t j, int half) {
      const Vec<T> lanes = Vec<T>::arange(static_cast<T>(half * Vec<T>::size()), T(1));
      const Vec<T> is_seen =
          (lanes >= lane(distance + j - p.window_right)) & (lanes <= lane(distance + j + p.window_left));
      return Vec<T>::blendv(hidden, x, is_seen);
    });
  }

  void load_mask_line(const Head& head, int64_t i, KeyRange keys, T* to) const {
    const int64_t* stride = p.mask.stride;
    const int64_t offset = head.b * stride[0] + head.head * stride[1] + i * stride[2] + keys.first * stride[3];
    const auto load_as = [&](const auto* data) { load_mask(data + offset, stride[3], keys.last - keys.first, to); };
    if (p.mask_kind == AttentionMask::Boolean) return load_as(static_cast<const bool*>(p.mask.data));
    with_type(p.mask_dtype, [&](auto* type) { load_as(static_cast<decltype(type)>(p.mask.data)); });
  }

  void to_factors(const uint32_t* words, int64_t n, T* to) const {
    const auto threshold = static_cast<uint32_t>(dropout_threshold(p.dropout_p));
    const T scale = p.dropout_p < 1 ? static_cast<T>(1 / (1 - p.dropout_p)) : T(0);
    for (int64_t i = 0; i < n; ++i) to[i] = words[i] < threshold ? T(0) : scale;
  }

  const AttentionParams& p;
  const int64_t pitch_;
  T *const lines_, *const panel_;
  uint32_t* const words_;
};

}  // namespace myvision::CPU_CAPABILITY::attention
