// linear for torch: schemas, checks, allocation, registration. The kernels see only LinearParams.
#include "ops/linear/linear.h"

#include <array>
#include <tuple>
#include <vector>

#include "common/checks.h"
#include "common/product_choice.h"

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
// The innermost dimension before the last one that has several elements; -1 where there is none.
int64_t row_dim(const Tensor& tensor) {
  int64_t dim = tensor.dim() - 2;
  while (dim >= 0 && tensor.size(dim) == 1) --dim;
  return dim;
}

// Whether all dimensions but the last can be walked as one.
bool has_even_rows(const Tensor& tensor) {
  int64_t dim = row_dim(tensor);
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
  const int64_t dim = row_dim(rows), last = rows.dim() - 1;
  return {rows,
          {const_cast<void*>(rows.const_data_ptr()), dim >= 0 ? rows.stride(dim) : rows.size(last), rows.stride(last)}};
}

std::vector<int64_t> contiguous_strides(IntArray sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t dim = sizes.size(); dim-- > 0; stride *= std::max<int64_t>(sizes[dim], 1)) strides[dim] = stride;
  return strides;
}

Tensor new_tensor(const Call& call, IntArray sizes) {
  const std::vector<int64_t> strides = contiguous_strides(sizes);
  return empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), call.input.scalar_type(),
                       call.input);
}

Tensor new_output(const Call& call) { return new_tensor(call, {call.shape.data(), call.shape.size()}); }

// ------------------------------------------------------------------------------------------------ torch's products
// On the CPU, as GPUs have torch's alone. Few rows of forward have the own one, unless a person asks for torch's.
[[maybe_unused]] bool takes_torch_product(const LinearParams& p, bool forward) {
  const ProductChoice& choice = cpu_product(p.dtype);
  return choice.is_torch && (choice.is_asked_for || !forward || p.rows > kFewRows);
}

// A tensor as [rows, columns].
Tensor flattened(const Tensor& tensor, int64_t rows, int64_t columns) {
  return torch::stable::reshape(tensor, {rows, columns});
}

// A new tensor's memory in another shape: a tensor of its own, where torch's views would know of one another and so
// refuse to be changed in place.
Tensor in_shape(const Tensor& tensor, IntArray sizes) {
  const Tensor dense = torch::stable::contiguous(tensor);
  const std::vector<int64_t> strides = contiguous_strides(sizes);
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(dense.get(), static_cast<int64_t>(sizes.size()),
                                                               sizes.data(), strides.data(), 0, &handle));
  return Tensor(handle);
}

Tensor torch_linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  using torch::stable::detail::from;
  std::array<StableIValue, 3> stack{from(input), from(weight), from(bias)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// ------------------------------------------------------------------------------------------------ forward
struct Result {
  Tensor output, preactivation;  // undefined where it is not kept
};

bool has_activation(const Call& call) { return call.params.activation.kind != ActivationKind::None; }

// torch adds the bias as it writes the product, which costs nothing where cuBLASLt does. So the product is the
// preactivation, and what remains is done in its own memory where that need not be kept. The other epilogues of
// cuBLASLt stay unused: its relu and gelu_tanh neither leave the preactivation nor promise what becomes of NaN.
Result forward_by_torch(Call& call, bool keep_preactivation) {
  LinearParams& p = call.params;
  const Tensor rows = flattened(call.input, p.rows, p.features);
  const Tensor product = in_shape(torch_linear(rows, call.weight, call.bias), {call.shape.data(), call.shape.size()});
  if (!has_activation(call) && p.dropout_p == 0 && !call.residual) return {product, Tensor()};
  const Result result = keep_preactivation ? Result{new_output(call), product} : Result{product, Tensor()};
  Rows residual{};
  if (call.residual) residual = as_rows(*call.residual);
  p.residual = residual.matrix;
  p.output = result.output.mutable_data_ptr();
  launch(kOp, product, linear_epilogue_kernel, p, Matrix{product.mutable_data_ptr(), p.outputs, 1});
  return result;
}

Result forward_by_own_product(Call& call, bool keep_preactivation) {
  LinearParams& p = call.params;
  const Result result{new_output(call), keep_preactivation ? new_output(call) : Tensor()};
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

Result forward(Call& call, bool keep_preactivation) {
  keep_preactivation = keep_preactivation && has_activation(call);
  if (call.params.rows * call.params.outputs == 0) {
    return {new_output(call), keep_preactivation ? new_output(call) : Tensor()};
  }
  if constexpr (!kOnGpu) {
    if (!takes_torch_product(call.params, true)) return forward_by_own_product(call, keep_preactivation);
  }
  return forward_by_torch(call, keep_preactivation);
}

Tensor linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const Name& activation,
              double negative_slope, double dropout_p, const OptionalTensor& seed, const OptionalTensor& residual) {
  Call call = checked_call(input, weight, bias, activation, negative_slope, dropout_p, seed, residual);
  return forward(call, false).output;
}

std::tuple<Tensor, Tensor> linear_forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                                          const Name& activation, double negative_slope, double dropout_p,
                                          const OptionalTensor& seed, const OptionalTensor& residual) {
  Call call = checked_call(input, weight, bias, activation, negative_slope, dropout_p, seed, residual);
  const Result result = forward(call, true);
  return {result.output, result.preactivation.defined() ? result.preactivation : new_tensor(call, {0})};
}

