// linear on the CPU.
#include "common/pack.h"
#include "ops/linear/cpu/linear_epilogue.h"
#include "ops/linear/cpu/linear_few_rows.h"
#include "ops/linear/linear.h"

namespace myvision::CPU_CAPABILITY::linear {
namespace {

template <typename S>
PackSource<S> source_of(const Matrix& matrix) {
  return {static_cast<const S*>(matrix.data), matrix.row, matrix.column};
}

template <typename S>
PackSource<S> transposed(const PackSource<S>& from) {
  return {from.data, from.step, from.row};
}

// The part of a matrix from an element on.
template <typename S>
PackSource<S> from(const PackSource<S>& source, int64_t row, int64_t step) {
  return {source.data + row * source.row + step * source.step, source.row, source.step};
}

// ------------------------------------------------------------------------------------------------ forward
// Few rows, each of which lies side by side in numbers of type T.
template <typename S, typename T>
void forward_few_rows(const LinearParams& p, const typename Product<T>::Finish& finish) {
  const ProductSize size{p.rows, p.outputs, p.features};
  const S *const weight = static_cast<const S*>(p.weight.data), *const input = static_cast<const S*>(p.input.data);
  if constexpr (std::is_same_v<S, T>) {
    multiply_few_rows<S>(size, input, p.input.row, weight, p.weight.row, finish);
  } else {
    const Workspace converted(p.rows * p.features * sizeof(T));
    for (int64_t i = 0; i < p.rows; ++i)
      copy_line<T>(input + i * p.input.row, p.features, converted.as<T>() + i * p.features);
    multiply_few_rows<S>(size, converted.as<T>(), p.features, weight, p.weight.row, finish);
  }
}

template <typename S, typename T = Compute<S>>
void forward_any(const LinearParams& p, const typename Product<T>::Finish& finish) {
  if (p.rows <= kFewRows && p.input.column == 1 && p.weight.column == 1) return forward_few_rows<S, T>(p, finish);
  const PackSource<S> input = source_of<S>(p.input), weight = source_of<S>(p.weight);
  Product<T>(
      {p.rows, p.outputs, p.features},
      [&](int64_t row, int64_t rows, int64_t k, int64_t depth, int64_t, T* to) {
        pack_left(from(input, row, k), rows, depth, to);
      },
      [&](int64_t k, int64_t depth, int64_t column, int64_t columns, T* to) {
        pack_right(from(weight, column, k), depth, columns, to);
      },
      finish)
      .run();
}

// ------------------------------------------------------------------------------------------------ backward
template <typename T>
using Undo = FunctionRef<Span, T*>;

template <typename S>
void with_undo(const LinearParams& p, const Matrix& output, const FunctionRef<Undo<Compute<S>>>& f) {
  using T = Compute<S>;
  with_activation(p.activation.kind, [&](auto kind) {
    EpilogueBackward<decltype(kind)::value, S> backward(p, output);
    f([&](const Span& span, T* to) { backward(span, to); });
  });
}

// What is multiplied is the gradient of the preactivation, computed while it is packed where it is not that of the
// output.
template <typename S, typename T = Compute<S>>
class Backward {
  static constexpr int64_t kRows = Product<T>::kRows, kStrip = Product<T>::kStrip;

 public:
  Backward(const LinearParams& p, const LinearGradients& gradients) : p_(p), g_(gradients) {}

  void run() const {
    if (g_.input && p_.features > 0) grad_input();
    if (g_.weight && p_.features > 0)
      grad_weight();
    else if (g_.bias)
      grad_bias();
  }

 private:
  bool is_plain() const { return p_.activation.kind == ActivationKind::None && p_.dropout_p == 0; }

  // Calls f(undo), where undo(span, to) computes a span of the gradient of the preactivation.
  void with_undo(const FunctionRef<Undo<T>>& f) const { linear::with_undo<S>(p_, g_.output, f); }

