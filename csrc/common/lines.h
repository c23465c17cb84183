// Lines of a strided tensor as the CPU kernels compute with them: numbers side by side, of type T (float for half
// types). They are used where they lie if they lie so, else brought into a buffer that stays in L1, and back.
// Compiled once per instruction set.
#pragma once
#include "common/dtype.h"
#include "common/strided.h"
#include "common/vec_io.h"

namespace myvision::CPU_CAPABILITY {

// The first number of each line is `pitch` after that of the line before.
template <typename T>
struct Lines {
  T* data;
  int64_t pitch;
  T* operator[](int64_t line) const { return data + line * pitch; }
};

template <typename T>
Lines<const T> as_const(Lines<T> lines) {
  return {lines.data, lines.pitch};
}

// Two dimensions of a tensor: lines follow one another along dimension `across`, their numbers along dimension `along`.
// T may also be a half type, if all lines lie side by side.
template <typename T>
class LineView {
  static constexpr bool kPlain = std::is_same_v<T, c10::Half> || std::is_same_v<T, c10::BFloat16>;

 public:
  LineView(const Strided4& tensor, Dtype dtype, int across, int along)
      : tensor_(tensor),
        dtype_(dtype),
        line_(tensor.stride[across]),
        step_(tensor.stride[along]),
        in_place_(kPlain || (step_ == 1 && (dtype == Dtype::Float64 || dtype == Dtype::Float32))) {}

  bool is_given() const { return tensor_.data != nullptr; }
  // Whether lines are used where they lie.
  bool is_in_place() const { return in_place_; }
  // Whether lines lie side by side as numbers should.
  bool is_crossed() const { return line_ == 1 && step_ != 1; }

  int64_t offset(int64_t i0, int64_t i1, int64_t i2, int64_t i3) const {
    const int64_t* stride = tensor_.stride;
    return i0 * stride[0] + i1 * stride[1] + i2 * stride[2] + i3 * stride[3];
  }

  // So many lines of n numbers from an offset on. The buffer holds lines * n numbers.
  Lines<const T> read(int64_t offset, int64_t lines, int64_t n, T* buffer) const {
    if (in_place_) return {static_cast<const T*>(tensor_.data) + offset, line_};
    with_type([&]<typename In>(const In* data) {
      // Lines one after the other are one long line.
      if (step_ == 1 && (line_ == n || lines == 1)) return copy_line<T>(data + offset, lines * n, buffer);
      load_pixels(data + offset, step_, line_, n, lines, buffer, n);
    });
    return {buffer, n};
  }

  // Where to write such lines; `finish` then brings them where they belong.
  Lines<T> write(int64_t offset, int64_t n, T* buffer) const {
    if (in_place_) return {static_cast<T*>(tensor_.data) + offset, line_};
    return {buffer, n};
  }
  void finish(int64_t offset, int64_t lines, int64_t n, const T* buffer) const {
    if (in_place_) return;
    with_type([&]<typename Out>(Out* data) {
      if (step_ == 1 && (line_ == n || lines == 1)) return copy_line<T>(buffer, lines * n, data + offset);
      store_pixels(buffer, n, n, lines, data + offset, step_, line_);
    });
  }

 private:
  template <typename Body>
  void with_type(const Body& body) const {
    if constexpr (kPlain) {
      return;  // all are in place
    } else if constexpr (std::is_same_v<T, double>) {
      body(static_cast<double*>(tensor_.data));
    } else if (dtype_ == Dtype::Float32) {
      body(static_cast<float*>(tensor_.data));
    } else if (dtype_ == Dtype::Float16) {
      body(static_cast<c10::Half*>(tensor_.data));
    } else {
      body(static_cast<c10::BFloat16*>(tensor_.data));
    }
  }

  Strided4 tensor_;
  Dtype dtype_;
  int64_t line_, step_;
  bool in_place_;
};

}  // namespace myvision::CPU_CAPABILITY
