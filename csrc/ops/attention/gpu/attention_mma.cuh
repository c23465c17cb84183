// attention on tensor cores, for half types whose rows are aligned and up to kMmaWidth wide.
//
// Four warps have a tile of R = 64 rows, 16 each, and go over tiles of C columns, of which the next is copied to shared
// memory while one is computed. A warp's products stay in its registers, where they are what the next product takes.
// E is the width, rounded up to 16. Where it is over 128, results are computed in two chunks, each with the scores.
//
// Kernel               | per pair of query and key | bytes per pair, of caches | of shared memory   | limit aimed at
// ---------------------+---------------------------+---------------------------+--------------------+---------------
// forward              | 2 E FMAs, 1 exp           | 4 E / R                   | 4 E (1/16 + 1/2C)  | tensor cores
// backward, of queries | 3 E FMAs, 1 exp           | 4 E / R                   | 6 E / 16 + 4 E / C | shared memory
// backward, of keys    | 4 E FMAs, 1 exp           | 4 E / R                   | 8 E / 16 + 4 E / C | shared memory
#pragma once
#include <cstring>

#include "ops/attention/gpu/attention_kernel.cuh"

namespace myvision::gpu::attention {

inline constexpr int kMmaWarps = 4;
inline constexpr int kMmaThreads = 32 * kMmaWarps;
inline constexpr int kMmaWarpRows = 16;
inline constexpr int kMmaRows = kMmaWarps * kMmaWarpRows;
inline constexpr int kMmaWidth = 256;
inline constexpr int kMmaPack = 8;  // elements of a pack of 16 bytes, which is copied at once

// A tile has as many columns as registers allow, and 99 KB of shared memory, which the smallest of these GPUs have.
template <int kWidth>
inline constexpr int kForwardColumns = kWidth <= 64 ? 64 : 32;
template <int kWidth>
inline constexpr int kBackwardColumns = kWidth <= 64    ? 64
                                        : kWidth <= 128 ? 32
                                                        : 16;
// How much of a result's width is computed at a time; more would not fit into the registers.
template <int kWidth>
inline constexpr int kMmaChunk = kWidth <= 128 ? kWidth : 128;

// Elements of shared memory: those of the tiles of rows, which stay, and of two stages for the tiles of columns.
template <int kWidth>
inline constexpr int kForwardShared = (kMmaRows + 4 * kForwardColumns<kWidth>)*kWidth;
template <int kWidth>
inline constexpr int kBackwardShared = (2 * kMmaRows + 4 * kBackwardColumns<kWidth>)*kWidth;
// Bytes of shared memory that any_thread takes beside them.
inline constexpr int kMmaVariableBytes = kBlockSumBytes<kMmaThreads, float>;

// ---- tiles in shared memory -----------------------------------------------------------------------------------------

// Where a tile has an element. Packs are permuted within a row, so that those of eight rows are in different banks.
template <int kWidth, typename T>
__device__ __forceinline__ T* element(T* tile, int row, int column) {
  return tile + row * kWidth + (column ^ row % 8 * kMmaPack);
}

// Starts copies of rows to a tile, and fills it with zeros where the matrix ends.
template <int kWidth, int kRows, typename T>
__device__ __forceinline__ void copy_tile(T* tile, const Matrix<T>& matrix, int64_t first) {
#pragma unroll 2
  for (int i = threadIdx.x; i < kRows * kWidth / kMmaPack; i += kMmaThreads) {
    const int row = i / (kWidth / kMmaPack), column = i % (kWidth / kMmaPack) * kMmaPack;
    T* const to = element<kWidth>(tile, row, column);
    if (matrix.has(first + row, column)) {
      copy_async(to, matrix.at(first + row, column));
    } else {
      store_vector(to, Pack<T, kMmaPack>{});
    }
  }
}

__device__ __forceinline__ int mma_lane() { return threadIdx.x % 32; }
__device__ __forceinline__ int mma_warp_row() { return threadIdx.x / 32 * kMmaWarpRows; }
// The row and the column, among 16 x 8, of this lane's number e in a fragment.
__device__ __forceinline__ int mma_row(int e) { return mma_lane() / 4 + e / 2 * 8; }
__device__ __forceinline__ int mma_column(int e) { return mma_lane() % 4 * 2 + e % 2; }

// ---- products -------------------------------------------------------------------------------------------------------

template <int kColumns>
using Fragments = float[kColumns / 8][4];

// products[row][column] = the dot product of row `row` of the warp's 16 rows of a, and row `column` of b.
template <int kWidth, typename T, int kTiles>
__device__ __forceinline__ void multiply_tiles(float (&products)[kTiles][4], T* a, T* b, int width) {
  const int lane = mma_lane(), line = lane % 8, matrix = lane / 8;
  set_zero(products);
#pragma unroll 1  // unrolled it would need registers for more addresses
  for (int depth = 0; depth < width; depth += 16) {
    uint32_t of_a[4];
    ldmatrix<false>(of_a, element<kWidth>(a, mma_warp_row() + line + matrix % 2 * 8, depth + matrix / 2 * 8));
#pragma unroll
    for (int tile = 0; tile < kTiles; tile += 2) {
      uint32_t of_b[4];
      ldmatrix<false>(of_b, element<kWidth>(b, tile * 8 + line + matrix / 2 * 8, depth + matrix % 2 * 8));
      mma_m16n8k16<T>(products[tile], of_a, {of_b[0], of_b[1]});
      mma_m16n8k16<T>(products[tile + 1], of_a, {of_b[2], of_b[3]});
    }
  }
}

template <typename T>
struct HalfPair {
  T low, high;
};

template <typename T>
__device__ __forceinline__ uint32_t bits_of(const HalfPair<T>& pair) {
  uint32_t bits;
  std::memcpy(&bits, &pair, sizeof(bits));
  return bits;
}

template <typename T>
__device__ __forceinline__ uint32_t pair_of(float low, float high) {
  return bits_of(HalfPair<T>{from_real<T>(low), from_real<T>(high)});
}

// Changes both numbers of a register.
template <typename T, typename Change>
__device__ __forceinline__ uint32_t changed(uint32_t bits, Change change) {
  HalfPair<T> pair;
  std::memcpy(&pair, &bits, sizeof(bits));
  return pair_of<T>(change(to_real(pair.low)), change(to_real(pair.high)));
}

// sums += a * b, where unseen weights of a leave out numbers of b, whatever they are. One product takes the finite
// numbers of b, another counts its infinities that are seen, in units of kPositive and kNegative. A NaN counts as both
// infinities.
template <typename T>
__device__ __forceinline__ void careful_mma(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  constexpr int kPositive = 1, kNegative = 32;  // 16 numbers cannot add up to 32 by kPositive alone
  uint32_t seen[4], finite[2], others[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) seen[i] = changed<T>(a[i], [](float weight) { return is_unseen(weight) ? 0.0f : 1.0f; });
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    finite[i] = changed<T>(b[i], [](float number) { return std::isfinite(number) ? number : 0.0f; });
    others[i] = changed<T>(b[i], [](float number) {
      if (std::isfinite(number)) return 0.0f;
      return float(number > 0 ? kPositive : number < 0 ? kNegative : kPositive + kNegative);
    });
  }
  float counts[4] = {};
  mma_m16n8k16<T>(sums, a, finite);
  mma_m16n8k16<T>(counts, seen, others);
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int count = static_cast<int>(counts[e]);
    if (count % kNegative != 0) sums[e] -= kMinusInfinity<float>;
    if (count / kNegative != 0) sums[e] += kMinusInfinity<float>;
  }
}

