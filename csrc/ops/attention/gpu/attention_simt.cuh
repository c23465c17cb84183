// attention by multiply-adds of single threads, for every type, width, stride and GPU.
//
// A block has a tile of R = kRows rows, goes over tiles of C = kColumns columns, and keeps C x R weights in shared
// memory, with which it multiplies rows a second time. Results that are wider than kChunk are computed in chunks, for
// each of which the scores are computed again. E is the width of keys and of values, e is sizeof(T).
//
// Kernel               | per pair of query and key | bytes per pair, of caches | limit aimed at
// ---------------------+---------------------------+---------------------------+---------------
// forward              | 2 E FMAs, 1 exp           | E e (1/C + 2/R)           | FMA throughput
// backward, of queries | 3 E FMAs, 1 exp           | E e (2/C + 3/R)           | FMA throughput
// backward, of keys    | 4 E FMAs, 1 exp           | E e (2/C + 4/R)           | FMA throughput
// backward, of mask    | 2 E FMAs, 1 exp           | 2 E e (1/C + 1/R)         | FMA throughput
#pragma once
#include "ops/attention/gpu/attention_kernel.cuh"

namespace myvision::gpu::attention {

template <typename T>
struct SimtTile {
  using Real = RealOf<T>;
  static constexpr bool kIsDouble = std::is_same_v<Real, double>;
  static constexpr int kThreads = 256;
  static constexpr int kAcross = 16;                     // threads side by side, which share rows
  static constexpr int kThreadRows = kIsDouble ? 2 : 4;  // neighbouring rows of a thread
  static constexpr int kThreadColumns = 4;               // neighbouring columns of a thread, a group
  // A thread has so many groups of columns, kColumns apart, of a result. More would not fit into its registers.
  static constexpr int kMostGroups = std::is_same_v<T, float> ? 2 : 1;
  static constexpr int kRows = kThreads / kAcross * kThreadRows;
  static constexpr int kColumns = kAcross * kThreadColumns;  // columns of a tile of scores
  static constexpr int kDepth = kIsDouble ? 8 : 16;          // numbers of each row or column that are staged at a time
  static constexpr int kPad = kVectorBytes / sizeof(Real);   // it avoids bank conflicts
  static constexpr int kRowPitch = kRows + kPad, kColumnPitch = kColumns + kPad,
                       kChunkPitch = kColumns * kMostGroups + kPad;
  static constexpr int kStaged =
      kDepth * (kRowPitch + kColumnPitch > kChunkPitch ? kRowPitch + kColumnPitch : kChunkPitch);

  using Values = Real[kThreadRows][kThreadColumns];
  template <int kGroups>
  using Results = Real[kThreadRows][kGroups * kThreadColumns];
  template <int kGroups>
  static constexpr int kChunk = kColumns * kGroups;  // how much of a result's width is computed at a time

