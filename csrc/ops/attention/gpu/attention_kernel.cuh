// attention on the GPU: the small kernels, and what all kernels share. attention_simt.cuh has the large kernels for any
// type, width and stride, and attention_mma.cuh has those for tensor cores.
#pragma once
#include <cmath>

#include "common/gpu.cuh"
#include "common/philox.h"
#include "ops/attention/attention.h"
#include "ops/attention/attention_math.h"

namespace myvision::gpu::attention {

inline constexpr int kRowThreads = 256;  // threads of a block of the small kernels
inline constexpr int kRowTile = 64;      // rows of a sequence that such a block takes at a time

// ---- which part of a call a block works on --------------------------------------------------------------------------

// The queries or keys of all sequences, in tiles of which each belongs to one sequence.
struct RowTiles {
  const int64_t* starts;  // the offsets of packed sequences, on the device, or null
  int64_t batch, rows, size;

  // It is an upper bound for packed sequences, whose lengths the host does not know.
  MYVISION_HOST_DEVICE int64_t count() const {
    return starts ? rows / size + batch : batch * ((rows + size - 1) / size);
  }
};

inline RowTiles query_tiles(const AttentionParams& params, int64_t size) {
  return {params.query_starts, params.batch, params.queries, size};
}
inline RowTiles key_tiles(const AttentionParams& params, int64_t size) {
  return {params.key_starts, params.batch, params.keys, size};
}

// A tile of sequence b that begins with its row `first`, which may lie behind the sequence's end.
struct RowTile {
  int64_t b, first;
};

// Packed sequence b has the tiles from starts[b] / size + b on: at least as many as its rows fill.
__device__ __forceinline__ RowTile locate(const RowTiles& tiles, int64_t tile) {
  if (!tiles.starts) {
    const int64_t of_sequence = (tiles.rows + tiles.size - 1) / tiles.size, b = divide(tile, of_sequence);
    return {b, (tile - b * of_sequence) * tiles.size};
  }
  const auto first_tile = [&](int64_t b) { return detail::between(0, tiles.starts[b], tiles.rows) / tiles.size + b; };
  int64_t low = 0, high = tiles.batch;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (first_tile(middle) <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return {low, (tile - first_tile(low)) * tiles.size};
}

// How the work of a kernel is cut into pieces, outermost first.
struct Cut {
  RowTiles tiles;
  int64_t heads;
  int64_t splits;  // how many parts the keys are cut into
  int64_t chunks;  // how many parts the width of the results is cut into

  MYVISION_HOST_DEVICE int64_t count() const { return tiles.count() * heads * splits * chunks; }
};

struct Piece {
  RowTile tile;
  int64_t head, split, chunk;
};

__device__ __forceinline__ Piece piece_of(const Cut& cut, int64_t index) {
  const int64_t split = divide(index, cut.chunks), head = divide(split, cut.splits), tile = divide(head, cut.heads);
  return {locate(cut.tiles, tile), head - tile * cut.heads, split - head * cut.splits, index - split * cut.chunks};
}

// The keys that the window leaves to any of the queries [first, first + size).
__device__ __forceinline__ KeyRange keys_of_tile(const AttentionParams& params, const AttentionSequence& sequence,
                                                 int64_t first, int64_t size) {
  const int64_t last = min(first + size, sequence.queries);
  if (last <= first) return {0, 0};
  return {keys_of(params, sequence, first).first, keys_of(params, sequence, last - 1).last};
}

// The queries to which the window leaves any of the keys [first, first + size).
__device__ __forceinline__ KeyRange queries_of_tile(const AttentionParams& params, const AttentionSequence& sequence,
                                                    int64_t first, int64_t size) {
  const int64_t last = min(first + size, sequence.keys), shift = sequence.shift(params);
  if (last <= first) return {0, 0};
  const int64_t least = detail::between(0, first - shift - params.window_right, sequence.queries);
  return {least, detail::between(least, last - shift + params.window_left, sequence.queries)};
}

// The part of a range, in whole tiles, that belongs to a split.
__device__ __forceinline__ KeyRange split_of(const KeyRange& range, int64_t tile, int64_t split, int64_t splits) {
  if (range.first == range.last) return range;
  const int64_t first = range.first / tile, count = (range.last + tile - 1) / tile - first;
  const int64_t from = first + count * split / splits, to = first + count * (split + 1) / splits;
  return {from * tile, min(to * tile, range.last)};
}

// ---- tensors as a block sees them -----------------------------------------------------------------------------------

// The rows of one head of one sequence. Elements outside of it read as 0.
template <typename T>
struct Matrix {
  T* data;
  int64_t rows, columns, row_stride, column_stride;

  __device__ __forceinline__ T* at(int64_t row, int64_t column) const {
    return data + row * row_stride + column * column_stride;
  }
  __device__ __forceinline__ bool has(int64_t row, int64_t column) const { return row < rows && column < columns; }
  __device__ __forceinline__ RealOf<T> get(int64_t row, int64_t column) const {
    return has(row, column) ? to_real(*at(row, column)) : RealOf<T>(0);
  }
  __device__ __forceinline__ void set(int64_t row, int64_t column, RealOf<T> value) const {
    if (has(row, column)) *at(row, column) = from_real<T>(value);
  }
};

template <typename T>
__device__ __forceinline__ Matrix<T> matrix_of(const Strided4& tensor, int64_t b, int64_t head, int64_t first,
                                               int64_t rows, int64_t columns) {
  T* data = static_cast<T*>(tensor.data) + b * tensor.stride[0] + head * tensor.stride[1] + first * tensor.stride[2];
  return {data, rows, columns, tensor.stride[2], tensor.stride[3]};
}

// A head of a sequence.
template <typename T>
struct Head {
  const AttentionParams& params;
  int64_t b, head;
  AttentionSequence sequence;

  __device__ __forceinline__ Head(const AttentionParams& params, int64_t b, int64_t head)
      : params(params), b(b), head(head), sequence(sequence_of(params, b)) {}

  __device__ __forceinline__ int64_t key_head() const { return divide(head, divide(params.heads, params.key_heads)); }
  // The rows of this head in a tensor that is like query, or like key, and so wide.
  __device__ __forceinline__ Matrix<T> of_queries(const Strided4& tensor, int64_t width) const {
    return matrix_of<T>(tensor, b, head, sequence.first_query, sequence.queries, width);
  }
  __device__ __forceinline__ Matrix<T> of_keys(const Strided4& tensor, int64_t width) const {
    return matrix_of<T>(tensor, b, key_head(), sequence.first_key, sequence.keys, width);
  }
  __device__ __forceinline__ int64_t row(int64_t i) const { return row_of(params, sequence, b, head, i); }
};

// ---- scores and probabilities ---------------------------------------------------------------------------------------

template <typename Real>
inline constexpr Real kMinusInfinity = -std::numeric_limits<Real>::infinity();

// The weight, or the gradient, of a key that is not seen. Products leave it out, whatever the other factor holds. No
// other weight or gradient is a negative zero.
template <typename Real>
inline constexpr Real kUnseen = Real(-0.0);
template <typename Real>
__device__ __forceinline__ bool is_unseen(Real weight) {
  return weight == 0 && std::signbit(weight);
}

template <typename Real>
struct Score {
  Real value;  // -inf where the key is not seen
  Real slope;  // the derivative of the score by the product of query and key

  __device__ __forceinline__ bool is_seen() const { return value != kMinusInfinity<Real>; }
};

// Turns products of query and key into scores, with the same bits in every kernel: backward subtracts from them the
// peak that forward found before it exponentiates.
template <typename T>
class Scores {
 public:
  using Real = RealOf<T>;

  __device__ __forceinline__ explicit Scores(const Head<T>& head)
      : params_(head.params),
        sequence_(head.sequence),
        shift_(head.sequence.shift(head.params)),
        scale_(static_cast<Real>(head.params.scale)),
        softcap_(static_cast<Real>(head.params.softcap)),
        alibi_(head.params.alibi_slopes ? head.params.alibi_slopes[head.b * head.params.alibi_batch_stride + head.head]
                                        : 0),
        mask_(head.b * head.params.mask.stride[0] + head.head * head.params.mask.stride[1]) {}

  // Whether the scores of queries [i, last_i) and keys [j, last_j) are just the scaled products.
  __device__ __forceinline__ bool are_plain(int64_t i, int64_t last_i, int64_t j, int64_t last_j) const {
    return params_.mask_kind == AttentionMask::None && !params_.alibi_slopes && softcap_ == 0 &&
           last_i <= sequence_.queries && last_j <= sequence_.keys &&
           j - (last_i - 1) - shift_ >= -params_.window_left && last_j - 1 - i - shift_ <= params_.window_right;
  }
  __device__ __forceinline__ Score<Real> plain(Real product) const {
    return {rounded_product(product, scale_), scale_};
  }

  __device__ __forceinline__ Score<Real> operator()(Real product, int64_t i, int64_t j) const {
    const int64_t distance = j - i - shift_;
    if (i >= sequence_.queries || j >= sequence_.keys || distance < -params_.window_left ||
        distance > params_.window_right) {
      return {kMinusInfinity<Real>, 0};
    }
    Score<Real> score = plain(product);
    if (softcap_ > 0) {
      const Real part = std::tanh(score.value / softcap_);
      score.value = rounded_product(softcap_, part);
      score.slope *= 1 - part * part;
    }
    if (params_.alibi_slopes) {
      score.value -= rounded_product(alibi_, static_cast<Real>(distance < 0 ? -distance : distance));
    }
    if (params_.mask_kind != AttentionMask::None) score.value = masked(score.value, i, j);
    return score;
  }

 private:
  // A hidden key gets -inf, and no sum, as its score may be NaN.
  __device__ __forceinline__ Real masked(Real value, int64_t i, int64_t j) const {
    const int64_t place = mask_ + i * params_.mask.stride[2] + j * params_.mask.stride[3];
    if (params_.mask_kind == AttentionMask::Boolean) {
      return static_cast<const uint8_t*>(params_.mask.data)[place] != 0 ? value : kMinusInfinity<Real>;
    }
    const Real added = params_.mask_dtype == params_.dtype
                           ? Real(to_real(static_cast<const T*>(params_.mask.data)[place]))
                           : Real(static_cast<const float*>(params_.mask.data)[place]);
    return added == kMinusInfinity<Real> ? added : value + added;
  }

  const AttentionParams& params_;
  const AttentionSequence& sequence_;
  const int64_t shift_;
  const Real scale_, softcap_, alibi_;
  const int64_t mask_;  // the offset of the head's mask
};

// The factors by which dropout multiplies the probabilities of a head.
template <typename T>
class Dropout {
 public:
  using Real = RealOf<T>;

  __device__ __forceinline__ explicit Dropout(const Head<T>& head)
      : head_(head),
        on_(head.params.dropout_p > 0),
        seed_(on_ ? static_cast<uint64_t>(*head.params.seed) : 0),
        threshold_(dropout_threshold(head.params.dropout_p)),
        kept_(static_cast<Real>(head.params.dropout_p < 1 ? 1 / (1 - head.params.dropout_p) : 0)) {}

  // The random words of query i for the keys 4 * group to 4 * group + 3.
  __device__ __forceinline__ PhiloxWords words(int64_t i, int64_t group) const {
    if (!on_) return {};
    return philox(seed_, dropout_counter(head_.params, head_.row(i)) + static_cast<uint64_t>(group));
  }
  __device__ __forceinline__ Real factor(uint32_t word) const {
    if (!on_) return 1;
    return word < threshold_ ? 0 : kept_;
  }
  __device__ __forceinline__ bool is_on() const { return on_; }

 private:
  const Head<T>& head_;
  const bool on_;
  const uint64_t seed_, threshold_;
  const Real kept_;
};

// The largest score of a row, and the sum of e^(score - peak): -inf and 0 where it sees no key.
template <typename Real>
struct RowSums {
  Real peak, total;
};

// What backward knows of a query.
template <typename Real>
struct RowStatistics {
  Real peak, log_total;  // what forward wrote
  Real dot;              // the dot product of the output and its gradient, less the gradient of lse

  __device__ __forceinline__ bool has_keys() const { return log_total != kMinusInfinity<Real>; }
};
template <typename Real>
__device__ __forceinline__ RowStatistics<Real> no_row() {
  return {kMinusInfinity<Real>, kMinusInfinity<Real>, 0};
}

// What backward computes of a pair of query and key.
template <typename Real>
struct Gradient {
  Real dropped;     // the probability after dropout, by which the value was multiplied
  Real of_score;    // the gradient of the score
  Real of_product;  // the gradient of the product of query and key
};

template <typename Real>
__device__ __forceinline__ Gradient<Real> gradient_of(const Score<Real>& score, const RowStatistics<Real>& row,
                                                      Real factor, Real of_dropped) {
  if (!score.is_seen() || !row.has_keys()) return {kUnseen<Real>, kUnseen<Real>, kUnseen<Real>};
  const Real probability = std::exp((score.value - row.peak) - row.log_total);
  const Real of_score = probability * (of_dropped * factor - row.dot);
  return {probability * factor, of_score, of_score * score.slope + 0};  // adding 0 makes a negative zero positive
}

// ---- sums of products -----------------------------------------------------------------------------------------------

template <typename Real, int kRows, int kColumns>
__device__ __forceinline__ void set_zero(Real (&numbers)[kRows][kColumns]) {
#pragma unroll
  for (auto& line : numbers) {
#pragma unroll
    for (auto& number : line) number = 0;
  }
}

template <typename Real, int kRows, int kColumns>
__device__ __forceinline__ bool all_finite(const Real (&numbers)[kRows][kColumns]) {
  Real zero = 0;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) zero += numbers[r][c] * 0;
  }
  return zero == 0;
}