  void grad_input() const {
    const PackSource<S> output = source_of<S>(g_.output), weight = transposed(source_of<S>(p_.weight));
    Product<T>(
        {p_.rows, p_.features, p_.outputs},
        [&](int64_t row, int64_t rows, int64_t k, int64_t depth, int64_t, T* to) {
          if (is_plain()) return pack_left(from(output, row, k), rows, depth, to);
          with_undo([&](const Undo<T>& undo) { pack_undone(undo, row, rows, k, depth, to); });
        },
        [&](int64_t k, int64_t depth, int64_t column, int64_t columns, T* to) {
          pack_right(from(weight, column, k), depth, columns, to);
        },
        [&](int64_t row, int64_t rows, int64_t column, int64_t columns, const T* c) {
          write(c, rows, columns, static_cast<S*>(g_.input) + row * p_.features + column);
        })
        .run();
  }

  // A strip of rows is computed side by side, then transposed.
  static void pack_undone(const Undo<T>& undo, int64_t row, int64_t rows, int64_t k, int64_t depth, T* to) {
    alignas(64) T buffer[kRows * Product<T>::kDepth];
    for (int64_t i = 0; i < rows; i += kRows, to += kStrip) {
      const int64_t count = std::min(kRows, rows - i);
      for (int64_t r = 0; r < count; ++r) undo(Span{row + i + r, k, depth}, buffer + r * depth);
      pack_strip<T>(buffer, depth, count, depth, to);
    }
  }

  // The sums over the rows, which make the gradient of the bias, are taken of what is packed.
  void grad_weight() const {
    const PackSource<S> output = transposed(source_of<S>(g_.output)), input = transposed(source_of<S>(p_.input));
    const Workspace sums(p_.outputs * sizeof(T));
    if (g_.bias) std::fill_n(sums.as<T>(), p_.outputs, T(0));
    Product<T>(
        {p_.outputs, p_.features, p_.rows},
        [&](int64_t row, int64_t rows, int64_t k, int64_t depth, int64_t column, T* to) {
          if (is_plain())
            pack_left(from(output, row, k), rows, depth, to);
          else
            with_undo([&](const Undo<T>& undo) { pack_undone_columns(undo, row, rows, k, depth, to); });
          if (g_.bias && column == 0) add_up(to, rows, depth, sums.as<T>() + row);
        },
        [&](int64_t k, int64_t depth, int64_t column, int64_t columns, T* to) {
          pack_right(from(input, column, k), depth, columns, to);
        },
        [&](int64_t row, int64_t rows, int64_t column, int64_t columns, const T* c) {
          write(c, rows, columns, static_cast<S*>(g_.weight) + row * p_.features + column);
        })
        .run();
    if (g_.bias) copy_line<T>(sums.as<T>(), p_.outputs, static_cast<S*>(g_.bias));
  }

  static void pack_undone_columns(const Undo<T>& undo, int64_t row, int64_t rows, int64_t k, int64_t depth, T* to) {
    alignas(64) T line[Product<T>::kBlockRows];
    for (int64_t j = 0; j < depth; ++j, to += kRows) {
      undo(Span{k + j, row, rows}, line);
      pack_columns<T>(line, 0, rows, 1, to);
    }
  }

  // sums[i] += all of row i of a packed block.
  static void add_up(const T* block, int64_t rows, int64_t depth, T* sums) {
    for (int64_t i = 0; i < rows; i += kRows, block += kStrip) {
      T strip[kRows] = {};
      for (int64_t k = 0; k < depth; ++k)
        for (int64_t r = 0; r < kRows; ++r) strip[r] += block[k * kRows + r];
      for (int64_t r = 0; r < std::min(kRows, rows - i); ++r) sums[i + r] += strip[r];
    }
  }

