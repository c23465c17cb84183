// layer_norm on the CPU, compiled once per instruction set: where rows are worked on, and by whom.
//
// Rows that lie along memory are used where they lie, in their own type. If some tensor has other rows, those pass
// through buffers of the type computed in: several at a time where their elements lie side by side, as in NCHW.
#include "common/extremes.h"
#include "common/lines.h"
#include "common/parallel.h"
#include "common/workspace.h"
#include "ops/layer_norm/layer_norm_rows.h"

namespace myvision::CPU_CAPABILITY::layer_norm {
namespace {

constexpr int64_t kGrain = 16384;            // elements that are worth a thread
constexpr int64_t kTasks = 8;                // for each thread
constexpr int64_t kBufferBytes = 128 << 10;  // of a tensor's rows that pass through a buffer together,
constexpr int64_t kMaxRows = 64;             // which are at most so many
constexpr int64_t kMinShare = 16;            // rows that share sums of the gradients of weight and bias
constexpr int64_t kMaxShares = 64;           // or, where rows are short, more of them:
constexpr int64_t kSumBytes = 256 << 10;     // as many as fit
constexpr int64_t kGroup = 4;                // rows that are added to those sums together,
constexpr int64_t kGroupBytes = 16 << 10;    // if they take no more of L1

// The innermost dimension of rows that is longer than 1: neighbouring rows are neighbours along it.
int dimension_across(const LayerNormParams& p) { return p.width > 1 ? 3 : p.height > 1 ? 2 : 0; }

// Rows that are neighbours along that dimension.
struct Block {
  int64_t row, count;
  int64_t b, h, w;  // of the first
};

// The tensors of a call, and how their rows are worked on: in blocks of neighbours, and there one by one, as memory
// answers rows that are read side by side more slowly.
template <typename S>
class Rows {
 public:
  using T = Compute<S>;
  using View = LineView<S>;

  explicit Rows(const LayerNormParams& params) : p(params) {}

 protected:
  View view(const Strided4& tensor) {
    const View view(tensor, p.dtype, across_, 1);
    if (view.is_given()) {
      in_place_ &= view.is_in_place();
      crossed_ |= view.is_crossed();
    }
    return view;
  }

  int64_t workers(int64_t tasks) const {
    return std::min({tasks, num_threads(), std::max(rows * n / kGrain, int64_t(1))});
  }

  // Ones and zeros stand for an absent weight and bias.
  RowConstants<T> carve_constants(Carver& memory) const {
    T *const ones = p.weight ? nullptr : memory.take<T>(n), *const zeros = p.bias ? nullptr : memory.take<T>(n);
    if (ones) std::fill_n(ones, n, T(1));
    if (zeros) std::fill_n(zeros, n, T(0));
    return {n, ones ? ones : static_cast<const T*>(p.weight), zeros ? zeros : static_cast<const T*>(p.bias),
            static_cast<T>(p.activation.negative_slope)};
  }

  int64_t buffer_size() const { return in_place_ ? 0 : block_rows() * n; }

  // Calls body(block) for all rows [first, last).
  template <typename Body>
  void for_each_block(int64_t first, int64_t last, const Body& body) const {
    const int64_t length = across_ == 3 ? p.width : across_ == 2 ? p.height : p.batch, most = block_rows();
    for (int64_t row = first, count; row < last; row += count) {
      count = std::min({last - row, length - row % length, most});
      body(Block{row, count, row / (p.height * p.width), row / p.width % p.height, row % p.width});
    }
  }

  Lines<const S> read(const View& view, const Block& block, S* buffer) const {
    if (!view.is_given()) return {nullptr, 0};
    return view.read(view.offset(block.b, 0, block.h, block.w), block.count, n, buffer);
  }
  Lines<S> write(const View& view, const Block& block, S* buffer) const {
    if (!view.is_given()) return {nullptr, 0};
    return view.write(view.offset(block.b, 0, block.h, block.w), n, buffer);
  }
  void finish(const View& view, const Block& block, const S* buffer) const {
    if (view.is_given()) view.finish(view.offset(block.b, 0, block.h, block.w), block.count, n, buffer);
  }