// Whether the value is true in any thread of the block. All threads get the same answer.
template <int kThreads>
__device__ __forceinline__ bool any_thread(bool value) {
  return block_sum<kThreads>(value ? 1.0f : 0.0f) > 0;
}

// Calls compute(careful), which returns whether its results are finite: first without care, and if some thread's
// results are not finite once more with care, so that what is not seen is left out whatever it holds.
template <int kThreads, typename Compute>
__device__ __forceinline__ void with_care(Compute compute) {
  bool careful = false;
  while (any_thread<kThreads>(!compute(careful)) && !careful) careful = true;
}

// ---- small kernels --------------------------------------------------------------------------------------------------

// The results of splits: output is [splits, rows, value_width] and sums [splits, rows]. Both are null where there is
// only one split.
template <typename Real>
struct Partials {
  Real* output;
  RowSums<Real>* sums;
  int64_t rows;
};

// Writes what forward returns of a row beside its output.
template <typename Real>
__device__ __forceinline__ void set_row(const AttentionParams& params, int64_t row, const RowSums<Real>& sums) {
  const Real log_total = std::log(sums.total);  // -inf, as peak is, where there is no key
  if (params.lse) static_cast<Real*>(params.lse)[row] = sums.peak + log_total;
  if (!params.statistics) return;
  Real* const statistics = static_cast<Real*>(params.statistics) + 2 * row;
  statistics[0] = sums.peak, statistics[1] = log_total;
}

