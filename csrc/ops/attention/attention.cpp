// attention for torch: schemas, checks, allocation, registration. The kernels see only AttentionParams.
#include "ops/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "common/checks.h"

namespace myvision {
namespace {

using OptionalTensor = std::optional<Tensor>;

constexpr const char* kOp = "attention";

// The tensors and the options of every operator here, as the boxed functions at the end get them.
struct Call {
  Tensor query, key, value;
  OptionalTensor mask, alibi_slopes, query_starts, key_starts, seed;
  AttentionParams params;

  bool is_packed() const { return query_starts.has_value(); }
  bool has_pairs() const { return params.batch * params.heads * params.queries * params.keys > 0; }
};

// ------------------------------------------------------------------------------------------------ checks
// myvision/ops/attention.py makes the same checks in the same order for the fakes.

// The size of query, key or value in dimension `dim` of [batch, heads, length, width], which packed ones have as well.
int64_t size_at(const Tensor& tensor, int dim) {
  static constexpr int kPackedDim[] = {-1, 1, 0, 2};
  return tensor.size(tensor.dim() == 4 ? dim : kPackedDim[dim]);
}

void check_shapes(const Call& call) {
  const Tensor &query = call.query, &key = call.key, &value = call.value;
  const char* wanted =
      call.is_packed() ? "3 dimensions, [rows, heads, width]" : "4 dimensions, [batch, heads, length, width]";
  for (const auto& [name, tensor] : {std::pair("query", &query), {"key", &key}, {"value", &value}}) {
    MYVISION_CHECK(kOp, tensor->dim() == (call.is_packed() ? 3 : 4), name, " must have ", wanted, ", but has shape ",
                   shape_name(tensor->sizes()));
  }
  const auto shapes = [&] { return concatenate(shape_name(query.sizes()), ", key ", shape_name(key.sizes())); };
  const auto key_shapes = [&] { return concatenate(shape_name(key.sizes()), ", value ", shape_name(value.sizes())); };
  if (!call.is_packed()) {
    MYVISION_CHECK(kOp, query.size(0) == key.size(0),
                   "query and key must have the same batch size, but query has shape ", shapes());
    MYVISION_CHECK(kOp, key.size(0) == value.size(0), "key and value must have the same batch size, but key has shape ",
                   key_shapes());
  }
  MYVISION_CHECK(kOp, size_at(query, 3) == size_at(key, 3),
                 "query and key must have the same width, but query has shape ", shapes());
  MYVISION_CHECK(kOp, size_at(key, 2) == size_at(value, 2),
                 "key and value must have the same length, but key has shape ", key_shapes());
  MYVISION_CHECK(kOp, size_at(key, 1) == size_at(value, 1),
                 "key and value must have the same number of heads, but key has shape ", key_shapes());
  const int64_t heads = size_at(query, 1), key_heads = size_at(key, 1);
  MYVISION_CHECK(kOp, key_heads == 0 ? heads == 0 : heads % key_heads == 0,
                 "the heads of query must be a multiple of those of key, but query has shape ", shapes());
}

void check_mask(const Call& call) {
  if (!call.mask) return;
  const Tensor& mask = *call.mask;
  MYVISION_CHECK(kOp, !call.is_packed(), "attn_mask and cu_seqlens_q exclude each other");
  const ScalarType type = mask.scalar_type(), query_type = call.query.scalar_type();
  MYVISION_CHECK(kOp, type == ScalarType::Bool || type == query_type || type == ScalarType::Float,
                 "attn_mask must have dtype bool, float32 or that of query, ", name_of(query_type), ", but has ",
                 name_of(type));
  check_same_device(kOp, {"attn_mask", mask}, {"query", call.query});
  const int64_t dims = mask.dim();
  const int64_t wanted[] = {call.query.size(0), call.query.size(1), call.query.size(2), call.key.size(2)};
  bool fits = dims <= 4;
  for (int dim = 0; fits && dim < dims; ++dim) {
    const int64_t size = mask.size(dims - 1 - dim);
    fits = size == 1 || size == wanted[3 - dim];
  }
  MYVISION_CHECK(kOp, fits, "attn_mask must have at most 4 dimensions that broadcast to ",
                 shape_name(IntArray(wanted, 4)), ", but has shape ", shape_name(mask.sizes()));
}

void check_slopes(const Call& call) {
  if (!call.alibi_slopes) return;
  const Tensor& slopes = *call.alibi_slopes;
  MYVISION_CHECK(kOp, slopes.scalar_type() == ScalarType::Float, "alibi_slopes must have dtype float32, but has ",
                 name_of(slopes.scalar_type()));
  check_same_device(kOp, {"alibi_slopes", slopes}, {"query", call.query});
  const int64_t dims = slopes.dim();
  MYVISION_CHECK(
      kOp,
      (dims == 1 || (dims == 2 && slopes.size(0) == call.params.batch)) && slopes.size(dims - 1) == call.params.heads,
      "alibi_slopes must have one number for each of the ", call.params.heads,
      " heads, or [batch, heads], but has shape ", shape_name(slopes.sizes()));
}

void check_starts(const char* name, const OptionalTensor& starts, const Tensor& query) {
  MYVISION_CHECK(kOp, starts, "cu_seqlens_q and cu_seqlens_k must both be given, but ", name, " is None");
  MYVISION_CHECK(kOp, starts->scalar_type() == ScalarType::Int || starts->scalar_type() == ScalarType::Long, name,
                 " must have dtype int32 or int64, but has ", name_of(starts->scalar_type()));
  MYVISION_CHECK(kOp, starts->dim() == 1 && starts->size(0) >= 1, name,
                 " must have one dimension, of one more than there are sequences, but has shape ",
                 shape_name(starts->sizes()));
  check_same_device(kOp, {name, *starts}, {"query", query});
}

// Only offsets on the CPU can be read without waiting for a device; a GPU's kernels cut those that leave the tensors.
void check_offsets(const char* name, const Tensor& starts, int64_t rows) {
  if (!starts.is_cpu()) return;
  const auto* offset = static_cast<const int64_t*>(starts.const_data_ptr());
  const int64_t count = starts.size(0);
  MYVISION_CHECK(kOp, offset[0] == 0 && offset[count - 1] == rows && std::is_sorted(offset, offset + count), name,
                 " must start with 0, never fall, and end with the number of rows, ", rows, ", but runs from ",
                 offset[0], " to ", offset[count - 1],
                 std::is_sorted(offset, offset + count) ? "" : " and falls between");
}

int64_t checked_window(const char* name, const std::optional<int64_t>& window) {
  if (!window) return kUnlimitedWindow;
  MYVISION_CHECK(kOp, *window >= 0, name, " must be at least 0, or None for no limit, but is ", *window);
  return std::min(*window, kUnlimitedWindow);
}

// ------------------------------------------------------------------------------------------------ parameters
// The kernels see every tensor as [batch, heads, length, width], packed ones too.
Strided4 view_of(const Tensor& tensor) {
  void* data = const_cast<void*>(tensor.const_data_ptr());
  if (tensor.dim() == 3) return {data, {0, tensor.stride(1), tensor.stride(0), tensor.stride(2)}};
  return {data, {tensor.stride(0), tensor.stride(1), tensor.stride(2), tensor.stride(3)}};
}

// The mask as [batch, heads, queries, keys]: stride 0 where it is broadcast.
Strided4 mask_view_of(const Tensor& mask) {
  Strided4 view{const_cast<void*>(mask.const_data_ptr()), {}};
  const int first = 4 - static_cast<int>(mask.dim());
  for (int dim = first; dim < 4; ++dim) view.stride[dim] = mask.size(dim - first) == 1 ? 0 : mask.stride(dim - first);
  return view;
}

void* data_of(const Tensor& tensor) { return tensor.defined() ? const_cast<void*>(tensor.const_data_ptr()) : nullptr; }

Tensor offsets_of(const Tensor& starts) { return torch::stable::contiguous(cast(starts, ScalarType::Long)); }

#define ATTENTION_TENSORS                                                                                       \
  const Tensor &query, const Tensor &key, const Tensor &value, const OptionalTensor &mask,                      \
      const OptionalTensor &alibi_slopes, const OptionalTensor &query_starts, const OptionalTensor &key_starts, \
      const OptionalTensor &seed
#define ATTENTION_OPTIONS                                                                             \
  double dropout_p, bool is_causal, std::string causal_alignment, std::optional<int64_t> window_left, \
      std::optional<int64_t> window_right, std::optional<double> scale, double softcap
#define ATTENTION_ARGUMENTS                                                                                      \
  query, key, value, mask, alibi_slopes, query_starts, key_starts, seed, dropout_p, is_causal, causal_alignment, \
      window_left, window_right, scale, softcap

void set_options(AttentionParams& p, ATTENTION_OPTIONS) {
  check_probability(kOp, dropout_p);
  MYVISION_CHECK(kOp, causal_alignment == "top_left" || causal_alignment == "bottom_right",
                 "causal_alignment must be 'top_left' or 'bottom_right', but is '", causal_alignment, "'");
  MYVISION_CHECK(kOp, softcap >= 0, "softcap must be at least 0, but is ", softcap);
  p.dropout_p = dropout_p;
  p.bottom_right = causal_alignment == "bottom_right";
  p.window_left = checked_window("window_left", window_left);
  p.window_right = checked_window("window_right", window_right);
  if (is_causal) p.window_right = 0;
  p.scale = scale ? *scale : p.width > 0 ? 1 / std::sqrt(static_cast<double>(p.width)) : 0;
  p.softcap = softcap;
}

Call checked_call(ATTENTION_TENSORS, ATTENTION_OPTIONS) {
  Call call{query, key, value, mask, alibi_slopes, query_starts, key_starts, seed, {}};
  AttentionParams& p = call.params;
  p.dtype = check_floating(kOp, {"query", query});
  check_like(kOp, {"key", key}, {"query", query});
  check_like(kOp, {"value", value}, {"query", query});
  if (query_starts || key_starts) {
    check_starts("cu_seqlens_q", query_starts, query);
    check_starts("cu_seqlens_k", key_starts, query);
    MYVISION_CHECK(kOp, query_starts->size(0) == key_starts->size(0),
                   "cu_seqlens_q and cu_seqlens_k must have the same length, but have ", query_starts->size(0), " and ",
                   key_starts->size(0));
  }
  check_shapes(call);
  p.batch = call.is_packed() ? query_starts->size(0) - 1 : query.size(0);
  p.heads = size_at(query, 1), p.key_heads = size_at(key, 1);
  p.queries = size_at(query, 2), p.keys = size_at(key, 2);
  p.width = size_at(query, 3), p.value_width = size_at(value, 3);
  check_mask(call);
  check_slopes(call);
  set_options(p, dropout_p, is_causal, causal_alignment, window_left, window_right, scale, softcap);
  check_seed(kOp, dropout_p, seed, {"query", query});
  return call;
}

// Makes the kernels' parameters of the tensors; the call owns those that are converted for it.
void set_views(Call& call, const Tensor& output, const Tensor& lse, const Tensor& statistics) {
  AttentionParams& p = call.params;
  p.query = view_of(call.query), p.key = view_of(call.key), p.value = view_of(call.value);
  p.output = view_of(output);
  p.lse = data_of(lse);
  p.statistics = data_of(statistics);
  if (call.is_packed()) {
    call.query_starts = offsets_of(*call.query_starts), call.key_starts = offsets_of(*call.key_starts);
    check_offsets("cu_seqlens_q", *call.query_starts, p.queries);
    check_offsets("cu_seqlens_k", *call.key_starts, p.keys);
    p.query_starts = static_cast<const int64_t*>(call.query_starts->const_data_ptr());
    p.key_starts = static_cast<const int64_t*>(call.key_starts->const_data_ptr());
  }
  if (call.mask) {
    p.mask = mask_view_of(*call.mask);
    const std::optional<Dtype> dtype = to_dtype(call.mask->scalar_type());
    p.mask_kind = dtype ? AttentionMask::Additive : AttentionMask::Boolean;
    p.mask_dtype = dtype.value_or(Dtype::UInt8);
  }
  if (call.alibi_slopes) {
    call.alibi_slopes = torch::stable::contiguous(*call.alibi_slopes);
    p.alibi_slopes = static_cast<const float*>(call.alibi_slopes->const_data_ptr());
    p.alibi_batch_stride = call.alibi_slopes->dim() == 2 ? p.heads : 0;
  }
  if (p.dropout_p > 0) p.seed = static_cast<const int64_t*>(call.seed->const_data_ptr());
}

// ------------------------------------------------------------------------------------------------ allocation
// A tensor of the sizes of `like` but for its width. Its heads lie inside of its lengths where they do in `like`.
Tensor new_rows(const Tensor& like, int64_t width) {
  const bool batched = like.dim() == 4, heads_inside = batched && like.stride(1) < like.stride(2);
  const int order[] = {0, heads_inside ? 2 : 1, heads_inside ? 1 : 2, 3};  // outermost first
  int64_t sizes[4], strides[4], stride = 1;
  for (int i = static_cast<int>(like.dim()) - 1; i >= 0; --i) {
    const int dim = order[i];
    sizes[dim] = i == like.dim() - 1 ? width : like.size(dim);
    strides[dim] = stride;
    stride *= std::max<int64_t>(sizes[dim], 1);
  }
  return empty_strided(like.dim(), sizes, strides, like.scalar_type(), like);
}

// A tensor with numbers, shaped `of_a_row`, for each query of each head.
Tensor new_numbers(const Call& call, IntArray of_a_row) {
  const AttentionParams& p = call.params;
  std::vector<int64_t> sizes{p.heads, p.queries};
  if (!call.is_packed()) sizes.insert(sizes.begin(), p.batch);
  sizes.insert(sizes.end(), of_a_row.begin(), of_a_row.end());
  return torch::stable::new_empty(call.query, sizes, real_type(call.query));
}
Tensor new_lse(const Call& call) { return new_numbers(call, {}); }
Tensor new_statistics(const Call& call) { return new_numbers(call, {2}); }

// What forward returns; lse and statistics are undefined where they are not wanted.
struct Results {
  Tensor output, lse, statistics;
};

// Whether kernels may leave rows unwritten: where there are no pairs of query and key, and on a GPU, whose offsets are
// not checked, where rows lie outside of all sequences.
bool may_skip_rows(const Call& call) { return !call.has_pairs() || (call.is_packed() && !call.query.is_cpu()); }

// Sets all rows to what those that see no key hold.
void set_unseen(Results& results) {
  torch::stable::zero_(results.output);
  for (Tensor* tensor : {&results.lse, &results.statistics}) {
    if (tensor->defined()) torch::stable::fill_(*tensor, -std::numeric_limits<double>::infinity());
  }
}

// ------------------------------------------------------------------------------------------------ launch
void run_forward(const Call& call) { launch(kOp, call.query, attention_forward_kernel, call.params); }

void run_backward(const Call& call, const AttentionGradients& gradients) {
  launch(kOp, call.query, attention_backward_kernel, call.params, gradients);
}

// The gradient of the output, or a copy that the kernels take.
Tensor taken_gradient(const Call& call, const Tensor& grad_output) {
#ifdef MYVISION_GPU
  const GpuScope gpu(call.query);
  if (!attention_backward_cuda_takes(call.params, view_of(grad_output))) {
    Tensor copy = new_rows(call.query, call.params.value_width);
    return torch::stable::copy_(copy, grad_output);
  }
#endif
  return grad_output;
}

// ------------------------------------------------------------------------------------------------ forward
Results forward(Call call, bool wants_lse, bool wants_statistics) {
  Results results{new_rows(call.query, call.params.value_width), wants_lse ? new_lse(call) : Tensor(),
                  wants_statistics ? new_statistics(call) : Tensor()};
  set_views(call, results.output, results.lse, results.statistics);
  if (may_skip_rows(call)) set_unseen(results);
  if (call.has_pairs()) run_forward(call);
  return results;
}

Tensor attention(ATTENTION_TENSORS, ATTENTION_OPTIONS) {
  return forward(checked_call(ATTENTION_ARGUMENTS), false, false).output;
}

std::tuple<Tensor, Tensor> attention_with_lse(ATTENTION_TENSORS, ATTENTION_OPTIONS) {
  const Results results = forward(checked_call(ATTENTION_ARGUMENTS), true, false);
  return {results.output, results.lse};
}

// Returns what backward needs as well.
std::tuple<Tensor, Tensor, Tensor> attention_forward(ATTENTION_TENSORS, ATTENTION_OPTIONS) {
  const Results results = forward(checked_call(ATTENTION_ARGUMENTS), true, true);
  return {results.output, results.lse, results.statistics};
}

// ------------------------------------------------------------------------------------------------ backward
// Checks a result of forward that backward is given, or a gradient of one.
void check_result(const char* name, const Tensor& tensor, IntArray sizes, ScalarType type, const Tensor& query) {
  MYVISION_CHECK(kOp, std::ranges::equal(tensor.sizes(), sizes) && tensor.scalar_type() == type, name, " must be ",
                 name_of(type), " of shape ", shape_name(sizes), ", but is ", name_of(tensor.scalar_type()),
                 " of shape ", shape_name(tensor.sizes()));
  check_same_device(kOp, {name, tensor}, {"query", query});
}

// `output_mask` says of query, key, value and mask whether the gradient is wanted.
std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(const Tensor& grad_output, const OptionalTensor& grad_lse,
                                                              ATTENTION_TENSORS, const Tensor& output,
                                                              const Tensor& statistics, ATTENTION_OPTIONS,
                                                              const std::vector<bool>& output_mask) {
  Call call = checked_call(ATTENTION_ARGUMENTS);
  check_output_mask(kOp, output_mask, 4);
  MYVISION_CHECK(kOp, !output_mask[3] || (mask && mask->scalar_type() != ScalarType::Bool),
                 "a gradient of attn_mask is wanted, but there is no additive one");
  std::vector<int64_t> sizes(query.sizes().begin(), query.sizes().end());
  sizes.back() = call.params.value_width;
  check_result("grad_output", grad_output, sizes, query.scalar_type(), query);
  check_result("output", output, sizes, query.scalar_type(), query);
  const Tensor like_statistics = new_statistics(call);
  check_result("statistics", statistics, like_statistics.sizes(), like_statistics.scalar_type(), query);
  const Tensor all_statistics = torch::stable::contiguous(statistics);
  OptionalTensor all_grad_lse;
  if (grad_lse) {
    const Tensor like_lse = new_lse(call);
    check_result("grad_lse", *grad_lse, like_lse.sizes(), like_lse.scalar_type(), query);
    all_grad_lse = torch::stable::contiguous(*grad_lse);
  }
  Tensor grad_query = output_mask[0] ? new_rows(query, call.params.width) : Tensor();
  Tensor grad_key = output_mask[1] ? new_rows(key, call.params.width) : Tensor();
  Tensor grad_value = output_mask[2] ? new_rows(value, call.params.value_width) : Tensor();
  Tensor grad_mask = output_mask[3] ? torch::stable::new_empty(*mask, mask->sizes()) : Tensor();
  set_views(call, output, Tensor(), all_statistics);
  const Tensor taken = taken_gradient(call, grad_output);
  AttentionGradients gradients{};
  gradients.output = view_of(taken);
  gradients.lse = all_grad_lse ? all_grad_lse->const_data_ptr() : nullptr;
  if (grad_query.defined()) gradients.query = view_of(grad_query);
  if (grad_key.defined()) gradients.key = view_of(grad_key);
  if (grad_value.defined()) gradients.value = view_of(grad_value);
  if (grad_mask.defined()) gradients.mask = mask_view_of(grad_mask);
  if (may_skip_rows(call)) {
    for (Tensor* gradient : {&grad_query, &grad_key, &grad_value, &grad_mask}) {
      if (gradient->defined()) torch::stable::zero_(*gradient);
    }
  }
  if (call.has_pairs()) run_backward(call, gradients);
  return {grad_query, grad_key, grad_value, grad_mask};
}

}  // namespace
}  // namespace myvision

