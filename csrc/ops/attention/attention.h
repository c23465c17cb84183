// attention: the plain parameters that the kernels of the CPU and the GPU take. attention.cpp has checked them.
//
//   score[i][j] = cap(query[i] . key[j] * scale) - slope * |j - i - shift| + mask[i][j]
//   cap(x)      = softcap * tanh(x / softcap)
//   output[i]   = sum over j of dropout(softmax(score[i]))[j] * value[j]
//   lse[i]      = log(sum over j of exp(score[i][j])); -inf where i sees no key
//
// Backward makes probabilities again, as exp(score - peak - log_total) of two statistics of each row: the largest
// score, and the log of the sum over j of exp(score - peak). In lse, their sum, the smaller one would be lost beside
// the other. Scores stand under an exponential, so both passes compute them by the same arithmetic in the same order.
//
// Query i sees key j where -window_left <= j - i - shift <= window_right and the mask is neither false nor -inf; other
// keys are as if they were not there, whatever they and their values hold. Without a key to see, output[i] is 0. Where
// bottom_right, shift is the number of keys less that of queries, else 0. Real is double where dtype is Float64 and
// float otherwise.
#pragma once
#include <cstdint>

#include "common/dtype.h"
#include "common/host_device.h"
#include "common/kernel.h"
#include "common/strided.h"

namespace myvision {

enum class AttentionMask : int8_t { None, Boolean, Additive };

inline constexpr int64_t kUnlimitedWindow = INT64_MAX / 4;  // adding lengths to it does not overflow

struct AttentionParams {
  Dtype dtype;  // of query, key, value, output and their gradients: Float64, Float32, Float16 or BFloat16
  int64_t batch;
  int64_t heads, key_heads;     // heads is a multiple of key_heads: head h reads key head h / (heads / key_heads)
  int64_t queries, keys;        // lengths; where packed, those of all sequences together
  int64_t width, value_width;   // sizes of a head's queries and keys, and of its values
  Strided4 query, key, value;   // [batch, heads or key heads, queries or keys, width or value width]
  Strided4 output;              // like query, value_width wide. Where packed, the stride of batch is 0 in all four
  const int64_t* query_starts;  // [batch + 1] on the device where packed, else null; sequence_of reads them: sequence b
  const int64_t* key_starts;    // has the rows [starts[b], starts[b + 1])
  Strided4 mask;                // [batch, heads, queries, keys], stride 0 where it is broadcast; not where packed
  AttentionMask mask_kind;      // Boolean: one byte, true is seen. Additive: of mask_dtype
  Dtype mask_dtype;             // `dtype` or Float32
  const float* alibi_slopes;    // slope of head h of sequence b at [b * alibi_batch_stride + h], or null: 0
  int64_t alibi_batch_stride;   // `heads`, or 0 where all sequences have the same slopes
  bool bottom_right;
  int64_t window_left, window_right;  // kUnlimitedWindow where there is no limit; causal: window_right is 0
  double scale;
  double softcap;       // 0 where scores are not capped
  double dropout_p;     // probabilities that are kept are scaled by 1 / (1 - dropout_p); 1 drops all
  const int64_t* seed;  // of dropout, on the device; null where dropout_p is 0
  void* lse;            // Real at [row_of(...)]: what forward returns, or null
  void* statistics;     // Real at [row_of(...)][2], peak and log_total, both -inf where the row sees no key; null where
                        // forward need not write them. Backward reads them, and the output
};

// A gradient that is not wanted has null data.
struct AttentionGradients {
  Strided4 output;  // the gradient of the output, which is given
  const void* lse;  // that of lse, which is given too; null where it is 0
  Strided4 query, key, value;
  Strided4 mask;  // of mask_dtype; stride 0 where the mask is broadcast: its elements sum up those that share them
};

// Where a sequence lies. Offsets that leave the tensors are cut, since those on a GPU cannot be checked beforehand.
struct AttentionSequence {
  int64_t first_query, queries, first_key, keys;

  MYVISION_HOST_DEVICE int64_t shift(const AttentionParams& p) const { return p.bottom_right ? keys - queries : 0; }
};

MYVISION_KERNEL_WITH_WORKSPACE(attention, forward, AttentionParams)
MYVISION_KERNEL_WITH_WORKSPACE(attention, backward, AttentionParams, AttentionGradients)

namespace detail {
MYVISION_HOST_DEVICE int64_t between(int64_t least, int64_t value, int64_t most) {
  return value < least ? least : value > most ? most : value;
}
}  // namespace detail

MYVISION_HOST_DEVICE AttentionSequence sequence_of(const AttentionParams& p, int64_t b) {
  if (p.query_starts == nullptr) return {0, p.queries, 0, p.keys};
  const int64_t q = detail::between(0, p.query_starts[b], p.queries), k = detail::between(0, p.key_starts[b], p.keys);
  return {q, detail::between(q, p.query_starts[b + 1], p.queries) - q, k,
          detail::between(k, p.key_starts[b + 1], p.keys) - k};
}

// The number of query i of a head of sequence b among all rows of probabilities: lse is [batch, heads, queries], or
// [heads, queries] where packed.
MYVISION_HOST_DEVICE int64_t row_of(const AttentionParams& p, const AttentionSequence& sequence, int64_t b,
                                    int64_t head, int64_t i) {
  return ((p.query_starts == nullptr ? b * p.heads : 0) + head) * p.queries + sequence.first_query + i;
}

// Dropout keeps the probability of key j (counted within its sequence) in a row where word j % 4 of
// philox(seed, dropout_counter(p, row) + j / 4) is not below dropout_threshold(dropout_p).
MYVISION_HOST_DEVICE uint64_t dropout_counter(const AttentionParams& p, int64_t row) {
  return static_cast<uint64_t>(row) * static_cast<uint64_t>((p.keys + 3) / 4);
}

// Whether the launcher of backward takes this grad_output. Where forward ran on tensor cores backward does too, and
// wants rows of 16-byte packs; attention.cpp copies other gradients.
bool attention_backward_cuda_takes(const AttentionParams& params, const Strided4& grad_output);

}  // namespace myvision
