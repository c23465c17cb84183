// layer_norm on the CPU, compiled once per instruction set: where rows are worked on, and by whom.
//
// Rows that lie along memory are used where they lie, in their own type. If some tensor has other rows, those pass
// through buffers of the type computed in: several at a time where their elements lie side by side, as in NCHW.
#include "common/lines.h"
#include "common/parallel.h"
#include "common/workspace.h"
#include "ops/layer_norm/layer_norm_rows.h"

namespace myvision::CPU_CAPABILITY {
namespace {

constexpr int64_t kGrain = 16384;            // elements that are worth a thread
constexpr int64_t kBufferBytes = 128 << 10;  // of a tensor's rows that pass through a buffer together,
constexpr int64_t kMaxRows = 64;             // which are at most so many
constexpr int64_t kMinShare = 8;             // rows that share sums of the gradients of weight and bias
constexpr int64_t kMaxShares = 64;           // or, where rows are short, more of them:
constexpr int64_t kSumBytes = 256 << 10;     // as many as fit

// LineView for rows that all are used where they lie, in their own type.
template <typename S>
class PlainView {
 public:
  PlainView(const Strided4& tensor, Dtype, int across, int) : tensor_(tensor), line_(tensor.stride[across]) {}

  bool is_given() const { return tensor_.data != nullptr; }
  bool is_crossed() const { return false; }
  int64_t offset(int64_t i0, int64_t i1, int64_t i2, int64_t i3) const {
    const int64_t* stride = tensor_.stride;
    return i0 * stride[0] + i1 * stride[1] + i2 * stride[2] + i3 * stride[3];
  }
  Lines<const S> read(int64_t offset, int64_t, int64_t, S*) const {
    return {static_cast<const S*>(tensor_.data) + offset, line_};
  }
  Lines<S> write(int64_t offset, int64_t, S*) const { return {static_cast<S*>(tensor_.data) + offset, line_}; }
  void finish(int64_t, int64_t, int64_t, const S*) const {}

 private:
  Strided4 tensor_;
  int64_t line_;
};

// The innermost dimension of rows that is longer than 1: neighbouring rows are neighbours along it.
int dimension_across(const LayerNormParams& p) { return p.width > 1 ? 3 : p.height > 1 ? 2 : 0; }

// Rows that are neighbours along that dimension.
struct Block {
  int64_t row, count;
  int64_t b, h, w;  // of the first
};

// The tensors of a call, and how their rows are worked on, block by block.
template <typename S, typename View>
class Rows {
 public:
  using T = Compute<S>;
  static constexpr bool kInPlace = std::is_same_v<View, PlainView<S>>;

  explicit Rows(const LayerNormParams& params) : p(params) {}

 protected:
  View view(const Strided4& tensor) {
    const View view(tensor, p.dtype, across_, 1);
    if (view.is_given()) crossed_ |= view.is_crossed();
    return view;
  }

  // Rows in a block.
  int64_t block_rows() const {
    if (kInPlace) return kMaxRows;
    return crossed_ ? std::clamp(kBufferBytes / int64_t(n * sizeof(S)), int64_t(Vec<T>::size()), kMaxRows) : 1;
  }
  int64_t buffer_size() const { return kInPlace ? 0 : block_rows() * n; }

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
  const int across_ = dimension_across(p);
  bool crossed_ = false;
};

template <typename S, typename View>
class Forward : Rows<S, View> {
  using Base = Rows<S, View>;
  using Base::p, Base::n, Base::rows, Base::view;
  using typename Base::T;

 public:
  explicit Forward(const LayerNormParams& params) : Base(params) {
    with_activation(p.activation.kind, [&](auto kind) { work_on_row_ = &forward_row<kind.value, S>; });
  }

  void run() const {
    parallel_for(0, rows, std::max(kGrain / n, int64_t(1)), [&](int64_t first, int64_t last) { run(first, last); });
  }

 private:
  void run(int64_t first, int64_t last) const {
    const int64_t size = Base::buffer_size();
    const Workspace memory(5 * size * sizeof(S));
    S* const buffer = memory.template as<S>();
    Dropout<T> dropout(p);
    Base::for_each_block(first, last, [&](const Block& block) {
      const Lines<const S> input = Base::read(input_, block, buffer),
                           addend = Base::read(addend_, block, buffer + size),
                           residual = Base::read(residual_, block, buffer + 2 * size);
      const Lines<S> sum = Base::write(sum_, block, buffer + 3 * size),
                     output = Base::write(output_, block, buffer + 4 * size);
      for (int64_t i = 0; i < block.count; ++i)
        work_on_row_(p, {block.row + i, input[i], addend[i], residual[i], sum[i], output[i]}, dropout);
      Base::finish(sum_, block, sum.data);
      Base::finish(output_, block, output.data);
    });
  }

  const View input_ = view(p.input), addend_ = view(p.addend), residual_ = view(p.residual), sum_ = view(p.sum),
             output_ = view(p.output);
  void (*work_on_row_)(const LayerNormParams&, const ForwardRow<S>&, Dropout<T>&);
};

template <typename S, typename View>
class Backward : Rows<S, View> {
  using Base = Rows<S, View>;
  using Base::p, Base::n, Base::rows, Base::view;
  using typename Base::T;

 public:
  Backward(const LayerNormParams& params, const LayerNormGradients& gradients) : Base(params), grad_(gradients) {
    with_activation(p.activation.kind, [&](auto kind) { work_on_row_ = &backward_row<kind.value, S>; });
  }