// Where a block writes what it found for the queries of a head: to the tensors, or to the results of its split.
template <typename T>
class ForwardTarget {
 public:
  using Real = RealOf<T>;

  __device__ __forceinline__ ForwardTarget(const Head<T>& head, const Partials<Real>& partials, int64_t split)
      : head_(head),
        output_(head.of_queries(head.params.output, head.params.value_width)),
        split_output_(partials.sums ? partials.output + split * partials.rows * output_.columns : nullptr),
        split_sums_(partials.sums ? partials.sums + split * partials.rows : nullptr) {}

  __device__ __forceinline__ void set(int64_t i, int64_t column, Real value) const {
    if (!split_output_) return output_.set(i, column, value);
    if (output_.has(i, column)) split_output_[head_.row(i) * output_.columns + column] = value;
  }
  __device__ __forceinline__ void set_sums(int64_t i, const RowSums<Real>& sums) const {
    if (i >= output_.rows) return;
    if (!split_sums_) return set_row(head_.params, head_.row(i), sums);
    split_sums_[head_.row(i)] = sums;
  }

 private:
  const Head<T>& head_;
  const Matrix<T> output_;
  Real* const split_output_;
  RowSums<Real>* const split_sums_;
};

// Adds up the outputs of the splits in order, each weighted by its share of the sum of exponentials.
template <typename T>
__global__ void MYVISION_LAUNCH_BOUNDS(kRowThreads, 1)
    attention_merge(const AttentionParams params, const Partials<RealOf<T>> partials, const int64_t splits,
                    const Cut cut) {
  using Real = RealOf<T>;
  const int64_t count = cut.count();
  for (int64_t index = blockIdx.x; index < count; index += gridDim.x) {
    const Piece piece = piece_of(cut, index);
    const Head<T> head(params, piece.tile.b, piece.head);
    const auto output = head.of_queries(params.output, params.value_width);
    const int64_t last = min(piece.tile.first + cut.tiles.size, head.sequence.queries);
    const int64_t width = max(params.value_width, int64_t(1));  // without values there still is a log-sum-exp
    for (int64_t place = threadIdx.x; place < (last - piece.tile.first) * width; place += kRowThreads) {
      const int64_t line = divide(place, width), column = place - line * width, i = piece.tile.first + line;
      const int64_t row = head.row(i);
      RowSums<Real> all{kMinusInfinity<Real>, 0};
      Real sum = 0;
      for (int64_t split = 0; split < splits; ++split) {
        const Real peak = partials.sums[split * partials.rows + row].peak;
        all.peak = peak > all.peak ? peak : all.peak;
      }
      for (int64_t split = 0; split < splits; ++split) {
        const int64_t of_split = split * partials.rows + row;
        const auto [peak, total] = partials.sums[of_split];
        const Real weight = peak == kMinusInfinity<Real> ? total : total * std::exp(peak - all.peak);
        all.total += weight;
        if (column < params.value_width) sum += weight * partials.output[of_split * params.value_width + column];
      }
      output.set(i, column, all.total == 0 ? 0 : sum / all.total);
      if (column == 0) set_row(params, row, all);
    }
  }
}