  static __device__ __forceinline__ int row() { return threadIdx.x / kAcross * kThreadRows; }
  static __device__ __forceinline__ int column() { return threadIdx.x % kAcross * kThreadColumns; }
  // The place of a thread's value [r][c] among the weights of a tile.
  static __device__ __forceinline__ int place(int r, int c) { return (column() + c) * kRowPitch + row() + r; }
};

// Shared memory with kWeights tiles of weights.
template <typename T, int kWeights>
struct alignas(kVectorBytes) SimtShared {
  using Tile = SimtTile<T>;
  typename Tile::Real weights[kWeights][Tile::kColumns * Tile::kRowPitch];
  typename Tile::Real staged[Tile::kStaged];
};

// ---- products -------------------------------------------------------------------------------------------------------

template <int kCount, typename Real>
__device__ __forceinline__ void load_numbers(Real (&numbers)[kCount], const Real* data) {
  constexpr int kMost = kVectorBytes / sizeof(Real), kStep = kCount < kMost ? kCount : kMost;
#pragma unroll
  for (int i = 0; i < kCount; i += kStep) {
    const auto pack = load_vector<kStep>(data + i);
#pragma unroll
    for (int j = 0; j < kStep; ++j) numbers[i + j] = pack.value[j];
  }
}

// Adds the products of kDepth staged rows a[depth][row] and b[depth][column]. Where kSkips unseen numbers of a are left
// out.
template <typename T, bool kSkips, int kSums>
__device__ __forceinline__ void add_products(typename SimtTile<T>::Real (&sums)[SimtTile<T>::kThreadRows][kSums],
                                             const typename SimtTile<T>::Real* a, const typename SimtTile<T>::Real* b,
                                             int b_pitch, int64_t columns) {
  using Tile = SimtTile<T>;
  using Real = typename Tile::Real;
#pragma unroll 1
  for (int d = 0; d < Tile::kDepth; ++d) {
    Real of_rows[Tile::kThreadRows];
    load_numbers(of_rows, a + d * Tile::kRowPitch + Tile::row());
#pragma unroll
    for (int first = 0; first < kSums; first += Tile::kThreadColumns) {
      const int offset = first / Tile::kThreadColumns * Tile::kColumns;
      if (offset >= columns) break;
      Real of_columns[Tile::kThreadColumns];
      load_numbers(of_columns, b + d * b_pitch + offset + Tile::column());
#pragma unroll
      for (int r = 0; r < Tile::kThreadRows; ++r) {
#pragma unroll
        for (int c = 0; c < Tile::kThreadColumns; ++c) {
          if (kSkips && is_unseen(of_rows[r])) continue;
          sums[r][first + c] += of_rows[r] * of_columns[c];
        }
      }
    }
  }
}

// Stages kDepth columns of `lines` rows as staged[column][row].
template <int kLines, typename T>
__device__ __forceinline__ void stage_transposed(const Matrix<T>& matrix, int64_t first_row, int64_t first_column,
                                                 RealOf<T>* staged, int pitch) {
  using Tile = SimtTile<T>;
#pragma unroll 2
  for (int i = threadIdx.x; i < kLines * Tile::kDepth; i += Tile::kThreads) {
    const int row = i / Tile::kDepth, column = i % Tile::kDepth;
    staged[column * pitch + row] = matrix.get(first_row + row, first_column + column);
  }
}

// products[row][column] = the dot product of row `row` of a and row `column` of b.
template <typename T>
__device__ __forceinline__ void multiply_rows(typename SimtTile<T>::Values& products, const Matrix<T>& a,
                                              int64_t first_a, const Matrix<T>& b, int64_t first_b,
                                              typename SimtTile<T>::Real* staged) {
  using Tile = SimtTile<T>;
  auto* const of_columns = staged + Tile::kDepth * Tile::kRowPitch;
  set_zero(products);
  for (int64_t depth = 0; depth < a.columns; depth += Tile::kDepth) {
    __syncthreads();  // before what is staged is overwritten
    stage_transposed<Tile::kRows>(a, first_a, depth, staged, Tile::kRowPitch);
    stage_transposed<Tile::kColumns>(b, first_b, depth, of_columns, Tile::kColumnPitch);
    __syncthreads();
    add_products<T, false>(products, staged, of_columns, Tile::kColumnPitch, Tile::kColumns);
  }
}

template <typename T>
__device__ __forceinline__ void store_values(const typename SimtTile<T>::Values& values,
                                             typename SimtTile<T>::Real* weights) {
  using Tile = SimtTile<T>;
#pragma unroll
  for (int r = 0; r < Tile::kThreadRows; ++r) {
#pragma unroll
    for (int c = 0; c < Tile::kThreadColumns; ++c) weights[Tile::place(r, c)] = values[r][c];
  }
}

// results[row][column] += sum over i of weights[i][row] * b[first_b + i][chunk + column]. Where careful, rows that are
// not seen are left out whatever they hold.
template <typename T, int kSums>
__device__ __forceinline__ void add_weighted_rows(RealOf<T> (&results)[SimtTile<T>::kThreadRows][kSums],
                                                  const typename SimtTile<T>::Real* weights, const Matrix<T>& b,
                                                  int64_t first_b, int64_t chunk, bool careful,
                                                  typename SimtTile<T>::Real* staged) {
  using Tile = SimtTile<T>;
  constexpr int kChunk = kSums * Tile::kAcross;
  const int64_t columns = min(b.columns - chunk, int64_t(kChunk));
  for (int depth = 0; depth < Tile::kColumns; depth += Tile::kDepth) {
    __syncthreads();  // before what is staged is overwritten, and after the weights were written
#pragma unroll 2
    for (int i = threadIdx.x; i < Tile::kDepth * kChunk; i += Tile::kThreads) {
      const int row = i / kChunk, column = i % kChunk;
      staged[row * Tile::kChunkPitch + column] = b.get(first_b + depth + row, chunk + column);
    }
    __syncthreads();
    const auto* const of_rows = weights + depth * Tile::kRowPitch;
    if (careful) {
      add_products<T, true>(results, of_rows, staged, Tile::kChunkPitch, columns);
    } else {
      add_products<T, false>(results, of_rows, staged, Tile::kChunkPitch, columns);
    }
  }
}

// Calls visit(column, number) for a thread's part of a row of results.
template <typename T, int kSums, typename Visit>
__device__ __forceinline__ void visit_results(const RealOf<T> (&row)[kSums], Visit visit) {
  using Tile = SimtTile<T>;
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    visit(i / Tile::kThreadColumns * Tile::kColumns + Tile::column() + i % Tile::kThreadColumns, row[i]);
  }
}