#define TENSORS                                                                                             \
  "Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? alibi_slopes, Tensor? cu_seqlens_q, " \
  "Tensor? cu_seqlens_k, Tensor? seed"
#define OPTIONS                                                                                                \
  "float dropout_p, bool is_causal, str causal_alignment, int? window_left, int? window_right, float? scale, " \
  "float softcap"

MYVISION_SCHEMAS(m) {
  m.def("attention(" TENSORS ", " OPTIONS ") -> Tensor");
  m.def("attention.with_lse(" TENSORS ", " OPTIONS ") -> (Tensor, Tensor)");
  m.def("_attention_forward(" TENSORS ", " OPTIONS ") -> (Tensor, Tensor, Tensor)");
  m.def("_attention_backward(Tensor grad_output, Tensor? grad_lse, " TENSORS
        ", Tensor output, Tensor statistics, " OPTIONS ", bool[4] output_mask) -> (Tensor, Tensor, Tensor, Tensor)");
}

MYVISION_IMPLEMENTATIONS(m) {
  m.impl("attention", TORCH_BOX(&myvision::attention));
  m.impl("attention.with_lse", TORCH_BOX(&myvision::attention_with_lse));
  m.impl("_attention_forward", TORCH_BOX(&myvision::attention_forward));
  m.impl("_attention_backward", TORCH_BOX(&myvision::attention_backward));
}