  // The same without the product.
  void grad_bias() const {
    constexpr int64_t kColumns = 64, kDepth = Product<T>::kDepth;
    parallel_for(0, (p_.outputs + kColumns - 1) / kColumns, 1, [&](int64_t first, int64_t last) {
      alignas(64) T line[kColumns], sums[kColumns], total[kColumns];
      for (int64_t column = first * kColumns; column < std::min(last * kColumns, p_.outputs); column += kColumns) {
        const int64_t count = std::min(kColumns, p_.outputs - column);
        std::fill_n(total, kColumns, T(0));
        with_undo([&](const Undo<T>& undo) {
          for (int64_t k = 0; k < p_.rows; k += kDepth) {  // in the order of grad_weight
            std::fill_n(sums, kColumns, T(0));
            for (int64_t j = k; j < std::min(k + kDepth, p_.rows); ++j) {
              undo(Span{j, column, count}, line);
              for (int64_t i = 0; i < count; ++i) sums[i] += line[i];
            }
            for (int64_t i = 0; i < count; ++i) total[i] += sums[i];
          }
        });
        copy_line<T>(total, count, static_cast<S*>(g_.bias) + column);
      }
    });
  }

  void write(const T* c, int64_t rows, int64_t columns, S* to) const {
    for (int64_t i = 0; i < rows; ++i) copy_line<T>(c + i * Product<T>::kCols, columns, to + i * p_.features);
  }

  const LinearParams& p_;
  const LinearGradients& g_;
};

// ------------------------------------------------------------------------------------------------ beside other
// products Calls f(span) for all spans of the output's rows [begin, end).
template <typename F>
void for_each_span(const LinearParams& p, int64_t begin, int64_t end, const F& f) {
  for (int64_t row = begin; row < end; ++row)
    for (int64_t column = 0; column < p.outputs; column += kSpan)
      f(Span{row, column, std::min(kSpan, p.outputs - column)});
}

int64_t grain_of(const LinearParams& p) { return std::max<int64_t>(32768 / std::max<int64_t>(p.outputs, 1), 1); }

// Calls f(finish), where finish(span, product) writes a span of the output.
template <typename S>
void with_epilogue(const LinearParams& p, const FunctionRef<FunctionRef<Span, const Compute<S>*>>& f) {
  using T = Compute<S>;
  with_activation(p.activation.kind, [&](auto kind) {
    Epilogue<decltype(kind)::value, S> epilogue(p);
    f([&](const Span& span, const T* product) { epilogue(span, product); });
  });
}

}  // namespace

void forward(const LinearParams& p) {
  with_type(p.dtype, [&]<typename S>(const S*) {
    using T = Compute<S>;
    forward_any<S>(p, [&](int64_t row, int64_t rows, int64_t column, int64_t columns, const T* c) {
      with_epilogue<S>(p, [&](const FunctionRef<Span, const T*>& finish) {
        for (int64_t i = 0; i < rows; ++i) finish(Span{row + i, column, columns}, c + i * Product<T>::kCols);
      });
      end_of_stream();
    });
  });
}

void backward(const LinearParams& p, const LinearGradients& gradients) {
  with_type(p.dtype, [&]<typename S>(const S*) { Backward<S>(p, gradients).run(); });
}

void epilogue(const LinearParams& p, const Matrix& product) {
  with_type(p.dtype, [&]<typename S>(const S*) {
    using T = Compute<S>;
    parallel_for(0, p.rows, grain_of(p), [&](int64_t begin, int64_t end) {
      with_epilogue<S>(p, [&](const FunctionRef<Span, const T*>& finish) {
        alignas(64) T line[kSpan];
        for_each_span(p, begin, end, [&](const Span& span) {
          copy_row<T>(row_of<S>(product, span), product.column, span.count, line, 1);
          finish(span, line);
        });
      });
      end_of_stream();
    });
  });
}

void epilogue_backward(const LinearParams& p, const Matrix& output, void* const& gradient) {
  with_type(p.dtype, [&]<typename S>(const S*) {
    using T = Compute<S>;
    parallel_for(0, p.rows, grain_of(p), [&](int64_t begin, int64_t end) {
      with_undo<S>(p, output, [&](const Undo<T>& undo) {
        alignas(64) T line[kSpan];
        for_each_span(p, begin, end, [&](const Span& span) {
          undo(span, line);
          copy_line<T>(line, span.count, static_cast<S*>(gradient) + span.row * p.outputs + span.column);
        });
      });
    });
  });
}

}  // namespace myvision::CPU_CAPABILITY::linear