  const LayerNormParams& p;
  const int64_t n = p.channels, rows = number_of_rows(p);

 private:
  int64_t block_rows() const {
    if (in_place_) return kMaxRows;
    return crossed_ ? std::clamp(kBufferBytes / (n * int64_t(sizeof(S))), int64_t(Vec<T>::size()), kMaxRows) : 1;
  }

  const int across_ = dimension_across(p);
  bool in_place_ = true, crossed_ = false;
};

template <typename S>
class Forward : Rows<S> {
  using Base = Rows<S>;
  using Base::p, Base::n, Base::rows, Base::view;
  using typename Base::T, typename Base::View;

 public:
  explicit Forward(const LayerNormParams& params) : Base(params) {
    with_activation(p.activation.kind, [&](auto kind) { finish_row_ = &finish_row<kind.value, S>; });
  }

  void run() const {
    const int64_t tasks = std::min(rows, kTasks * Base::workers(rows)), workers = Base::workers(tasks);
    const int64_t buffers_size = kBuffers * Base::buffer_size();
    const auto layout = [&](Carver& memory) {
      return Memory{Base::carve_constants(memory), memory.take<S>(workers * buffers_size)};
    };
    const Workspace workspace(bytes_of(layout));
    const Memory memory = workspace.carve(layout);
    parallel_tasks(workers, tasks, [&](int64_t task, int64_t worker) {
      run(task * rows / tasks, (task + 1) * rows / tasks, memory.constants, memory.buffers + worker * buffers_size);
    });
  }

 private:
  static constexpr int kBuffers = 5;

  struct Memory {
    RowConstants<T> constants;
    S* buffers;  // kBuffers of each worker
  };

  void run(int64_t first, int64_t last, const RowConstants<T>& constants, S* buffer) const {
    const int64_t size = Base::buffer_size();
    Dropout<T> dropout(p.dropout_p, p.seed);
    Base::for_each_block(first, last, [&](const Block& block) {
      const Lines<const S> input = Base::read(input_, block, buffer),
                           addend = Base::read(addend_, block, buffer + size),
                           residual = Base::read(residual_, block, buffer + 2 * size);
      const Lines<S> sum = Base::write(sum_, block, buffer + 3 * size),
                     output = Base::write(output_, block, buffer + 4 * size);
      const Lines<const S> x = addend_.is_given() ? as_const(sum) : input;
      for (int64_t i = 0; i < block.count; ++i) {
        const int64_t row = block.row + i;
        if (addend_.is_given()) add_row(p.dtype, input[i], addend[i], row * n, n, sum[i], dropout);
        const Statistics<T> statistics = statistics_of_row(x[i]);
        store_statistics(p, row, statistics);
        finish_row_(constants, statistics, x[i], residual[i], output[i]);
      }
      Base::finish(sum_, block, sum.data);
      Base::finish(output_, block, output.data);
    });
  }

  Statistics<T> statistics_of_row(const S* x) const {
    const Moments ordinary = p.centered ? moments(x, n) : moments_about_zero(x, n);
    if (std::isfinite(ordinary.squares)) [[likely]]
      return statistics_of<T>(ordinary, p.eps);
    return extreme_statistics<Statistics<T>>(extreme_moments<T>(
                                                 static_cast<double>(n), static_cast<double>(x[0]), p.centered,
                                                 [&](const auto& visit) {
                                                   for (int64_t i = 0; i < n; ++i) visit(static_cast<double>(x[i]));
                                                 },
                                                 [](double sum) { return sum; }),
                                             p.eps);
  }

  const View input_ = view(p.input), addend_ = view(p.addend), residual_ = view(p.residual), sum_ = view(p.sum),
             output_ = view(p.output);
  void (*finish_row_)(RowConstants<T>, Statistics<T>, const S*, const S*, S*);
};

template <typename S>
class Backward : Rows<S> {
  using Base = Rows<S>;
  using Base::p, Base::n, Base::rows, Base::view;
  using typename Base::T, typename Base::View;