// Whether dot is summed from the gradients of probabilities. Where the output was rounded to a half type, a gradient of
// the mask would show that, as it may sum over a row numbers that cancel.
template <typename T>
MYVISION_HOST_DEVICE bool sums_dot(const AttentionGradients& gradients) {
  return sizeof(T) < sizeof(RealOf<T>) && gradients.mask.data;
}

// Writes the RowStatistics of all rows, a warp for each. Where sums_dot, dot is the gradient of lse at first.
template <typename T>
__global__ void MYVISION_LAUNCH_BOUNDS(kRowThreads, 1)
    attention_backward_rows(const AttentionParams params, const AttentionGradients gradients,
                            RowStatistics<RealOf<T>>* statistics, const Cut cut) {
  using Real = RealOf<T>;
  const int64_t count = cut.count();
  for (int64_t index = blockIdx.x; index < count; index += gridDim.x) {
    const Piece piece = piece_of(cut, index);
    const Head<T> head(params, piece.tile.b, piece.head);
    const auto output = head.of_queries(params.output, params.value_width);
    const auto gradient = head.of_queries(gradients.output, params.value_width);
    const int64_t last = min(piece.tile.first + cut.tiles.size, head.sequence.queries);
    for (int64_t i = piece.tile.first + threadIdx.x / kWarpSize; i < last; i += kRowThreads / kWarpSize) {
      const int64_t row = head.row(i);
      const Real of_lse = gradients.lse ? static_cast<const Real*>(gradients.lse)[row] : 0;
      Real dot = 0;
      for (int64_t column = threadIdx.x % kWarpSize; column < params.value_width; column += kWarpSize) {
        dot += output.get(i, column) * gradient.get(i, column);
      }
      dot = sums_dot<T>(gradients) ? of_lse : warp_sum(dot) - of_lse;
      const Real* const of_forward = static_cast<const Real*>(params.statistics) + 2 * row;
      if (threadIdx.x % kWarpSize == 0) statistics[row] = {of_forward[0], of_forward[1], dot};
    }
  }
}