// ---- forward --------------------------------------------------------------------------------------------------------

// Combines the values of the threads that share a row.
template <typename T, typename Combine>
__device__ __forceinline__ RealOf<T> combine_row(RealOf<T> value, Combine combine) {
#pragma unroll
  for (int distance = 1; distance < SimtTile<T>::kAcross; distance *= 2) {
    value = combine(value, shuffle_xor(value, distance));
  }
  return value;
}

// The running softmax of a thread's rows, of which it sums its own columns.
template <typename T>
struct SimtSoftmax {
  using Tile = SimtTile<T>;
  using Real = typename Tile::Real;
  Real highest[Tile::kThreadRows], sum[Tile::kThreadRows];
  typename Tile::template Results<Tile::kMostGroups> output;

  __device__ __forceinline__ void clear() {
    set_zero(output);
#pragma unroll
    for (int r = 0; r < Tile::kThreadRows; ++r) highest[r] = kMinusInfinity<Real>, sum[r] = 0;
  }

  // Turns the products of queries, from i on, and keys, from j on, into weights. Scores and dropout take many
  // registers, so they are computed in shared memory, row by row.
  __device__ __forceinline__ void add_scores(const typename Tile::Values& products, const Head<T>& head, int64_t i,
                                             int64_t j, Real* weights) {
    const Scores<T> scores(head);
    store_values<T>(products, weights);
#pragma unroll 1
    for (int r = 0; r < Tile::kThreadRows; ++r) {
#pragma unroll
      for (int c = 0; c < Tile::kThreadColumns; ++c) {
        Real& number = weights[Tile::place(r, c)];
        number = scores(number, i + r, j + c).value;
      }
    }
#pragma unroll
    for (int r = 0; r < Tile::kThreadRows; ++r) exponentiate(r, weights);
    const Dropout<T> dropout(head);
    if (!dropout.is_on()) return;
#pragma unroll 1
    for (int r = 0; r < Tile::kThreadRows; ++r) {
      const PhiloxWords words = dropout.words(i + r, j / 4);
#pragma unroll
      for (int c = 0; c < Tile::kThreadColumns; ++c) weights[Tile::place(r, c)] *= dropout.factor(words.word[c]);
    }
  }

  // Finishes the output of a row, and returns its sums, once all keys were added.
  __device__ __forceinline__ RowSums<Real> finish(int r) {
    const Real total = combine_row<T>(sum[r], [](Real a, Real b) { return a + b; });
#pragma unroll
    for (auto& number : output[r]) number = total == 0 ? 0 : number / total;
    return {highest[r], total};
  }