 public:
  Backward(const LayerNormParams& params, const LayerNormGradients& gradients) : Base(params), grad_(gradients) {
    with_activation(p.activation.kind, [&](auto kind) {
      if constexpr (kind.value != ActivationKind::None) undo_activation_ = &undo_activation<kind.value, S>;
    });
  }

  // Rows are shared out in a way that does not depend on the number of threads; each share has sums of its own.
  void run() const {
    const int64_t fitting = kSumBytes / (2 * n * int64_t(sizeof(T)));
    const int64_t shares = std::clamp(rows / kMinShare, int64_t(1), std::max(kMaxShares, fitting));
    const int64_t workers = Base::workers(shares), buffers_size = kBuffers * Base::buffer_size();
    const auto layout = [&](Carver& memory) {
      return Memory{Base::carve_constants(memory), memory.take<T>(shares * 2 * n), memory.take<T>(workers * kGroup * n),
                    memory.take<S>(workers * buffers_size)};
    };
    const Workspace workspace(bytes_of(layout));
    const Memory memory = workspace.carve(layout);
    parallel_tasks(workers, shares, [&](int64_t share, int64_t worker) {
      T* const sums = memory.sums + share * 2 * n;
      run(share * rows / shares, (share + 1) * rows / shares, memory.constants,
          {start_sums(grad_.weight, sums), start_sums(grad_.bias, sums + n)}, memory.groups + worker * kGroup * n,
          memory.buffers + worker * buffers_size);
    });
    add_shares(memory.sums, shares);
  }

 private:
  static constexpr int kBuffers = 7;

  struct Memory {
    RowConstants<T> constants;
    T* sums;     // of each share, of the gradients of weight and bias
    T* groups;   // of each worker, the gradients before the activation of a group of rows
    S* buffers;  // kBuffers of each worker
  };

  T* start_sums(const void* wanted, T* sums) const {
    if (!wanted) return nullptr;
    std::fill_n(sums, n, T(0));
    return sums;
  }

  // The tensors of a block.
  struct Tensors {
    Lines<const S> grad_output, grad_sum, input, residual;
    Lines<S> grad_input, dropped, grad_residual;
  };

  void run(int64_t first, int64_t last, const RowConstants<T>& constants, const ParameterSums<T>& sums, T* group,
           S* buffer) const {
    const int64_t size = Base::buffer_size();
    Dropout<T> dropout(p.dropout_p, p.seed);
    Base::for_each_block(first, last, [&](const Block& block) {
      const Tensors t{.grad_output = Base::read(grad_output_, block, buffer),
                      .grad_sum = Base::read(grad_sum_, block, buffer + size),
                      .input = Base::read(input_, block, buffer + 2 * size),
                      .residual = Base::read(residual_, block, buffer + 3 * size),
                      .grad_input = Base::write(grad_input_, block, buffer + 4 * size),
                      .dropped = Base::write(dropped_, block, buffer + 5 * size),
                      .grad_residual = Base::write(grad_residual_, block, buffer + 6 * size)};
      for (int64_t i = 0, count; i < block.count; i += count) {
        count = std::min(block.count - i, group_rows_);
        run_group(constants, t, i, block.row + i, count, sums, group, dropout);
      }
      Base::finish(grad_input_, block, t.grad_input.data);
      Base::finish(dropped_, block, t.dropped.data);
      Base::finish(grad_residual_, block, t.grad_residual.data);
    });
  }

  // Rows i ... i + count - 1 of a block, the first of which is `row` among all.
  void run_group(const RowConstants<T>& constants, const Tensors& t, int64_t i, int64_t row, int64_t count,
                 const ParameterSums<T>& sums, T* group, Dropout<T>& dropout) const {
    Statistics<T> statistics[kGroup];
    const S *x[kGroup], *grad_output[kGroup];
    for (int64_t j = 0; j < count; ++j) {
      statistics[j] = load_statistics<T>(p, row + j);
      x[j] = t.input[i + j];
      grad_output[j] = t.grad_output[i + j];
    }
    if (!undo_activation_) return run_group(constants, t, i, row, count, statistics, x, grad_output, sums, dropout);
    const T* g[kGroup];
    for (int64_t j = 0; j < count; ++j) {
      undo_activation_(constants, statistics[j], x[j], t.residual[i + j], grad_output[j], group + j * n);
      g[j] = group + j * n;
    }
    run_group(constants, t, i, row, count, statistics, x, g, sums, dropout);
  }