  // The rows are shared out in a way that does not depend on the number of threads, and so are the sums of a share.
  void run() const {
    const int64_t shares =
        std::clamp(rows / kMinShare, int64_t(1), std::max(kMaxShares, kSumBytes / int64_t(2 * n * sizeof(T))));
    const int64_t workers = std::min({shares, num_threads(), std::max(rows * n / kGrain, int64_t(1))});
    const int64_t sums_size = shares * n, scratch_size = n + kBuffers * Base::buffer_size();
    const Workspace memory((2 * sums_size + workers * scratch_size) * sizeof(T));
    T* const weight_sums = memory.template as<T>();
    T* const bias_sums = weight_sums + sums_size;
    T* const scratch = bias_sums + sums_size;
    parallel_tasks(workers, shares, [&](int64_t share, int64_t worker) {
      const ParameterSums<T> sums{start_sums(grad_.weight, weight_sums + share * n),
                                  start_sums(grad_.bias, bias_sums + share * n)};
      run(share * rows / shares, (share + 1) * rows / shares, sums, scratch + worker * scratch_size);
    });
    add_shares(weight_sums, shares, static_cast<T*>(grad_.weight));
    add_shares(bias_sums, shares, static_cast<T*>(grad_.bias));
  }

 private:
  static constexpr int kBuffers = 7;

  T* start_sums(const void* wanted, T* sums) const {
    if (!wanted) return nullptr;
    std::fill_n(sums, n, T(0));
    return sums;
  }

  // Buffers need the space of numbers of type T at most.
  void run(int64_t first, int64_t last, const ParameterSums<T>& sums, T* scratch) const {
    const int64_t size = Base::buffer_size();
    S* const buffer = reinterpret_cast<S*>(scratch + n);
    Dropout<T> dropout(p);
    Base::for_each_block(first, last, [&](const Block& block) {
      const Lines<const S> output = Base::read(grad_output_, block, buffer),
                           sum = Base::read(grad_sum_, block, buffer + size),
                           input = Base::read(input_, block, buffer + 2 * size),
                           residual = Base::read(residual_, block, buffer + 3 * size);
      const Lines<S> grad_input = Base::write(grad_input_, block, buffer + 4 * size),
                     dropped = Base::write(dropped_, block, buffer + 5 * size),
                     grad_residual = Base::write(grad_residual_, block, buffer + 6 * size);
      for (int64_t i = 0; i < block.count; ++i)
        work_on_row_(
            p, {block.row + i, output[i], sum[i], input[i], residual[i], grad_input[i], dropped[i], grad_residual[i]},
            sums, scratch, dropout);
      Base::finish(grad_input_, block, grad_input.data);
      Base::finish(dropped_, block, dropped.data);
      Base::finish(grad_residual_, block, grad_residual.data);
    });
  }

  void add_shares(const T* sums, int64_t shares, T* to) const {
    if (!to) return;
    parallel_for(0, n, std::max(kGrain / shares, int64_t(1)), [&](int64_t first, int64_t last) {
      constexpr int64_t kColumns = 64;
      for (int64_t i = first; i < last; i += kColumns) {
        const int64_t columns = std::min(kColumns, last - i);
        double total[kColumns] = {};
        for (int64_t share = 0; share < shares; ++share)
          for (int64_t j = 0; j < columns; ++j) total[j] += static_cast<double>(sums[share * n + i + j]);
        for (int64_t j = 0; j < columns; ++j) to[i + j] = static_cast<T>(total[j]);
      }
    });
  }

  const LayerNormGradients& grad_;
  const View grad_output_ = view(grad_.output), grad_sum_ = view(grad_.sum), input_ = view(p.input),
             residual_ = view(p.residual), grad_input_ = view(grad_.input), dropped_ = view(grad_.dropped),
             grad_residual_ = view(grad_.residual);
  void (*work_on_row_)(const LayerNormParams&, const BackwardRow<S>&, const ParameterSums<T>&, T*, Dropout<T>&);
};

// Calls f with a null pointer to the element type.
template <typename F>
void with_type(Dtype dtype, const F& f) {
  switch (dtype) {
    case Dtype::Float64:
      return f(static_cast<double*>(nullptr));
    case Dtype::Float16:
      return f(static_cast<c10::Half*>(nullptr));
    case Dtype::BFloat16:
      return f(static_cast<c10::BFloat16*>(nullptr));
    default:
      return f(static_cast<float*>(nullptr));
  }
}

// Whether the rows of all tensors that are given lie along memory.
template <typename... Tensors>
bool lie_along(const Tensors&... tensors) {
  return ((tensors.data == nullptr || tensors.stride[1] == 1) && ...);
}

// Runs Kernel<S, View> on rows where they lie, or on buffers.
template <template <typename, typename> class Kernel, typename... Arguments>
void run(bool in_place, const LayerNormParams& params, const Arguments&... arguments) {
  with_type(params.dtype, [&]<typename In>(In*) {
    using T = Compute<In>;
    if (in_place) return Kernel<In, PlainView<In>>(params, arguments...).run();
    Kernel<T, LineView<T>>(params, arguments...).run();
  });
}

}  // namespace

void layer_norm_forward(const LayerNormParams& p) {
  run<Forward>(lie_along(p.input, p.addend, p.sum, p.residual, p.output), p);
}

void layer_norm_backward(const LayerNormParams& p, const LayerNormGradients& g) {
  run<Backward>(lie_along(p.input, p.residual, g.output, g.sum, g.input, g.dropped, g.residual), p, g);
}

}  // namespace myvision::CPU_CAPABILITY