// results[row][column] += sum over i of weights[row][i] * b[i][first + column], where b is a tile.
template <int kWidth, typename T, int kTiles, int kResults>
__device__ __forceinline__ void add_weighted_tiles(float (&results)[kResults][4], const float (&weights)[kTiles][4],
                                                   T* b, int first, int width, bool careful) {
  const int lane = mma_lane(), line = lane % 8, matrix = lane / 8;
#pragma unroll
  for (int tile = 0; tile < kTiles; tile += 2) {
    const uint32_t a[4] = {
        pair_of<T>(weights[tile][0], weights[tile][1]), pair_of<T>(weights[tile][2], weights[tile][3]),
        pair_of<T>(weights[tile + 1][0], weights[tile + 1][1]), pair_of<T>(weights[tile + 1][2], weights[tile + 1][3])};
#pragma unroll
    for (int n = 0; n < kResults; n += 2) {
      if (first + n * 8 >= width) break;
      uint32_t of_b[4];
      ldmatrix<true>(of_b, element<kWidth>(b, tile * 8 + line + matrix % 2 * 8, first + n * 8 + matrix / 2 * 8));
      if (careful) {
        careful_mma<T>(results[n], a, {of_b[0], of_b[1]});
        careful_mma<T>(results[n + 1], a, {of_b[2], of_b[3]});
      } else {
        mma_m16n8k16<T>(results[n], a, {of_b[0], of_b[1]});
        mma_m16n8k16<T>(results[n + 1], a, {of_b[2], of_b[3]});
      }
    }
  }
}

