// Dropout for the CPU kernels. Compiled once per instruction set.
#pragma once
#include "common/philox_vec.h"

namespace myvision::CPU_CAPABILITY {

// What dropout multiplies elements with: 0, or 1 / (1 - p).
template <typename T>
class Dropout {
 public:
  static constexpr int64_t kChunk = 1024;  // elements that are drawn at a time

  // The seed may be null where p is 0.
  Dropout(double p, const int64_t* seed)
      : is_on_(p > 0),
        seed_(is_on_ ? static_cast<uint64_t>(*seed) : 0),
        threshold_(static_cast<uint32_t>(dropout_threshold(p))),
        scale_(p < 1 ? static_cast<T>(1 / (1 - p)) : T(0)) {}

  bool is_on() const { return is_on_; }

  // Returns the factors of n elements from `first` on, n <= kChunk, which stay until the next call.
  const T* factors(int64_t first, int64_t n) {
    const int64_t skipped = first % 4;
    philox(seed_, static_cast<uint64_t>(first) / 4, (skipped + n + 3) / 4, words_);
    const uint32_t *words = words_ + skipped, threshold = threshold_;
    const T scale = scale_;
    for (int64_t i = 0; i < n; ++i) factors_[i] = words[i] < threshold ? T(0) : scale;
    return factors_;
  }

 private:
  bool is_on_;
  uint64_t seed_;
  uint32_t threshold_;
  T scale_;
  uint32_t words_[kChunk + 4 + 4 * kPhiloxCounters];
  T factors_[kChunk];
};

}  // namespace myvision::CPU_CAPABILITY