 private:
  // Turns the scores of a row into weights, e^(score - the highest so far).
  __device__ __forceinline__ void exponentiate(int r, Real* weights) {
    Real most = highest[r];
#pragma unroll
    for (int c = 0; c < Tile::kThreadColumns; ++c) {
      const Real score = weights[Tile::place(r, c)];
      if (score > most) most = score;
    }
    most = combine_row<T>(most, [](Real a, Real b) { return b > a ? b : a; });
    const Real factor = most > highest[r] ? std::exp(highest[r] - most) : 1;
    highest[r] = most;
    sum[r] *= factor;
#pragma unroll
    for (auto& number : output[r]) number *= factor;
#pragma unroll
    for (int c = 0; c < Tile::kThreadColumns; ++c) {
      Real& number = weights[Tile::place(r, c)];
      const bool is_seen = number != kMinusInfinity<Real>;
      number = is_seen ? std::exp(number - most) : kUnseen<Real>;
      sum[r] += number;
    }
  }
};

template <typename T>
__global__ void MYVISION_LAUNCH_BOUNDS(SimtTile<T>::kThreads, 1)
    attention_forward_simt(const AttentionParams params, const Partials<RealOf<T>> partials, const Cut cut) {
  using Tile = SimtTile<T>;
  using Real = typename Tile::Real;
  using Shared = SimtShared<T, 1>;
  MYVISION_SHARED(Shared, shared);
  const int64_t count = cut.count();
  for (int64_t index = blockIdx.x; index < count; index += gridDim.x) {
    const Piece piece = piece_of(cut, index);
    const Head<T> head(params, piece.tile.b, piece.head);
    const auto query = head.of_queries(params.query, params.width);
    const auto key = head.of_keys(params.key, params.width);
    const auto value = head.of_keys(params.value, params.value_width);
    const int64_t first = piece.tile.first, chunk = piece.chunk * Tile::template kChunk<Tile::kMostGroups>;
    const KeyRange range =
        split_of(keys_of_tile(params, head.sequence, first, Tile::kRows), Tile::kColumns, piece.split, cut.splits);
    SimtSoftmax<T> softmax;
    with_care<Tile::kThreads>([&](bool careful) {
      softmax.clear();
      for (int64_t j = range.first; j < range.last; j += Tile::kColumns) {
        typename Tile::Values products;
        multiply_rows<T>(products, query, first, key, j, shared.staged);
        __syncthreads();  // before weights are overwritten: multiply_rows has not waited where the width is 0
        softmax.add_scores(products, head, first + Tile::row(), j + Tile::column(), shared.weights[0]);
        add_weighted_rows<T>(softmax.output, shared.weights[0], value, j, chunk, careful, shared.staged);
      }
      return all_finite(softmax.output);
    });
    const ForwardTarget<T> target(head, partials, piece.split);
#pragma unroll
    for (int r = 0; r < Tile::kThreadRows; ++r) {
      const int64_t i = first + Tile::row() + r;
      const RowSums<Real> sums = softmax.finish(r);
      if (piece.chunk == 0 && threadIdx.x % Tile::kAcross == 0) target.set_sums(i, sums);
      visit_results<T>(softmax.output[r], [&](int column, Real number) { target.set(i, chunk + column, number); });
    }
  }
}

// ---- backward -------------------------------------------------------------------------------------------------------

// Writes a block's results from row `first` and column `chunk` on; a gradient that is not wanted has no data.
template <typename T, int kSums>
__device__ __forceinline__ void store_results(const Matrix<T>& matrix, bool wanted, int64_t first, int64_t chunk,
                                              const RealOf<T> (&results)[SimtTile<T>::kThreadRows][kSums]) {
  using Tile = SimtTile<T>;
  if (!wanted) return;
#pragma unroll
  for (int r = 0; r < Tile::kThreadRows; ++r) {
    visit_results<T>(
        results[r], [&](int column, RealOf<T> number) { matrix.set(first + Tile::row() + r, chunk + column, number); });
  }
}