// Calls compute(tile, stage) for the tiles of a range. load(tile, stage) starts the copy of a tile to one of two
// stages, while the tile before is computed.
template <int kColumns, typename Load, typename Compute>
__device__ __forceinline__ void pipeline(const KeyRange& range, Load load, Compute compute) {
  int stage = 0;
  if (range.first < range.last) load(range.first, stage);
  commit_copies();
  for (int64_t tile = range.first; tile < range.last; tile += kColumns, stage ^= 1) {
    if (tile + kColumns < range.last) load(tile + kColumns, stage ^ 1);
    commit_copies();
    wait_for_copies<1>();
    __syncthreads();
    compute(tile, stage);
    __syncthreads();  // before the next load overwrites the stage
  }
}

// ---- forward --------------------------------------------------------------------------------------------------------

// Combines the values of the four lanes that share a row.
template <typename Combine>
__device__ __forceinline__ float combine_quad(float value, Combine combine) {
  value = combine(value, shuffle_xor(value, 1));
  return combine(value, shuffle_xor(value, 2));
}

// The running softmax of a lane's two rows, of which it sums its own columns.
template <typename T, int kChunk>
struct MmaSoftmax {
  float highest[2], sum[2];
  Fragments<kChunk> output;

  __device__ __forceinline__ void clear() {
    set_zero(output);
    highest[0] = highest[1] = kMinusInfinity<float>;
    sum[0] = sum[1] = 0;
  }

  // Turns the products of the block's queries, from i on, and keys, from j on, into weights.
  template <int kTiles>
  __device__ __forceinline__ void add_scores(float (&products)[kTiles][4], const Head<T>& head, int64_t i, int64_t j) {
    const Scores<T> scores(head);
    const bool plain = scores.are_plain(i, i + kMmaRows, j, j + kTiles * 8);
    i += mma_warp_row();
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& number = products[tile][e];
        number =
            plain ? scores.plain(number).value : scores(number, i + mma_row(e), j + tile * 8 + mma_column(e)).value;
      }
    }
    exponentiate<0>(products);
    exponentiate<1>(products);
    drop(products, head, i, j);
  }

  // Finishes the output of row r, and returns its sums, once all keys were added.
  template <int r>
  __device__ __forceinline__ RowSums<float> finish() {
    const float total = combine_quad(sum[r], [](float a, float b) { return a + b; });
#pragma unroll
    for (auto& tile : output) {
#pragma unroll
      for (int e = 2 * r; e < 2 * r + 2; ++e) tile[e] = total == 0 ? 0 : tile[e] / total;
    }
    return {highest[r], total};
  }

 private:
  // Turns the scores of row r into weights, e^(score - the highest so far).
  template <int r, int kTiles>
  __device__ __forceinline__ void exponentiate(float (&scores)[kTiles][4]) {
    float most = highest[r];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int e = 2 * r; e < 2 * r + 2; ++e) {
        if (scores[tile][e] > most) most = scores[tile][e];
      }
    }
    most = combine_quad(most, [](float a, float b) { return b > a ? b : a; });
    const float factor = most > highest[r] ? std::exp(highest[r] - most) : 1;
    highest[r] = most;
    sum[r] *= factor;
#pragma unroll
    for (auto& tile : output) tile[2 * r] *= factor, tile[2 * r + 1] *= factor;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int e = 2 * r; e < 2 * r + 2; ++e) {
        float& number = scores[tile][e];
        number = number != kMinusInfinity<float> ? std::exp(number - most) : kUnseen<float>;
        sum[r] += number;
      }
    }
  }

  template <int kTiles>
  __device__ __forceinline__ void drop(float (&weights)[kTiles][4], const Head<T>& head, int64_t i, int64_t j) const {
    const Dropout<T> dropout(head);
    if (!dropout.is_on()) return;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        const int64_t column = j + tile * 8 + mma_column(e);
        const PhiloxWords words = dropout.words(i + mma_row(e), column / 4);
        weights[tile][e] *= dropout.factor(word_of(words, column));
        weights[tile][e + 1] *= dropout.factor(word_of(words, column + 1));
      }
    }
  }
};