// ---- the gradient of the mask ---------------------------------------------------------------------------------------

// Where the gradient of a mask goes, as numbers of the operator's type or as floats.
struct MaskTarget {
  Strided4 mask;
  bool is_float;
};

// How many numbers of a dimension the mask has of its own, and how many share each of them.
struct MaskDim {
  int64_t own, shared;
};

MYVISION_HOST_DEVICE MaskDim mask_dim(const Strided4& mask, int dim, int64_t size) {
  return mask.stride[dim] == 0 ? MaskDim{1, size} : MaskDim{size, 1};
}

// A tile of scores of a head, which begins with query i and key j.
struct MaskPiece {
  int64_t b, head, i, j;
};

// Cuts the elements that a mask has of its own into tiles of kRows x kColumns.
template <int kRows, int kColumns>
struct MaskCut {
  MaskDim batch, heads, rows, columns;

  MYVISION_HOST_DEVICE MaskCut(const AttentionParams& params, const Strided4& mask)
      : batch(mask_dim(mask, 0, params.batch)),
        heads(mask_dim(mask, 1, params.heads)),
        rows(mask_dim(mask, 2, (params.queries + kRows - 1) / kRows)),
        columns(mask_dim(mask, 3, (params.keys + kColumns - 1) / kColumns)) {}

