// batch_norm, instance_norm and group_norm for torch: schemas, checks, allocation, registration. The kernels see only
// BatchNormParams.
#include "ops/batch_norm/batch_norm.h"

#include <array>
#include <tuple>
#include <vector>

#include "common/norm.h"

namespace myvision {
namespace {

using OptionalTensor = std::optional<Tensor>;
using Name = std::optional<std::string>;
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;

enum class Kind { Batch, Instance, Group };

constexpr const char* operator_name(Kind kind) {
  return kind == Kind::Batch ? "batch_norm" : kind == Kind::Instance ? "instance_norm" : "group_norm";
}

// The arguments that all operators here share, checked.
struct Call {
  Kind kind;
  const char* op;
  Tensor input;
  OptionalTensor weight, bias, residual;
  BatchNormParams params;
};

Call checked_call(Kind kind, const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                  const OptionalTensor& residual, int64_t groups, double eps, const Name& activation,
                  double negative_slope) {
  const char* op = operator_name(kind);
  Call call{kind, op, input, weight, bias, residual, {}};
  BatchNormParams& p = call.params;
  p.dtype = checked_input(op, input);
  MYVISION_CHECK(op, input.dim() >= 2, "input must have at least 2 dimensions (batch, channels, ...), but has shape ",
                 shape_name(input.sizes()));
  const int64_t channels = input.size(1);
  MYVISION_CHECK(op, kind != Kind::Group || (groups >= 1 && channels % groups == 0),
                 "num_groups must be a divisor of the number of channels, ", channels, ", but is ", groups);
  check_channel_parameter(op, "weight", weight, input);
  check_channel_parameter(op, "bias", bias, input);
  check_like_input(op, "residual", residual, input);
  p.activation = check_activation(op, activation, negative_slope);
  p.groups = kind == Kind::Instance ? channels : groups;
  p.eps = eps;
  return call;
}

// eps is taken as torch's own functions take it: batch_norm alone refuses what is negative.
void check_running(const Call& call, const OptionalTensor& mean, const OptionalTensor& var) {
  MYVISION_CHECK(call.op, call.kind != Kind::Batch || call.params.eps >= 0, "eps must be at least 0, but is ",
                 call.params.eps);
  MYVISION_CHECK(call.op, mean.has_value() == var.has_value(), "running_mean and running_var go together, but ",
                 mean ? "running_var" : "running_mean", " is None");
  check_channel_parameter(call.op, "running_mean", mean, call.input);
  check_channel_parameter(call.op, "running_var", var, call.input);
}

void check_updated(const Call& call, const char* name, const Tensor& running) {
  MYVISION_CHECK(call.op, running.size(0) <= 1 || running.stride(0) != 0, name,
                 " must have a place of its own for each channel, as it is updated, but is expanded");
}

// The values that share a mean are counted as torch's own functions count them.
void check_own_statistics(const Call& call) {
  const Tensor& input = call.input;
  const int64_t others = call.kind == Kind::Batch      ? input.size(1)
                         : call.kind == Kind::Instance ? input.size(0) * input.size(1)
                                                       : call.params.groups;
  MYVISION_CHECK(call.op, input.numel() == 0 || input.numel() != others,
                 "a mean needs more than 1 value, but input has shape ", shape_name(input.sizes()));
}

std::array<int64_t, 2> statistics_shape(const Call& call) {
  const int64_t groups = call.params.groups;
  return {3, groups == 0 ? call.input.size(1) : call.input.size(0) * groups};
}

// ------------------------------------------------------------------------------------------------ launch
void run_forward(const Call& call) { launch(call.op, call.input, batch_norm_forward_kernel, call.params); }

void run_backward(const Call& call, const BatchNormGradients& gradients) {
  launch(call.op, call.input, batch_norm_backward_kernel, call.params, gradients);
}

// ------------------------------------------------------------------------------------------------ forward
// Writes the statistics where they are defined, or, where they are given, reads them.
void write_output(Call& call, const Tensor& statistics, const Tensor& output) {
  BatchNormParams& p = call.params;
  if (output.numel() == 0) return;
  const OptionalTensor weight = as_reals(call.weight, call.input), bias = as_reals(call.bias, call.input);
  p.weight = data_of(weight), p.bias = data_of(bias);
  p.statistics = statistics.defined() ? statistics.mutable_data_ptr() : nullptr;
  NormOperands operands;
  operands.read(call.input, p.input);
  operands.read(call.residual, p.residual);
  operands.write(output, p.output);
  operands.set_views(p, 1, 2);
  run_forward(call);
}

Tensor forward(Call& call, const Tensor& statistics) {
  const Tensor output = new_dense(call.input, is_channels_last(call.input));
  write_output(call, statistics, output);
  return output;
}

struct Result {
  Tensor output, statistics;  // the second where it was asked for
  std::tuple<Tensor, Tensor> both() const { return {output, statistics}; }
};

// Returns an undefined tensor where it is not wanted; the statistics of an empty input are 0.
Tensor new_statistics(const Call& call, bool wanted) {
  if (!wanted) return Tensor();
  Tensor statistics = new_reals(call.input, statistics_shape(call));
  if (call.input.numel() == 0) torch::stable::zero_(statistics);
  return statistics;
}

// Running statistics in the type computed in.
struct Running {
  Running(const Call& call, const OptionalTensor& running_mean, const OptionalTensor& running_var)
      : mean(as_reals(running_mean, call.input)), var(as_reals(running_var, call.input)) {}
  // They are only read.
  void use_in(BatchNormParams& p) const {
    p.running_mean = const_cast<void*>(data_of(mean)), p.running_var = const_cast<void*>(data_of(var));
  }
  OptionalTensor mean, var;
};

// Normalises by running statistics where they are given, or else by the input's own.
Result normalize(Call call, const OptionalTensor& running_mean, const OptionalTensor& running_var,
                 bool keep_statistics) {
  check_running(call, running_mean, running_var);
  BatchNormParams& p = call.params;
  if (running_mean) {
    p.groups = 0;
    p.statistics_from = StatisticsFrom::Running;
  } else {
    check_own_statistics(call);
    p.statistics_from = StatisticsFrom::Input;
  }
  const Running running(call, running_mean, running_var);
  running.use_in(p);
  const Tensor statistics = new_statistics(call, keep_statistics);
  return {forward(call, statistics), statistics};
}

// Normalises by the input's own statistics, and moves the running ones towards them.
Result normalize_and_update(Call call, Tensor running_mean, Tensor running_var, double momentum, bool keep_statistics) {
  check_running(call, running_mean, running_var);
  check_updated(call, "running_mean", running_mean);
  check_updated(call, "running_var", running_var);
  check_own_statistics(call);
  const Tensor mean = *as_reals(running_mean, call.input), var = *as_reals(running_var, call.input);
  BatchNormParams& p = call.params;
  p.statistics_from = StatisticsFrom::Input;
  p.running_mean = mean.mutable_data_ptr(), p.running_var = var.mutable_data_ptr();
  p.momentum = momentum;
  const Tensor statistics = new_statistics(call, keep_statistics);
  const Tensor output = forward(call, statistics);
  if (mean.const_data_ptr() != running_mean.const_data_ptr()) torch::stable::copy_(running_mean, mean);
  if (var.const_data_ptr() != running_var.const_data_ptr()) torch::stable::copy_(running_var, var);
  return {output, statistics};
}

// The operators: without statistics, and with them for backward.
template <Kind kKind>
Tensor norm(const Tensor& input, const OptionalTensor& running_mean, const OptionalTensor& running_var,
            const OptionalTensor& weight, const OptionalTensor& bias, const OptionalTensor& residual, double eps,
            const Name& activation, double negative_slope) {
  Call call = checked_call(kKind, input, weight, bias, residual, 0, eps, activation, negative_slope);
  return normalize(std::move(call), running_mean, running_var, false).output;
}

template <Kind kKind>
std::tuple<Tensor, Tensor> norm_forward(const Tensor& input, const OptionalTensor& running_mean,
                                        const OptionalTensor& running_var, const OptionalTensor& weight,
                                        const OptionalTensor& bias, const OptionalTensor& residual, double eps,
                                        const Name& activation, double negative_slope) {
  Call call = checked_call(kKind, input, weight, bias, residual, 0, eps, activation, negative_slope);
  return normalize(std::move(call), running_mean, running_var, true).both();
}

template <Kind kKind>
Tensor norm_update(const Tensor& input, const Tensor& running_mean, const Tensor& running_var,
                   const OptionalTensor& weight, const OptionalTensor& bias, const OptionalTensor& residual,
                   double momentum, double eps, const Name& activation, double negative_slope) {
  Call call = checked_call(kKind, input, weight, bias, residual, 0, eps, activation, negative_slope);
  return normalize_and_update(std::move(call), running_mean, running_var, momentum, false).output;
}

template <Kind kKind>
std::tuple<Tensor, Tensor> norm_forward_update(const Tensor& input, const Tensor& running_mean,
                                               const Tensor& running_var, const OptionalTensor& weight,
                                               const OptionalTensor& bias, const OptionalTensor& residual,
                                               double momentum, double eps, const Name& activation,
                                               double negative_slope) {
  Call call = checked_call(kKind, input, weight, bias, residual, 0, eps, activation, negative_slope);
  return normalize_and_update(std::move(call), running_mean, running_var, momentum, true).both();
}

// In evaluation, into the memory of the input.
void batch_norm_in_place(Tensor input, const Tensor& running_mean, const Tensor& running_var,
                         const OptionalTensor& weight, const OptionalTensor& bias, const OptionalTensor& residual,
                         double eps, const Name& activation, double negative_slope) {
  Call call = checked_call(Kind::Batch, input, weight, bias, residual, 0, eps, activation, negative_slope);
  check_running(call, running_mean, running_var);
  MYVISION_CHECK(call.op, is_dense(input), "input must be contiguous or channels_last to be written to, but has shape ",
                 shape_name(input.sizes()), " and strides ", shape_name(input.strides()));
  const Running running(call, running_mean, running_var);
  running.use_in(call.params);
  call.params.statistics_from = StatisticsFrom::Running;
  write_output(call, Tensor(), input);
}

Tensor group_norm(const Tensor& input, int64_t num_groups, const OptionalTensor& weight, const OptionalTensor& bias,
                  const OptionalTensor& residual, double eps, const Name& activation, double negative_slope) {
  Call call = checked_call(Kind::Group, input, weight, bias, residual, num_groups, eps, activation, negative_slope);
  return normalize(std::move(call), std::nullopt, std::nullopt, false).output;
}

std::tuple<Tensor, Tensor> group_norm_forward(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                                              const OptionalTensor& bias, const OptionalTensor& residual, double eps,
                                              const Name& activation, double negative_slope) {
  Call call = checked_call(Kind::Group, input, weight, bias, residual, num_groups, eps, activation, negative_slope);
  return normalize(std::move(call), std::nullopt, std::nullopt, true).both();
}

// ------------------------------------------------------------------------------------------------ backward
// groups: of an image; 0: channels over the batch. training: the statistics are the input's own.
Gradients backward(Call call, const Tensor& grad_output, const Tensor& statistics, bool training, BackwardStage stage,
                   const Tensor& sums, const std::vector<bool>& output_mask) {
  BatchNormParams& p = call.params;
  check_like_input(call.op, "grad_output", grad_output, call.input);
  const OptionalTensor weight = as_reals(call.weight, call.input), bias = as_reals(call.bias, call.input);
  p.weight = data_of(weight), p.bias = data_of(bias);
  p.statistics = const_cast<void*>(statistics.const_data_ptr());
  p.statistics_from = StatisticsFrom::Given;
  const auto new_image = [&](bool wanted) {
    return wanted ? new_dense(call.input, is_channels_last(call.input)) : Tensor();
  };
  const auto new_parameter = [&](bool wanted) {
    return wanted ? new_reals(call.input, {call.input.size(1)}) : Tensor();
  };
  Tensor grad_input = new_image(output_mask[0]), grad_weight = new_parameter(output_mask[1]),
         grad_bias = new_parameter(output_mask[2]), grad_residual = new_image(output_mask[3]);
  if (call.input.numel() == 0) {
    for (Tensor* gradient : {&grad_weight, &grad_bias}) {
      if (gradient->defined()) torch::stable::zero_(*gradient);
    }
  } else {
    BatchNormGradients views{};
    NormOperands operands;
    operands.read(call.input, p.input);
    operands.read(call.residual, p.residual);
    operands.read(grad_output, views.output);
    operands.write(grad_input, views.input);
    operands.write(grad_residual, views.residual);
    operands.set_views(p, 1, 2);
    views.weight = grad_weight.defined() ? grad_weight.mutable_data_ptr() : nullptr;
    views.bias = grad_bias.defined() ? grad_bias.mutable_data_ptr() : nullptr;
    views.sums = sums.defined() ? sums.mutable_data_ptr() : nullptr;
    views.training = training, views.stage = stage;
    run_backward(call, views);
  }
  if (grad_weight.defined() && call.weight) grad_weight = cast(grad_weight, call.weight->scalar_type());
  if (grad_bias.defined() && call.bias) grad_bias = cast(grad_bias, call.bias->scalar_type());
  return {grad_input, grad_weight, grad_bias, grad_residual};
}

// eps is an argument for the second derivatives' sake.
Gradients batch_norm_backward(const Tensor& grad_output, const Tensor& input, const Tensor& statistics,
                              const OptionalTensor& weight, const OptionalTensor& bias, const OptionalTensor& residual,
                              int64_t groups, bool training, double eps, const Name& activation, double negative_slope,
                              const std::vector<bool>& output_mask) {
  Call call = checked_call(groups == 0 ? Kind::Batch : Kind::Group, input, weight, bias, residual, groups, eps,
                           activation, negative_slope);
  check_statistics(call.op, statistics, statistics_shape(call), call.input);
  check_output_mask(call.op, output_mask, 4);
  return backward(std::move(call), grad_output, statistics, training, BackwardStage::Whole, Tensor(), output_mask);
}

// ------------------------------------------------------------------------------------------------ pieces of batch_norm
// These are for SyncBatchNorm, which adds up over processes in between.
Tensor batch_norm_statistics(const Tensor& input) {
  Call call = checked_call(Kind::Batch, input, {}, {}, {}, 0, 0, {}, 0);
  const Tensor statistics = new_statistics(call, true);
  if (input.numel() == 0) return statistics;
  call.params.statistics_from = StatisticsFrom::Input;
  call.params.statistics = statistics.mutable_data_ptr();
  NormOperands operands;
  operands.read(input, call.params.input);
  operands.set_views(call.params, 1, 2);
  run_forward(call);
  return statistics;
}

Tensor batch_norm_given(const Tensor& input, const Tensor& statistics, const OptionalTensor& weight,
                        const OptionalTensor& bias, const OptionalTensor& residual, const Name& activation,
                        double negative_slope) {
  Call call = checked_call(Kind::Batch, input, weight, bias, residual, 0, 0, activation, negative_slope);
  check_statistics(call.op, statistics, statistics_shape(call), call.input);
  call.params.statistics_from = StatisticsFrom::Given;
  return forward(call, statistics);
}

Tensor batch_norm_sums(const Tensor& grad_output, const Tensor& input, const Tensor& statistics,
                       const OptionalTensor& weight, const OptionalTensor& bias, const OptionalTensor& residual,
                       const Name& activation, double negative_slope) {
  Call call = checked_call(Kind::Batch, input, weight, bias, residual, 0, 0, activation, negative_slope);
  check_statistics(call.op, statistics, statistics_shape(call), call.input);
  Tensor sums = new_reals(input, {2, input.size(1)});
  if (input.numel() == 0) torch::stable::zero_(sums);
  backward(std::move(call), grad_output, statistics, true, BackwardStage::Sums, sums, {false, false, false, false});
  return sums;
}

std::tuple<Tensor, Tensor> batch_norm_finish(const Tensor& grad_output, const Tensor& input, const Tensor& statistics,
                                             const Tensor& sums, const OptionalTensor& weight,
                                             const OptionalTensor& bias, const OptionalTensor& residual,
                                             const Name& activation, double negative_slope,
                                             const std::vector<bool>& output_mask) {
  Call call = checked_call(Kind::Batch, input, weight, bias, residual, 0, 0, activation, negative_slope);
  check_statistics(call.op, statistics, statistics_shape(call), call.input);
  const int64_t channels = input.size(1);
  MYVISION_CHECK(call.op,
                 std::ranges::equal(sums.sizes(), IntArray({2, channels})) &&
                     sums.scalar_type() == statistics.scalar_type() && sums.is_contiguous() && same_device(sums, input),
                 "sums must be contiguous, of shape (2, ", channels, "), and of the dtype and device of statistics");
  check_output_mask(call.op, output_mask, 2);
  const Gradients gradients = backward(std::move(call), grad_output, statistics, true, BackwardStage::Finish, sums,
                                       {output_mask[0], false, false, output_mask[1]});
  return {std::get<0>(gradients), std::get<3>(gradients)};
}

}  // namespace
}  // namespace myvision