// Calls set(row, column, number) for a lane's results, whose columns begin at `first`.
template <int kTiles, typename Set>
__device__ __forceinline__ void visit_fragments(const float (&results)[kTiles][4], int first, Set set) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      set(mma_warp_row() + mma_row(e), first + tile * 8 + mma_column(e), results[tile][e]);
    }
  }
}

template <typename T, int kWidth>
__global__ void MYVISION_LAUNCH_BOUNDS(kMmaThreads, 1)
    attention_forward_mma(const AttentionParams params, const Partials<float> partials, const Cut cut) {
  if constexpr (kHasMma) {
    constexpr int kColumns = kForwardColumns<kWidth>, kTile = kColumns * kWidth;
    constexpr int kChunk = kMmaChunk<kWidth>;
    MYVISION_DYNAMIC_SHARED(T, queries, kMmaVariableBytes);
    T* const stages = queries + kMmaRows * kWidth;  // each has a tile of keys, then one of values
    const int width = static_cast<int>(params.width), value_width = static_cast<int>(params.value_width);
    const int64_t count = cut.count();
    for (int64_t index = blockIdx.x; index < count; index += gridDim.x) {
      const Piece piece = piece_of(cut, index);
      const Head<T> head(params, piece.tile.b, piece.head);
      const auto key = head.of_keys(params.key, width), value = head.of_keys(params.value, value_width);
      const int64_t first = piece.tile.first;
      const int chunk = static_cast<int>(piece.chunk) * kChunk;
      const KeyRange range =
          split_of(keys_of_tile(params, head.sequence, first, kMmaRows), kColumns, piece.split, cut.splits);
      MmaSoftmax<T, kChunk> softmax;
      with_care<kMmaThreads>([&](bool careful) {
        softmax.clear();
        if (range.first < range.last) copy_tile<kWidth, kMmaRows>(queries, head.of_queries(params.query, width), first);
        pipeline<kColumns>(
            range,
            [&](int64_t tile, int stage) {
              copy_tile<kWidth, kColumns>(stages + stage * 2 * kTile, key, tile);
              copy_tile<kWidth, kColumns>(stages + stage * 2 * kTile + kTile, value, tile);
            },
            [&](int64_t tile, int stage) {
              T* const keys = stages + stage * 2 * kTile;
              Fragments<kColumns> products;
              multiply_tiles<kWidth>(products, queries, keys, width);
              softmax.add_scores(products, head, first, tile);
              add_weighted_tiles<kWidth>(softmax.output, products, keys + kTile, chunk, value_width, careful);
            });
        return all_finite(softmax.output);
      });
      const ForwardTarget<T> target(head, partials, piece.split);
      const RowSums<float> sums[2] = {softmax.template finish<0>(), softmax.template finish<1>()};
      if (piece.chunk == 0 && mma_lane() % 4 == 0) {
        target.set_sums(first + mma_warp_row() + mma_row(0), sums[0]);
        target.set_sums(first + mma_warp_row() + mma_row(2), sums[1]);
      }
      visit_fragments(softmax.output, chunk,
                      [&](int row, int column, float number) { target.set(first + row, column, number); });
    }
  }
}

// ---- backward -------------------------------------------------------------------------------------------------------