// Calls store(place, gradient) for each of a thread's products, with its place among the weights of a tile. The tile
// begins with query i and key j; its rows are keys where kOfKeys, else queries. of_dropped are the gradients of the
// probabilities after dropout.
template <typename T, bool kOfKeys, typename Store>
__device__ __forceinline__ void visit_gradients(const typename SimtTile<T>::Values& products,
                                                const typename SimtTile<T>::Values& of_dropped, const Head<T>& head,
                                                const RowStatistics<RealOf<T>>* statistics, int64_t i, int64_t j,
                                                SimtShared<T, 2>& shared, Store store) {
  using Tile = SimtTile<T>;
  using Real = typename Tile::Real;
  constexpr int kQueries = kOfKeys ? Tile::kThreadColumns : Tile::kThreadRows;
  constexpr int kKeys = kOfKeys ? Tile::kThreadRows : Tile::kThreadColumns;
  const Scores<T> scores(head);
  const Dropout<T> dropout(head);
  i += kOfKeys ? Tile::column() : Tile::row();
  j += kOfKeys ? Tile::row() : Tile::column();
  __syncthreads();  // before weights are overwritten
  store_values<T>(products, shared.weights[0]);
  store_values<T>(of_dropped, shared.weights[1]);
#pragma unroll 1  // unrolled, registers would have to hold all that a score takes 16 times
  for (int q = 0; q < kQueries; ++q) {
    const RowStatistics<Real> row = i + q < head.sequence.queries ? statistics[head.row(i + q)] : no_row<Real>();
    const PhiloxWords words = dropout.words(i + q, j / 4);
#pragma unroll
    for (int k = 0; k < kKeys; ++k) {
      const int number = kOfKeys ? Tile::place(k, q) : Tile::place(q, k);
      const Score<Real> score = scores(shared.weights[0][number], i + q, j + k);
      const Real factor = dropout.factor(word_of(words, j + k));
      store(number, gradient_of(score, row, factor, shared.weights[1][number]));
    }
  }
}

// Two results of full width would take too many registers.
template <typename T, bool kOfKeys>
inline constexpr int kBackwardGroups = kOfKeys ? 1 : SimtTile<T>::kMostGroups;

// Computes the gradient of query or, where kOfKeys, those of key and value.
template <typename T, bool kOfKeys>
__global__ void MYVISION_LAUNCH_BOUNDS(SimtTile<T>::kThreads, 1)
    attention_backward_simt(const AttentionParams params, const AttentionGradients gradients,
                            const RowStatistics<RealOf<T>>* statistics, const Cut cut) {
  using Tile = SimtTile<T>;
  using Real = typename Tile::Real;
  using Shared = SimtShared<T, 2>;
  constexpr int kGroups = kBackwardGroups<T, kOfKeys>;
  MYVISION_SHARED(Shared, shared);
  const int64_t count = cut.count(), sharing = kOfKeys ? divide(params.heads, params.key_heads) : 1;
  for (int64_t index = blockIdx.x; index < count; index += gridDim.x) {
    const Piece piece = piece_of(cut, index);
    const int64_t first = piece.tile.first, chunk = piece.chunk * Tile::template kChunk<kGroups>;
    // The gradients of query or key, and of value.
    typename Tile::template Results<kGroups> of_product_side, of_value_side;
    with_care<Tile::kThreads>([&](bool careful) {
      set_zero(of_product_side), set_zero(of_value_side);
      for (int64_t member = 0; member < sharing; ++member) {
        const Head<T> head(params, piece.tile.b, piece.head * sharing + member);
        const auto query = head.of_queries(params.query, params.width);
        const auto key = head.of_keys(params.key, params.width);
        const auto value = head.of_keys(params.value, params.value_width);
        const auto gradient = head.of_queries(gradients.output, params.value_width);
        const KeyRange range = kOfKeys ? queries_of_tile(params, head.sequence, first, Tile::kRows)
                                       : keys_of_tile(params, head.sequence, first, Tile::kRows);
        for (int64_t c = range.first / Tile::kColumns * Tile::kColumns; c < range.last; c += Tile::kColumns) {
          typename Tile::Values products, of_dropped;
          multiply_rows<T>(products, kOfKeys ? key : query, first, kOfKeys ? query : key, c, shared.staged);
          multiply_rows<T>(of_dropped, kOfKeys ? value : gradient, first, kOfKeys ? gradient : value, c, shared.staged);
          visit_gradients<T, kOfKeys>(products, of_dropped, head, statistics, kOfKeys ? c : first, kOfKeys ? first : c,
                                      shared, [&](int number, const Gradient<Real>& gradient) {
                                        shared.weights[0][number] = gradient.of_product;
                                        shared.weights[1][number] = gradient.dropped;
                                      });
          add_weighted_rows<T>(of_product_side, shared.weights[0], kOfKeys ? query : key, c, chunk, careful,
                               shared.staged);
          if constexpr (kOfKeys) {
            add_weighted_rows<T>(of_value_side, shared.weights[1], gradient, c, chunk, careful, shared.staged);
          }
        }
      }
      return all_finite(of_product_side) && all_finite(of_value_side);
    });
    const Head<T> head(params, piece.tile.b, piece.head * sharing);
    if constexpr (kOfKeys) {
      store_results<T>(head.of_keys(gradients.key, params.width), gradients.key.data, first, chunk, of_product_side);
      store_results<T>(head.of_keys(gradients.value, params.value_width), gradients.value.data, first, chunk,
                       of_value_side);
    } else {
      store_results<T>(head.of_queries(gradients.query, params.width), gradients.query.data, first, chunk,
                       of_product_side);
    }
  }
}