#define AFFINE "Tensor? weight, Tensor? bias, Tensor? residual"
#define PURE "(Tensor input, Tensor? running_mean, Tensor? running_var, " AFFINE ", float eps, " ACTIVATION ")"
#define UPDATING                                                            \
  "(Tensor input, Tensor(a!) running_mean, Tensor(b!) running_var, " AFFINE \
  ", float momentum, "                                                      \
  "float eps, " ACTIVATION ")"
#define GROUPS "(Tensor input, int num_groups, " AFFINE ", float eps, " ACTIVATION ")"
#define ACTIVATION "str? activation, float negative_slope"

MYVISION_SCHEMAS(m) {
  m.def("batch_norm" PURE " -> Tensor");
  m.def("batch_norm.update" UPDATING " -> Tensor");
  m.def("_batch_norm_in_place(Tensor(a!) input, Tensor running_mean, Tensor running_var, " AFFINE
        ", float eps, " ACTIVATION ") -> ()");
  m.def("_batch_norm_forward" PURE " -> (Tensor, Tensor)");
  m.def("_batch_norm_forward.update" UPDATING " -> (Tensor, Tensor)");
  m.def("instance_norm" PURE " -> Tensor");
  m.def("instance_norm.update" UPDATING " -> Tensor");
  m.def("_instance_norm_forward" PURE " -> (Tensor, Tensor)");
  m.def("_instance_norm_forward.update" UPDATING " -> (Tensor, Tensor)");
  m.def("group_norm" GROUPS " -> Tensor");
  m.def("_group_norm_forward" GROUPS " -> (Tensor, Tensor)");
  m.def("_batch_norm_backward(Tensor grad_output, Tensor input, Tensor statistics, " AFFINE
        ", int groups, bool training, float eps, " ACTIVATION
        ", bool[4] output_mask) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("_batch_norm_statistics(Tensor input) -> Tensor");
  m.def("_batch_norm_given(Tensor input, Tensor statistics, " AFFINE ", " ACTIVATION ") -> Tensor");
  m.def("_batch_norm_sums(Tensor grad_output, Tensor input, Tensor statistics, " AFFINE ", " ACTIVATION ") -> Tensor");
  m.def("_batch_norm_finish(Tensor grad_output, Tensor input, Tensor statistics, Tensor sums, " AFFINE ", " ACTIVATION
        ", bool[2] output_mask) -> (Tensor, Tensor)");
}

MYVISION_IMPLEMENTATIONS(m) {
  using myvision::Kind;
  m.impl("batch_norm", TORCH_BOX(&myvision::norm<Kind::Batch>));
  m.impl("batch_norm.update", TORCH_BOX(&myvision::norm_update<Kind::Batch>));
  m.impl("_batch_norm_in_place", TORCH_BOX(&myvision::batch_norm_in_place));
  m.impl("_batch_norm_forward", TORCH_BOX(&myvision::norm_forward<Kind::Batch>));
  m.impl("_batch_norm_forward.update", TORCH_BOX(&myvision::norm_forward_update<Kind::Batch>));
  m.impl("instance_norm", TORCH_BOX(&myvision::norm<Kind::Instance>));
  m.impl("instance_norm.update", TORCH_BOX(&myvision::norm_update<Kind::Instance>));
  m.impl("_instance_norm_forward", TORCH_BOX(&myvision::norm_forward<Kind::Instance>));
  m.impl("_instance_norm_forward.update", TORCH_BOX(&myvision::norm_forward_update<Kind::Instance>));
  m.impl("group_norm", TORCH_BOX(&myvision::group_norm));
  m.impl("_group_norm_forward", TORCH_BOX(&myvision::group_norm_forward));
  m.impl("_batch_norm_backward", TORCH_BOX(&myvision::batch_norm_backward));
  m.impl("_batch_norm_statistics", TORCH_BOX(&myvision::batch_norm_statistics));
  m.impl("_batch_norm_given", TORCH_BOX(&myvision::batch_norm_given));
  m.impl("_batch_norm_sums", TORCH_BOX(&myvision::batch_norm_sums));
  m.impl("_batch_norm_finish", TORCH_BOX(&myvision::batch_norm_finish));
}