// Calls visit(tile, e, gradient) for each of a lane's products. of_dropped are the gradients of the probabilities after
// dropout. The block's rows begin at `row` and its columns at `column`. Where kOfKeys rows are keys and columns are
// queries, else the other way round.
template <typename T, bool kOfKeys, int kTiles, typename Visit>
__device__ __forceinline__ void visit_fragment_gradients(const float (&products)[kTiles][4],
                                                         const float (&of_dropped)[kTiles][4], const Head<T>& head,
                                                         const RowStatistics<float>* statistics, int64_t row,
                                                         int64_t column, Visit visit) {
  const Scores<T> scores(head);
  const Dropout<T> dropout(head);
  const int64_t last_row = row + kMmaRows, last_column = column + kTiles * 8;
  const bool plain = kOfKeys ? scores.are_plain(column, last_column, row, last_row)
                             : scores.are_plain(row, last_row, column, last_column);
  row += mma_warp_row();
  const auto statistics_of = [&](int64_t i) {
    return i < head.sequence.queries ? statistics[head.row(i)] : no_row<float>();
  };
  RowStatistics<float> of_lines[2];  // those of the lane's two queries, in rows or in columns of a fragment
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    PhiloxWords words{};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int64_t r = row + mma_row(e), c = column + tile * 8 + mma_column(e);
      const int64_t i = kOfKeys ? c : r, j = kOfKeys ? r : c;
      const int line = kOfKeys ? e % 2 : e / 2;
      if (kOfKeys ? e < 2 : tile == 0 && e % 2 == 0) of_lines[line] = statistics_of(i);
      if (kOfKeys || e % 2 == 0) words = dropout.words(i, j / 4);
      const Score<float> score = plain ? scores.plain(products[tile][e]) : scores(products[tile][e], i, j);
      visit(tile, e, gradient_of(score, of_lines[line], dropout.factor(word_of(words, j)), of_dropped[tile][e]));
    }
  }
}

// Computes the gradient of query or, where kOfKeys, those of key and value.
template <typename T, int kWidth, bool kOfKeys>
__global__ void MYVISION_LAUNCH_BOUNDS(kMmaThreads, 1)
    attention_backward_mma(const AttentionParams params, const AttentionGradients gradients,
                           const RowStatistics<float>* statistics, const Cut cut) {
  if constexpr (kHasMma) {
    constexpr int kColumns = kBackwardColumns<kWidth>, kTile = kColumns * kWidth;
    constexpr int kChunk = kMmaChunk<kWidth>;
    MYVISION_DYNAMIC_SHARED(T, rows, kMmaVariableBytes);  // rows of query, or of key where kOfKeys
    T* const value_rows = rows + kMmaRows * kWidth;       // rows of grad_output, or of value where kOfKeys
    T* const stages = value_rows + kMmaRows * kWidth;     // each has a tile of key and value, or query and grad_output
    const int width = static_cast<int>(params.width), value_width = static_cast<int>(params.value_width);
    const int64_t count = cut.count(), sharing = kOfKeys ? divide(params.heads, params.key_heads) : 1;
    for (int64_t index = blockIdx.x; index < count; index += gridDim.x) {
      const Piece piece = piece_of(cut, index);
      const int64_t first = piece.tile.first;
      const int chunk = static_cast<int>(piece.chunk) * kChunk;
      Fragments<kChunk> of_product_side, of_value_side;  // the gradients of query or key, and of value
      with_care<kMmaThreads>([&](bool careful) {
        set_zero(of_product_side), set_zero(of_value_side);
        for (int64_t member = 0; member < sharing; ++member) {
          const Head<T> head(params, piece.tile.b, piece.head * sharing + member);
          const auto query = head.of_queries(params.query, width), key = head.of_keys(params.key, width);
          const auto gradient = head.of_queries(gradients.output, value_width);
          const auto value = head.of_keys(params.value, value_width);
          KeyRange range = kOfKeys ? queries_of_tile(params, head.sequence, first, kMmaRows)
                                   : keys_of_tile(params, head.sequence, first, kMmaRows);
          range.first = range.first / kColumns * kColumns;
          if (range.first < range.last && member == 0) {
            copy_tile<kWidth, kMmaRows>(rows, kOfKeys ? key : query, first);
            copy_tile<kWidth, kMmaRows>(value_rows, kOfKeys ? value : gradient, first);
          }
          pipeline<kColumns>(
              range,
              [&](int64_t tile, int stage) {
                copy_tile<kWidth, kColumns>(stages + stage * 2 * kTile, kOfKeys ? query : key, tile);
                copy_tile<kWidth, kColumns>(stages + stage * 2 * kTile + kTile, kOfKeys ? gradient : value, tile);
              },
              [&](int64_t tile, int stage) {
                T* const columns = stages + stage * 2 * kTile;
                Fragments<kColumns> products, of_dropped;
                multiply_tiles<kWidth>(products, rows, columns, width);
                multiply_tiles<kWidth>(of_dropped, value_rows, columns + kTile, value_width);
                visit_fragment_gradients<T, kOfKeys>(products, of_dropped, head, statistics, first, tile,
                                                     [&](int number, int e, const Gradient<float>& gradient) {
                                                       products[number][e] = gradient.of_product,
                                                       of_dropped[number][e] = gradient.dropped;
                                                     });
                add_weighted_tiles<kWidth>(of_product_side, products, columns, chunk, width, careful);
                if constexpr (kOfKeys) {
                  add_weighted_tiles<kWidth>(of_value_side, of_dropped, columns + kTile, chunk, value_width, careful);
                }
              });
        }
        return all_finite(of_product_side) && all_finite(of_value_side);
      });
      const Head<T> head(params, piece.tile.b, piece.head * sharing);
      const auto store = [&](const Matrix<T>& matrix, bool wanted, const auto& results) {
        if (!wanted) return;
        visit_fragments(results, chunk,
                        [&](int row, int column, float number) { matrix.set(first + row, column, number); });
      };
      if constexpr (kOfKeys) {
        store(head.of_keys(gradients.key, width), gradients.key.data, of_product_side);
        store(head.of_keys(gradients.value, value_width), gradients.value.data, of_value_side);
      } else {
        store(head.of_queries(gradients.query, width), gradients.query.data, of_product_side);
      }
    }
  }
}