// ---- the gradient of the mask ---------------------------------------------------------------------------------------

template <typename T>
using SimtMaskCut = MaskCut<SimtTile<T>::kRows, SimtTile<T>::kColumns>;

template <typename T>
__global__ void MYVISION_LAUNCH_BOUNDS(SimtTile<T>::kThreads, 1)
    attention_backward_mask_simt(const AttentionParams params, const AttentionGradients gradients,
                                 const RowStatistics<RealOf<T>>* statistics, const MaskTarget target,
                                 const SimtMaskCut<T> cut) {
  using Tile = SimtTile<T>;
  using Real = typename Tile::Real;
  using Shared = SimtShared<T, 2>;
  MYVISION_SHARED(Shared, shared);
  const int64_t count = cut.count();
  for (int64_t index = blockIdx.x; index < count; index += gridDim.x) {
    const MaskPiece piece = cut.piece(index);
    typename Tile::Values sums;
    set_zero(sums);
    cut.template visit<T>(
        params, piece, [](const Head<T>&, int64_t) {},
        [&](const Head<T>& head, int64_t i, int64_t j) {
          typename Tile::Values products, of_dropped;
          multiply_rows<T>(products, head.of_queries(params.query, params.width), i,
                           head.of_keys(params.key, params.width), j, shared.staged);
          multiply_rows<T>(of_dropped, head.of_queries(gradients.output, params.value_width), i,
                           head.of_keys(params.value, params.value_width), j, shared.staged);
          visit_gradients<T, false>(
              products, of_dropped, head, statistics, i, j, shared,
              [&](int number, const Gradient<Real>& gradient) { shared.weights[0][number] = gradient.of_score; });
#pragma unroll
          for (int r = 0; r < Tile::kThreadRows; ++r) {
#pragma unroll
            for (int c = 0; c < Tile::kThreadColumns; ++c) sums[r][c] += shared.weights[0][Tile::place(r, c)];
          }
        });
    __syncthreads();
    store_values<T>(sums, shared.weights[0]);
    __syncthreads();
    store_mask_gradient<T, Tile::kThreads, Tile::kRows, Tile::kColumns>(params, target, piece, shared.weights[0],
                                                                        Tile::kRowPitch);
  }
}

}  // namespace myvision::gpu::attention