  MYVISION_HOST_DEVICE int64_t count() const { return batch.own * heads.own * rows.own * columns.own; }

  __device__ __forceinline__ MaskPiece piece(int64_t index) const {
    const int64_t line = divide(index, columns.own), plane = divide(line, rows.own), b = divide(plane, heads.own);
    return {b, plane - b * heads.own, (line - plane * rows.own) * kRows, (index - line * columns.own) * kColumns};
  }

  // Calls start(head, i) for every tile of queries that shares the piece, and then add(head, i, j) for every tile of
  // keys that shares it too.
  template <typename T, typename Start, typename Add>
  __device__ __forceinline__ void visit(const AttentionParams& params, const MaskPiece& piece, Start start,
                                        Add add) const {
    for (int64_t b = piece.b; b < piece.b + batch.shared; ++b) {
      for (int64_t h = piece.head; h < piece.head + heads.shared; ++h) {
        const Head<T> head(params, b, h);
        for (int64_t i = piece.i; i < piece.i + rows.shared * kRows; i += kRows) {
          const KeyRange range = keys_of_tile(params, head.sequence, i, kRows);
          start(head, i);
          for (int64_t j = piece.j; j < piece.j + columns.shared * kColumns; j += kColumns) {
            if (j < range.last && j + kColumns > range.first) add(head, i, j);
          }
        }
      }
    }
  }
};

// Writes what a block of kThreads found for a piece, staged[column * pitch + row]. It sums over the rows, the columns,
// both or neither, where they share elements of the mask.
template <typename T, int kThreads, int kRows, int kColumns>
__device__ __forceinline__ void store_mask_gradient(const AttentionParams& params, const MaskTarget& target,
                                                    const MaskPiece& piece, const RealOf<T>* staged, int pitch) {
  const auto gradient = matrix_of<T>(target.mask, piece.b, piece.head, 0, params.queries, params.keys);
  const bool shares_rows = gradient.row_stride == 0, shares_columns = gradient.column_stride == 0;
  const int rows = shares_rows ? 1 : kRows, columns = shares_columns ? 1 : kColumns;
  const int64_t place_of_head = piece.b * target.mask.stride[0] + piece.head * target.mask.stride[1];
  for (int place = threadIdx.x; place < rows * columns; place += kThreads) {
    const int row = place / columns, column = place % columns;
    if (!gradient.has(piece.i + row, piece.j + column)) continue;
    RealOf<T> sum = 0;
    for (int c = column; c < (shares_columns ? kColumns : column + 1); ++c) {
      for (int r = row; r < (shares_rows ? kRows : row + 1); ++r) sum += staged[c * pitch + r];
    }
    if (target.is_float) {
      const int64_t offset =
          place_of_head + (piece.i + row) * gradient.row_stride + (piece.j + column) * gradient.column_stride;
      static_cast<float*>(target.mask.data)[offset] = static_cast<float>(sum);
    } else {
      gradient.set(piece.i + row, piece.j + column, sum);
    }
  }
}

}  // namespace myvision::gpu::attention
