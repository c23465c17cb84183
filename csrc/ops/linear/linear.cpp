// linear for torch: schemas, checks, allocation, registration. The kernels see only LinearParams.
#include "ops/linear/linear.h"

#include <tuple>
#include <vector>

#include "common/norm.h"

namespace myvision {
namespace {

using OptionalTensor = std::optional<Tensor>;
using Name = std::optional<std::string>;

constexpr const char* kOp = "linear";

// The arguments, checked.
struct Call {
  Tensor input, weight;
  OptionalTensor bias, residual;
  std::vector<int64_t> shape;  // of the output
  LinearParams params;
};

// ------------------------------------------------------------------------------------------------ checks
void check_weight(const Tensor& input, const Tensor& weight) {
  check_defined(kOp, {"weight", weight});
  MYVISION_CHECK(kOp, weight.dim() == 2, "weight must have shape (outputs, features), but has shape ",
                 shape_name(weight.sizes()));
  MYVISION_CHECK(kOp, input.dim() >= 1 && input.size(-1) == weight.size(1), "input must have ", weight.size(1),
                 " features in its last dimension, as weight has, but has shape ", shape_name(input.sizes()));
  check_like(kOp, {"weight", weight}, {"input", input});
}

void check_bias(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  if (!bias) return;
  const Argument argument{"bias", *bias};
  check_shape(kOp, argument, {weight.size(0)});
  check_defined(kOp, argument);
  check_like(kOp, argument, {"input", input});
}

// Of a tensor that must have the shape of the output, and the input's type.
void check_like_output(const char* name, const OptionalTensor& tensor, const Call& call) {
  if (!tensor) return;
  const Argument argument{name, *tensor};
  check_defined(kOp, argument);
  check_shape(kOp, argument, {call.shape.data(), call.shape.size()});
  check_like(kOp, argument, {"input", call.input});
}

Call checked_call(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const Name& activation,
                  double negative_slope, double dropout_p, const OptionalTensor& seed, const OptionalTensor& residual) {
  Call call{input, weight, bias, residual, {}, {}};
  LinearParams& p = call.params;
  p.dtype = checked_input(kOp, input);
  check_weight(input, weight);
  check_bias(input, weight, bias);
  p.features = weight.size(1), p.outputs = weight.size(0), p.rows = 1;
  const IntArray sizes = input.sizes();
  for (const int64_t size : sizes.slice(0, sizes.size() - 1)) {
    p.rows *= size;
    call.shape.push_back(size);
  }
  call.shape.push_back(p.outputs);
  check_like_output("residual", residual, call);
  p.activation = check_activation(kOp, activation, negative_slope);
  check_probability(kOp, dropout_p);
  check_seed(kOp, dropout_p, seed, {"input", input});
  p.dropout_p = dropout_p;
  if (dropout_p > 0) p.seed = static_cast<const int64_t*>(seed->const_data_ptr());
  return call;
}

// ------------------------------------------------------------------------------------------------ memory
// Whether all dimensions but the last can be walked as one.
bool has_even_rows(const Tensor& tensor) {
  int64_t dim = tensor.dim() - 2;
  while (dim >= 0 && tensor.size(dim) == 1) --dim;
  for (int64_t outer = dim - 1; outer >= 0; --outer) {
    if (tensor.size(outer) == 1) continue;
    if (tensor.stride(outer) != tensor.stride(dim) * tensor.size(dim)) return false;
    dim = outer;
  }
  return true;
}

// A tensor as a matrix of rows along its last dimension, and the tensor itself, which is copied where its dimensions
// cannot be walked so.
struct Rows {
  Tensor tensor;
  Matrix matrix;
};

Rows as_rows(const Tensor& tensor) {
  const Tensor rows = has_even_rows(tensor) ? tensor : torch::stable::contiguous(tensor);
  int64_t dim = rows.dim() - 2;
  while (dim >= 0 && rows.size(dim) == 1) --dim;
  const int64_t last = rows.dim() - 1;
  return {rows,
          {const_cast<void*>(rows.const_data_ptr()), dim >= 0 ? rows.stride(dim) : rows.size(last), rows.stride(last)}};
}

Tensor new_tensor(const Call& call, IntArray sizes) {
  return torch::stable::new_empty(call.input, sizes, call.input.scalar_type());
}

Tensor new_output(const Call& call) { return new_tensor(call, {call.shape.data(), call.shape.size()}); }

// ------------------------------------------------------------------------------------------------ forward
struct Result {
  Tensor output, preactivation;
};

Result forward(Call call, bool keep_preactivation) {
  LinearParams& p = call.params;
  keep_preactivation = keep_preactivation && p.activation.kind != ActivationKind::None;
  const Result result{new_output(call), keep_preactivation ? new_output(call) : new_tensor(call, {0})};
  if (result.output.numel() == 0) return result;
  const Rows input = as_rows(call.input), weight = as_rows(call.weight);
  const OptionalTensor bias = call.bias ? OptionalTensor(torch::stable::contiguous(*call.bias)) : std::nullopt;
  Rows residual{};
  if (call.residual) residual = as_rows(*call.residual);
  p.input = input.matrix, p.weight = weight.matrix, p.residual = residual.matrix;
  p.bias = data_of(bias);
  p.output = result.output.mutable_data_ptr();
  p.preactivation = keep_preactivation ? result.preactivation.mutable_data_ptr() : nullptr;
  linear_forward_cpu(p);
  return result;
}

Tensor linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const Name& activation,
              double negative_slope, double dropout_p, const OptionalTensor& seed, const OptionalTensor& residual) {
  return forward(checked_call(input, weight, bias, activation, negative_slope, dropout_p, seed, residual), false)
      .output;
}

std::tuple<Tensor, Tensor> linear_forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                                          const Name& activation, double negative_slope, double dropout_p,
                                          const OptionalTensor& seed, const OptionalTensor& residual) {
  const Result result =
      forward(checked_call(input, weight, bias, activation, negative_slope, dropout_p, seed, residual), true);
  return {result.output, result.preactivation};
}