template <int kWidth>
using MmaMaskCut = MaskCut<kMmaRows, kBackwardColumns<kWidth>>;

template <typename T, int kWidth>
__global__ void MYVISION_LAUNCH_BOUNDS(kMmaThreads, 1)
    attention_backward_mask_mma(const AttentionParams params, const AttentionGradients gradients,
                                const RowStatistics<float>* statistics, const MaskTarget target,
                                const MmaMaskCut<kWidth> cut) {
  if constexpr (kHasMma) {
    constexpr int kColumns = kBackwardColumns<kWidth>, kTile = kColumns * kWidth, kPitch = kMmaRows + 1;
    static_assert(kColumns * kPitch * sizeof(float) <= kBackwardShared<kWidth> * sizeof(T));
    MYVISION_DYNAMIC_SHARED(T, queries, 0);
    T *const of_outputs = queries + kMmaRows * kWidth, *const keys = of_outputs + kMmaRows * kWidth;
    T* const values = keys + kTile;
    const int width = static_cast<int>(params.width), value_width = static_cast<int>(params.value_width);
    const int64_t count = cut.count();
    for (int64_t index = blockIdx.x; index < count; index += gridDim.x) {
      const MaskPiece piece = cut.piece(index);
      Fragments<kColumns> sums;
      set_zero(sums);
      cut.template visit<T>(
          params, piece,
          [&](const Head<T>& head, int64_t i) {
            __syncthreads();  // before the tile of queries is overwritten
            copy_tile<kWidth, kMmaRows>(queries, head.of_queries(params.query, width), i);
            copy_tile<kWidth, kMmaRows>(of_outputs, head.of_queries(gradients.output, value_width), i);
          },
          [&](const Head<T>& head, int64_t i, int64_t j) {
            __syncthreads();
            copy_tile<kWidth, kColumns>(keys, head.of_keys(params.key, width), j);
            copy_tile<kWidth, kColumns>(values, head.of_keys(params.value, value_width), j);
            commit_copies();
            wait_for_copies<0>();
            __syncthreads();
            Fragments<kColumns> products, of_dropped;
            multiply_tiles<kWidth>(products, queries, keys, width);
            multiply_tiles<kWidth>(of_dropped, of_outputs, values, value_width);
            visit_fragment_gradients<T, false>(
                products, of_dropped, head, statistics, i, j,
                [&](int tile, int e, const Gradient<float>& gradient) { sums[tile][e] += gradient.of_score; });
          });
      float* const staged = reinterpret_cast<float*>(queries);
      commit_copies();
      wait_for_copies<0>();  // copies of queries that no tile of keys has waited for
      __syncthreads();
      visit_fragments(sums, 0, [&](int row, int column, float number) { staged[column * kPitch + row] = number; });
      __syncthreads();
      store_mask_gradient<T, kMmaThreads, kMmaRows, kColumns>(params, target, piece, staged, kPitch);
    }
  }
}

}  // namespace myvision::gpu::attention