  template <typename G>
  void run_group(const RowConstants<T>& constants, const Tensors& t, int64_t i, int64_t row, int64_t count,
                 const Statistics<T>* statistics, const S* const* x, const G* const* g, const ParameterSums<T>& sums,
                 Dropout<T>& dropout) const {
    if (grad_residual_.is_given())
      for (int64_t j = 0; j < count; ++j) copy_line<T>(g[j], n, t.grad_residual[i + j]);
    if (grad_input_.is_given() || dropped_.is_given()) {
      for (int64_t j = 0; j < count; ++j) {
        const GradientMeans<T> means = gradient_means(constants, p.centered, statistics[j], x[j], g[j]);
        gradients_of_input(constants, statistics[j], means, x[j], g[j], t.grad_sum[i + j], t.grad_input[i + j],
                           t.dropped[i + j], (row + j) * n, dropout);
      }
    }
    if (count == kGroup) return add_to_sums<kGroup>(n, statistics, x, g, sums);
    for (int64_t j = 0; j < count; ++j) add_to_sums<1>(n, statistics + j, x + j, g + j, sums);
  }

  // Adds up the shares; each has n sums for the weight and n for the bias.
  void add_shares(const T* sums, int64_t shares) const {
    T *const weight = static_cast<T*>(grad_.weight), *const bias = static_cast<T*>(grad_.bias);
    const int64_t begin = weight ? 0 : n, end = bias ? 2 * n : n;
    parallel_for(begin, end, std::max(kGrain / shares, int64_t(1)), [&](int64_t first, int64_t last) {
      constexpr int64_t kColumns = 64;
      for (int64_t i = first; i < last; i += kColumns) {
        const int64_t columns = std::min(kColumns, last - i);
        double total[kColumns] = {};
        for (int64_t share = 0; share < shares; ++share)
          for (int64_t j = 0; j < columns; ++j) total[j] += static_cast<double>(sums[share * 2 * n + i + j]);
        for (int64_t j = 0; j < columns; ++j) (i + j < n ? weight[i + j] : bias[i + j - n]) = static_cast<T>(total[j]);
      }
    });
  }

  const LayerNormGradients& grad_;
  const int64_t group_rows_ = kGroup * n * int64_t(sizeof(S)) <= kGroupBytes ? kGroup : 1;
  const View grad_output_ = view(grad_.output), grad_sum_ = view(grad_.sum), input_ = view(p.input),
             residual_ = view(p.residual), grad_input_ = view(grad_.input), dropped_ = view(grad_.dropped),
             grad_residual_ = view(grad_.residual);
  // This is null where there is no activation.
  void (*undo_activation_)(RowConstants<T>, Statistics<T>, const S*, const S*, const S*, T*) = nullptr;
};

// Whether the rows of all tensors that are given lie along memory.
template <typename... Tensors>
bool lie_along(const Tensors&... tensors) {
  return ((tensors.data == nullptr || tensors.stride[1] == 1) && ...);
}

// Runs Kernel<S> on rows of their own type where they lie, or on buffers of the type computed in.
template <template <typename> class Kernel, typename... Arguments>
void run(bool in_place, const LayerNormParams& params, const Arguments&... arguments) {
  with_type(params.dtype, [&]<typename In>(In*) {
    if (in_place) return Kernel<In>(params, arguments...).run();
    Kernel<Compute<In>>(params, arguments...).run();
  });
}

}  // namespace

void forward(const LayerNormParams& p) { run<Forward>(lie_along(p.input, p.addend, p.sum, p.residual, p.output), p); }

void backward(const LayerNormParams& p, const LayerNormGradients& g) {
  run<Backward>(lie_along(p.input, p.residual, g.output, g.sum, g.input, g.dropped, g.residual), p, g);
}

}  // namespace myvision::CPU_CAPABILITY::layer_norm
