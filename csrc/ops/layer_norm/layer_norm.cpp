// layer_norm, rms_norm, add_layer_norm and add_rms_norm for torch: schemas, checks, allocation, registration. The
// kernels see only LayerNormParams.
#include "ops/layer_norm/layer_norm.h"

#include <array>
#include <tuple>
#include <vector>

#include "common/norm.h"

namespace myvision {
namespace {

using OptionalTensor = std::optional<Tensor>;
using Name = std::optional<std::string>;

// The arguments that all operators here share, checked; input is what is normalised or added to.
struct Call {
  const char* op;
  Tensor input;
  OptionalTensor weight, bias, residual;
  int first_channel, last_channel;  // the normalised dimensions, the second not among them
  bool channels_first;
  LayerNormParams params;
};

void check_normalized_shape(const char* op, const Tensor& input, IntArray shape, bool channels_first) {
  if (channels_first) {
    MYVISION_CHECK(op, input.dim() >= 2 && shape.size() == 1 && shape[0] == input.size(1),
                   "with channels='first', normalized_shape must be the size of dimension 1 of input, but is ",
                   shape_name(shape), ", and input has shape ", shape_name(input.sizes()));
    return;
  }
  const IntArray sizes = input.sizes();
  MYVISION_CHECK(op,
                 shape.size() >= 1 && shape.size() <= sizes.size() &&
                     std::equal(shape.begin(), shape.end(), sizes.end() - shape.size()),
                 "normalized_shape must be the last dimensions of input, at least one, but is ", shape_name(shape),
                 ", and input has shape ", shape_name(sizes));
}

Call checked_call(const char* op, bool centered, const Tensor& input, IntArray normalized_shape,
                  const OptionalTensor& weight, const OptionalTensor& bias, const OptionalTensor& residual,
                  bool channels_first, double eps, const Name& activation, double negative_slope) {
  const int dims = static_cast<int>(input.dim()), normalized = static_cast<int>(normalized_shape.size());
  const int first = channels_first ? 1 : dims - normalized;
  Call call{op, input, weight, bias, residual, first, channels_first ? 2 : dims, channels_first, {}};
  LayerNormParams& p = call.params;
  p.dtype = checked_input(op, input);
  check_normalized_shape(op, input, normalized_shape, channels_first);
  check_parameter(op, "weight", weight, normalized_shape, input);
  check_parameter(op, "bias", bias, normalized_shape, input);
  check_like_input(op, "residual", residual, input);
  p.activation = check_activation(op, activation, negative_slope);
  p.centered = centered;
  p.eps = eps;
  return call;
}

void set_dropout(Call& call, double dropout_p, const OptionalTensor& seed) {
  check_probability(call.op, dropout_p);
  check_seed(call.op, dropout_p, seed, {"input", call.input});
  call.params.dropout_p = dropout_p;
  if (dropout_p > 0) call.params.seed = static_cast<const int64_t*>(seed->const_data_ptr());
}

// The tensor lies in memory as the input does where that is images in channels_last, and is contiguous otherwise.
Tensor new_image(const Call& call) {
  return new_dense(call.input, call.channels_first && is_channels_last(call.input));
}

std::array<int64_t, 2> statistics_shape(const Call& call) {
  int64_t rows = 1;
  for (int dim = 0; dim < call.input.dim(); ++dim) {
    if (dim < call.first_channel || dim >= call.last_channel) rows *= call.input.size(dim);
  }
  return {call.params.centered ? 3 : 1, rows};
}

// ------------------------------------------------------------------------------------------------ launch
void run_forward(const Call& call) { launch(call.op, call.input, layer_norm_forward_kernel, call.params); }

void run_backward(const Call& call, const LayerNormGradients& gradients) {
  launch(call.op, call.input, layer_norm_backward_kernel, call.params, gradients);
}

// ------------------------------------------------------------------------------------------------ forward
struct Result {
  Tensor output, sum, statistics;  // where they were asked for
};

// Where there is an addend, the sum is normalised.
Result forward(Call call, const OptionalTensor& addend, bool keep_statistics) {
  LayerNormParams& p = call.params;
  const Result result{new_image(call), addend ? new_image(call) : Tensor(),
                      keep_statistics ? new_reals(call.input, statistics_shape(call)) : Tensor()};
  if (call.input.numel() == 0) {
    Tensor statistics = result.statistics;
    if (keep_statistics) torch::stable::zero_(statistics);
    return result;
  }
  const OptionalTensor weight = as_reals(call.weight, call.input), bias = as_reals(call.bias, call.input);
  p.weight = data_of(weight), p.bias = data_of(bias);
  p.statistics = keep_statistics ? result.statistics.mutable_data_ptr() : nullptr;
  NormOperands operands;
  operands.read(call.input, p.input);
  operands.read(addend, p.addend);
  operands.read(call.residual, p.residual);
  operands.write(result.sum, p.sum);
  operands.write(result.output, p.output);
  operands.set_views(p, call.first_channel, call.last_channel);
  run_forward(call);
  return result;
}

Call layer_norm_call(const Tensor& input, IntArray normalized_shape, const OptionalTensor& weight,
                     const OptionalTensor& bias, const OptionalTensor& residual, bool channels_first, double eps,
                     const Name& activation, double negative_slope) {
  return checked_call("layer_norm", true, input, normalized_shape, weight, bias, residual, channels_first, eps,
                      activation, negative_slope);
}

Tensor layer_norm(const Tensor& input, IntArray normalized_shape, const OptionalTensor& weight,
                  const OptionalTensor& bias, const OptionalTensor& residual, bool channels_first, double eps,
                  const Name& activation, double negative_slope) {
  return forward(layer_norm_call(input, normalized_shape, weight, bias, residual, channels_first, eps, activation,
                                 negative_slope),
                 {}, false)
      .output;
}

std::tuple<Tensor, Tensor> layer_norm_forward(const Tensor& input, IntArray normalized_shape,
                                              const OptionalTensor& weight, const OptionalTensor& bias,
                                              const OptionalTensor& residual, bool channels_first, double eps,
                                              const Name& activation, double negative_slope) {
  const Result result = forward(
      layer_norm_call(input, normalized_shape, weight, bias, residual, channels_first, eps, activation, negative_slope),
      {}, true);
  return {result.output, result.statistics};
}

Call rms_norm_call(const Tensor& input, IntArray normalized_shape, const OptionalTensor& weight,
                   const OptionalTensor& residual, bool channels_first, double eps, const Name& activation,
                   double negative_slope) {
  return checked_call("rms_norm", false, input, normalized_shape, weight, {}, residual, channels_first, eps, activation,
                      negative_slope);
}

Tensor rms_norm(const Tensor& input, IntArray normalized_shape, const OptionalTensor& weight,
                const OptionalTensor& residual, bool channels_first, double eps, const Name& activation,
                double negative_slope) {
  return forward(
             rms_norm_call(input, normalized_shape, weight, residual, channels_first, eps, activation, negative_slope),
             {}, false)
      .output;
}

std::tuple<Tensor, Tensor> rms_norm_forward(const Tensor& input, IntArray normalized_shape,
                                            const OptionalTensor& weight, const OptionalTensor& residual,
                                            bool channels_first, double eps, const Name& activation,
                                            double negative_slope) {
  const Result result =
      forward(rms_norm_call(input, normalized_shape, weight, residual, channels_first, eps, activation, negative_slope),
              {}, true);
  return {result.output, result.statistics};
}

Result add_norm(const char* op, bool centered, const Tensor& input, const Tensor& residual, IntArray normalized_shape,
                const OptionalTensor& weight, const OptionalTensor& bias, double eps, double dropout_p,
                const OptionalTensor& seed, bool keep_statistics) {
  Call call = checked_call(op, centered, input, normalized_shape, weight, bias, {}, false, eps, {}, 0);
  check_like_input(op, "residual", residual, input);
  set_dropout(call, dropout_p, seed);
  return forward(std::move(call), residual, keep_statistics);
}

std::tuple<Tensor, Tensor> add_layer_norm(const Tensor& input, const Tensor& residual, IntArray normalized_shape,
                                          const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                          double dropout_p, const OptionalTensor& seed) {
  const Result result =
      add_norm("add_layer_norm", true, input, residual, normalized_shape, weight, bias, eps, dropout_p, seed, false);
  return {result.output, result.sum};
}

std::tuple<Tensor, Tensor, Tensor> add_layer_norm_forward(const Tensor& input, const Tensor& residual,
                                                          IntArray normalized_shape, const OptionalTensor& weight,
                                                          const OptionalTensor& bias, double eps, double dropout_p,
                                                          const OptionalTensor& seed) {
  const Result result =
      add_norm("add_layer_norm", true, input, residual, normalized_shape, weight, bias, eps, dropout_p, seed, true);
  return {result.output, result.sum, result.statistics};
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& input, const Tensor& residual, IntArray normalized_shape,
                                        const OptionalTensor& weight, double eps, double dropout_p,
                                        const OptionalTensor& seed) {
  const Result result =
      add_norm("add_rms_norm", false, input, residual, normalized_shape, weight, {}, eps, dropout_p, seed, false);
  return {result.output, result.sum};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_forward(const Tensor& input, const Tensor& residual,
                                                        IntArray normalized_shape, const OptionalTensor& weight,
                                                        double eps, double dropout_p, const OptionalTensor& seed) {
  const Result result =
      add_norm("add_rms_norm", false, input, residual, normalized_shape, weight, {}, eps, dropout_p, seed, true);
  return {result.output, result.sum, result.statistics};
}

// ------------------------------------------------------------------------------------------------ backward
// What backward may return; each is undefined where it is not wanted.
struct Gradients {
  Tensor input, dropped, residual, weight, bias;
};

// gradients comes with those allocated that are wanted; params.input is what was normalised.
Gradients backward(Call call, const OptionalTensor& grad_output, const OptionalTensor& grad_sum,
                   const Tensor& statistics, Gradients gradients) {
  LayerNormParams& p = call.params;
  check_statistics(call.op, statistics, statistics_shape(call), call.input);
  check_like_input(call.op, "grad_output", grad_output, call.input);
  check_like_input(call.op, "grad_sum", grad_sum, call.input);
  const OptionalTensor weight = as_reals(call.weight, call.input), bias = as_reals(call.bias, call.input);
  p.weight = data_of(weight), p.bias = data_of(bias);
  p.statistics = const_cast<void*>(statistics.const_data_ptr());
  if (call.input.numel() == 0) {
    for (Tensor* gradient : {&gradients.weight, &gradients.bias}) {
      if (gradient->defined()) torch::stable::zero_(*gradient);
    }
  } else {
    LayerNormGradients views{};
    NormOperands operands;
    operands.read(call.input, p.input);
    operands.read(call.residual, p.residual);
    operands.read(grad_output, views.output);
    operands.read(grad_sum, views.sum);
    operands.write(gradients.input, views.input);
    operands.write(gradients.dropped, views.dropped);
    operands.write(gradients.residual, views.residual);
    operands.set_views(p, call.first_channel, call.last_channel);
    views.weight = gradients.weight.defined() ? gradients.weight.mutable_data_ptr() : nullptr;
    views.bias = gradients.bias.defined() ? gradients.bias.mutable_data_ptr() : nullptr;
    run_backward(call, views);
  }
  if (gradients.weight.defined() && call.weight) gradients.weight = cast(gradients.weight, call.weight->scalar_type());
  if (gradients.bias.defined() && call.bias) gradients.bias = cast(gradients.bias, call.bias->scalar_type());
  return gradients;
}

Tensor new_parameter(const Call& call, IntArray shape, bool wanted) {
  return wanted ? new_reals(call.input, shape) : Tensor();
}

Tensor new_gradient(const Call& call, bool wanted) { return wanted ? new_image(call) : Tensor(); }

// Serves layer_norm and, with statistics of one row, rms_norm. eps is an argument for the second derivatives' sake.
std::tuple<Tensor, Tensor, Tensor, Tensor> layer_norm_backward(
    const Tensor& grad_output, const Tensor& input, const Tensor& statistics, IntArray normalized_shape,
    const OptionalTensor& weight, const OptionalTensor& bias, const OptionalTensor& residual, bool channels_first,
    double eps, const Name& activation, double negative_slope, const std::vector<bool>& output_mask) {
  Call call = checked_call("layer_norm", statistics.dim() == 2 && statistics.size(0) == 3, input, normalized_shape,
                           weight, bias, residual, channels_first, eps, activation, negative_slope);
  check_output_mask(call.op, output_mask, 4);
  const Gradients wanted{.input = new_gradient(call, output_mask[0]),
                         .dropped = Tensor(),
                         .residual = new_gradient(call, output_mask[3]),
                         .weight = new_parameter(call, normalized_shape, output_mask[1]),
                         .bias = new_parameter(call, normalized_shape, output_mask[2])};
  const Gradients gradients = backward(std::move(call), grad_output, {}, statistics, wanted);
  return {gradients.input, gradients.weight, gradients.bias, gradients.residual};
}

// Returns the gradients of dropout's input, of the residual (and of the sum), of weight and bias.
std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm_backward(
    const Tensor& grad_output, const OptionalTensor& grad_sum, const Tensor& sum, const Tensor& statistics,
    IntArray normalized_shape, const OptionalTensor& weight, const OptionalTensor& bias, double eps, double dropout_p,
    const OptionalTensor& seed, const std::vector<bool>& output_mask) {
  Call call = checked_call("add_layer_norm", statistics.dim() == 2 && statistics.size(0) == 3, sum, normalized_shape,
                           weight, bias, {}, false, eps, {}, 0);
  set_dropout(call, dropout_p, seed);
  check_output_mask(call.op, output_mask, 4);
  const Gradients wanted{.input = new_gradient(call, output_mask[1]),
                         .dropped = new_gradient(call, output_mask[0]),
                         .residual = Tensor(),
                         .weight = new_parameter(call, normalized_shape, output_mask[2]),
                         .bias = new_parameter(call, normalized_shape, output_mask[3])};
  const Gradients gradients = backward(std::move(call), grad_output, grad_sum, statistics, wanted);
  return {gradients.dropped, gradients.input, gradients.weight, gradients.bias};
}

}  // namespace
}  // namespace myvision

#define ACTIVATION "str? activation, float negative_slope"
#define LAYER_NORM                                                                                               \
  "(Tensor input, int[] normalized_shape, Tensor? weight, Tensor? bias, Tensor? residual, bool channels_first, " \
  "float eps, " ACTIVATION ")"
#define RMS_NORM                                                                                         \
  "(Tensor input, int[] normalized_shape, Tensor? weight, Tensor? residual, bool channels_first, float " \
  "eps, " ACTIVATION ")"
#define ADD_LAYER_NORM                                                                                                 \
  "(Tensor input, Tensor residual, int[] normalized_shape, Tensor? weight, Tensor? bias, float eps, float dropout_p, " \
  "Tensor? seed)"
#define ADD_RMS_NORM \
  "(Tensor input, Tensor residual, int[] normalized_shape, Tensor? weight, float eps, float dropout_p, Tensor? seed)"

MYVISION_SCHEMAS(m) {
  m.def("layer_norm" LAYER_NORM " -> Tensor");
  m.def("_layer_norm_forward" LAYER_NORM " -> (Tensor, Tensor)");
  m.def("rms_norm" RMS_NORM " -> Tensor");
  m.def("_rms_norm_forward" RMS_NORM " -> (Tensor, Tensor)");
  m.def("add_layer_norm" ADD_LAYER_NORM " -> (Tensor, Tensor)");
  m.def("_add_layer_norm_forward" ADD_LAYER_NORM " -> (Tensor, Tensor, Tensor)");
  m.def("add_rms_norm" ADD_RMS_NORM " -> (Tensor, Tensor)");
  m.def("_add_rms_norm_forward" ADD_RMS_NORM " -> (Tensor, Tensor, Tensor)");
  m.def(
      "_layer_norm_backward(Tensor grad_output, Tensor input, Tensor statistics, int[] normalized_shape, "
      "Tensor? weight, Tensor? bias, Tensor? residual, bool channels_first, float eps, " ACTIVATION
      ", bool[4] output_mask) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "_add_layer_norm_backward(Tensor grad_output, Tensor? grad_sum, Tensor sum, Tensor statistics, "
      "int[] normalized_shape, Tensor? weight, Tensor? bias, float eps, float dropout_p, Tensor? seed, bool[4] "
      "output_mask) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
}

MYVISION_IMPLEMENTATIONS(m) {
  m.impl("layer_norm", TORCH_BOX(&myvision::layer_norm));
  m.impl("_layer_norm_forward", TORCH_BOX(&myvision::layer_norm_forward));
  m.impl("rms_norm", TORCH_BOX(&myvision::rms_norm));
  m.impl("_rms_norm_forward", TORCH_BOX(&myvision::rms_norm_forward));
  m.impl("add_layer_norm", TORCH_BOX(&myvision::add_layer_norm));
  m.impl("_add_layer_norm_forward", TORCH_BOX(&myvision::add_layer_norm_forward));
  m.impl("add_rms_norm", TORCH_BOX(&myvision::add_rms_norm));
  m.impl("_add_rms_norm_forward", TORCH_BOX(&myvision::add_rms_norm_forward));
  m.impl("_layer_norm_backward", TORCH_BOX(&myvision::layer_norm_backward));
  m.impl("_add_layer_norm_backward", TORCH_BOX(&myvision::add_layer_norm_backward));
}