// ------------------------------------------------------------------------------------------------ backward
void check_preactivation(const Tensor& preactivation, const Call& call) {
  const bool is_kept = call.params.activation.kind != ActivationKind::None;
  const std::vector<int64_t> shape = is_kept ? call.shape : std::vector<int64_t>{0};
  const Argument argument{"preactivation", preactivation};
  check_shape(kOp, argument, {shape.data(), shape.size()});
  MYVISION_CHECK(kOp, preactivation.is_contiguous(), "preactivation must be contiguous");
  check_like(kOp, argument, {"input", call.input});
}

// The gradients of input, weight and bias; undefined where not wanted. bias is an argument for the second derivatives'
// sake.
std::tuple<Tensor, Tensor, Tensor> linear_backward(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                                                   const OptionalTensor& bias, const Tensor& preactivation,
                                                   const Name& activation, double negative_slope, double dropout_p,
                                                   const OptionalTensor& seed, const std::vector<bool>& output_mask) {
  Call call = checked_call(input, weight, bias, activation, negative_slope, dropout_p, seed, {});
  check_output_mask(kOp, output_mask, 3);
  check_like_output("grad_output", grad_output, call);
  check_preactivation(preactivation, call);
  LinearParams& p = call.params;
  Tensor grad_input = output_mask[0] ? new_tensor(call, input.sizes()) : Tensor();
  Tensor grad_weight = output_mask[1] ? new_tensor(call, weight.sizes()) : Tensor();
  Tensor grad_bias = output_mask[2] ? new_tensor(call, {p.outputs}) : Tensor();
  const Rows given = as_rows(grad_output), rows = as_rows(input), weights = as_rows(weight);
  p.input = rows.matrix, p.weight = weights.matrix;
  if (p.activation.kind != ActivationKind::None)
    p.preactivation = const_cast<void*>(preactivation.const_data_ptr());
  const auto data = [](Tensor& tensor) { return tensor.defined() ? tensor.mutable_data_ptr() : nullptr; };
  linear_backward_cpu(p,
                      LinearGradients{given.matrix, data(grad_input), data(grad_weight), data(grad_bias)});
  return {grad_input, grad_weight, grad_bias};
}

}  // namespace
}  // namespace myvision

#define OPTIONS "str? activation, float negative_slope, float dropout_p, Tensor? seed"
#define LINEAR "(Tensor input, Tensor weight, Tensor? bias, " OPTIONS ", Tensor? residual)"

MYVISION_SCHEMAS(m) {
  m.def("linear" LINEAR " -> Tensor");
  m.def("_linear_forward" LINEAR " -> (Tensor, Tensor)");
  m.def(
      "_linear_backward(Tensor grad_output, Tensor input, Tensor weight, Tensor? bias, Tensor preactivation, " OPTIONS
      ", bool[3] output_mask) -> (Tensor, Tensor, Tensor)");
}

MYVISION_IMPLEMENTATIONS(m) {
  m.impl("linear", TORCH_BOX(&myvision::linear));
  m.impl("_linear_forward", TORCH_BOX(&myvision::linear_forward));
  m.impl("_linear_backward", TORCH_BOX(&myvision::linear_backward));
}