// ------------------------------------------------------------------------------------------------ backward
void check_preactivation(const Tensor& preactivation, const Call& call) {
  const std::vector<int64_t> shape = has_activation(call) ? call.shape : std::vector<int64_t>{0};
  const Argument argument{"preactivation", preactivation};
  check_shape(kOp, argument, {shape.data(), shape.size()});
  MYVISION_CHECK(kOp, preactivation.is_contiguous(), "preactivation must be contiguous");
  check_like(kOp, argument, {"input", call.input});
}

using Gradients = std::tuple<Tensor, Tensor, Tensor>;  // of input, weight and bias; undefined where not wanted

// The gradient of the preactivation, [rows, outputs].
Tensor preactivation_gradient(const Call& call, const Tensor& grad_output) {
  const LinearParams& p = call.params;
  if (!has_activation(call) && p.dropout_p == 0) return flattened(grad_output, p.rows, p.outputs);
  const Tensor gradient = new_tensor(call, {p.rows, p.outputs});
  if (gradient.numel() == 0) return gradient;
  const Rows given = as_rows(grad_output);
  launch(kOp, gradient, linear_epilogue_backward_kernel, p, given.matrix, gradient.mutable_data_ptr());
  return gradient;
}

Gradients backward_by_torch(const Call& call, const Tensor& grad_output, const std::vector<bool>& output_mask) {
  using torch::stable::matmul, torch::stable::transpose, torch::stable::sum;
  const LinearParams& p = call.params;
  const Tensor gradient = preactivation_gradient(call, grad_output);
  Tensor input, weight, bias;
  if (output_mask[0]) input = in_shape(matmul(gradient, call.weight), call.input.sizes());
  if (output_mask[1]) {
    const Tensor rows = flattened(call.input, p.rows, p.features);
    weight = in_shape(matmul(transpose(gradient, 0, 1), rows), call.weight.sizes());
  }
  if (output_mask[2]) bias = sum(gradient, IntArray{0});
  return {input, weight, bias};
}

Gradients backward_by_own_product(Call& call, const Tensor& grad_output, const std::vector<bool>& output_mask) {
  LinearParams& p = call.params;
  Tensor input = output_mask[0] ? new_tensor(call, call.input.sizes()) : Tensor();
  Tensor weight = output_mask[1] ? new_tensor(call, call.weight.sizes()) : Tensor();
  Tensor bias = output_mask[2] ? new_tensor(call, {p.outputs}) : Tensor();
  const Rows given = as_rows(grad_output), rows = as_rows(call.input), weights = as_rows(call.weight);
  p.input = rows.matrix, p.weight = weights.matrix;
  const auto data = [](Tensor& tensor) { return tensor.defined() ? tensor.mutable_data_ptr() : nullptr; };
  linear_backward_cpu(p, LinearGradients{given.matrix, data(input), data(weight), data(bias)});
  return {input, weight, bias};
}

// bias is an argument for the second derivatives' sake.
Gradients linear_backward(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                          const OptionalTensor& bias, const Tensor& preactivation, const Name& activation,
                          double negative_slope, double dropout_p, const OptionalTensor& seed,
                          const std::vector<bool>& output_mask) {
  Call call = checked_call(input, weight, bias, activation, negative_slope, dropout_p, seed, {});
  check_output_mask(kOp, output_mask, 3);
  check_like_output("grad_output", grad_output, call);
  check_preactivation(preactivation, call);
  if (has_activation(call)) call.params.preactivation = const_cast<void*>(preactivation.const_data_ptr());
  if constexpr (!kOnGpu) {
    if (!takes_torch_product(call.params, false)) return backward_by_own_product(call, grad_output, output_mask);
  }
  return backward_by_torch(call, grad_output, output_mask);
}

}  // namespace
}  // namespace myvision

#define OPTIONS "str? activation, float negative_slope, float dropout_p, Tensor? seed"
#define LINEAR "(Tensor input, Tensor weight, Tensor? bias, " OPTIONS ", Tensor? residual)"

MYVISION_SCHEMAS(m) {
  m.def("linear" LINEAR " -> Tensor");
  m.def("_linear_forward" LINEAR " -> (Tensor, Tensor)");
  m.def("_linear_backward(Tensor grad_output, Tensor input, Tensor weight, Tensor? bias, Tensor preactivation, " OPTIONS
        ", bool[3] output_mask) -> (Tensor, Tensor, Tensor)");
}

MYVISION_IMPLEMENTATIONS(m) {
  m.impl("linear", TORCH_BOX(&myvision::linear));
  m.impl("_linear_forward", TORCH_BOX(&myvision::linear_forward));
  m.impl("_linear_backward", TORCH_BOX(&myvision::linear_backward));
}
