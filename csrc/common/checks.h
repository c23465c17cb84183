// The checks of arguments that several operators make. Each names the argument, what it got and what it wants;
// myvision/_checks.py has the same words for the fakes. What only one operator checks stands in its own file.
#pragma once
#include <algorithm>
#include <cstddef>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "common/activation.h"
#include "common/stable.h"

namespace myvision {

// A tensor with the name that the schema gives it.
struct Argument {
  const char* name;
  const Tensor& tensor;
};

// ------------------------------------------------------------------------------------------------ one tensor
inline void check_defined(const char* op, const Argument& argument) {
  MYVISION_CHECK(op, argument.tensor.defined(), argument.name, " must be a tensor, but is None");
}

inline Dtype check_floating(const char* op, const Argument& argument) {
  const std::optional<Dtype> dtype = to_dtype(argument.tensor.scalar_type());
  MYVISION_CHECK(op, dtype && is_floating(*dtype), argument.name,
                 " must have dtype float64, float32, float16 or bfloat16, but has ",
                 name_of(argument.tensor.scalar_type()));
  return *dtype;
}

// The input, which most operators check first.
inline Dtype checked_input(const char* op, const Tensor& input) {
  check_defined(op, {"input", input});
  return check_floating(op, {"input", input});
}

// `layout` names the dimensions.
inline void check_shape(const char* op, const Argument& argument, IntArray shape, const char* layout = nullptr) {
  MYVISION_CHECK(op, std::ranges::equal(argument.tensor.sizes(), shape), argument.name, " must have shape ",
                 shape_name(shape), layout ? concatenate(" (", layout, ")") : "", ", but has shape ",
                 shape_name(argument.tensor.sizes()));
}

// ------------------------------------------------------------------------------------------------ like another tensor
inline void check_same_shape(const char* op, const Argument& argument, const Argument& like) {
  MYVISION_CHECK(op, std::ranges::equal(argument.tensor.sizes(), like.tensor.sizes()), argument.name,
                 " must have the shape of ", like.name, ", ", shape_name(like.tensor.sizes()), ", but has shape ",
                 shape_name(argument.tensor.sizes()));
}

inline void check_same_dtype(const char* op, const Argument& argument, const Argument& like) {
  MYVISION_CHECK(op, argument.tensor.scalar_type() == like.tensor.scalar_type(), argument.name,
                 " must have the dtype of ", like.name, ", ", name_of(like.tensor.scalar_type()), ", but has ",
                 name_of(argument.tensor.scalar_type()));
}

inline void check_same_device(const char* op, const Argument& argument, const Argument& like) {
  MYVISION_CHECK(op, same_device(argument.tensor, like.tensor), argument.name, " must be on the device of ", like.name,
                 ", ", device_name(like.tensor), ", but is on ", device_name(argument.tensor));
}

inline void check_like(const char* op, const Argument& argument, const Argument& like) {
  check_same_dtype(op, argument, like);
  check_same_device(op, argument, like);
}

// ------------------------------------------------------------------------------------------------ options
inline void check_probability(const char* op, double dropout_p) {
  MYVISION_CHECK(op, dropout_p >= 0 && dropout_p <= 1, "dropout_p must be between 0 and 1, but is ", dropout_p);
}

inline Activation check_activation(const char* op, const std::optional<std::string>& name, double negative_slope) {
  if (!name) return {ActivationKind::None, negative_slope};
  std::string known = "None";
  for (int kind = 1; kind < static_cast<int>(std::size(kActivationNames)); ++kind) {
    if (*name == kActivationNames[kind]) return {static_cast<ActivationKind>(kind), negative_slope};
    known += std::string(", '") + kActivationNames[kind] + "'";
  }
  MYVISION_CHECK(op, false, "activation must be one of ", known, ", but is '", *name, "'");
  return {};
}

inline void check_seed(const char* op, double dropout_p, const std::optional<Tensor>& seed, const Argument& like) {
  MYVISION_CHECK(op, dropout_p == 0 || seed, "dropout needs a seed, but seed is None");
  if (dropout_p == 0) return;
  MYVISION_CHECK(op, seed->scalar_type() == ScalarType::Long && seed->dim() == 0,
                 "seed must be one int64 without dimensions, but is ", name_of(seed->scalar_type()), " of shape ",
                 shape_name(seed->sizes()));
  check_same_device(op, {"seed", *seed}, like);
}

// The output mask of a backward operator says of each gradient whether it is wanted.
inline void check_output_mask(const char* op, const std::vector<bool>& output_mask, std::size_t gradients) {
  MYVISION_CHECK(op, output_mask.size() == gradients, "output_mask must have ", gradients, " elements, but has ",
                 output_mask.size());
}

// ------------------------------------------------------------------------------------------------ tensors of one kind
// "x of float32, y of float16 and z of int64", where describe(tensor) returns the types.
template <std::size_t kCount, typename Describe>
std::string list(const Argument (&arguments)[kCount], const char* verb, const Describe& describe) {
  std::string text;
  for (std::size_t i = 0; i < kCount; ++i) {
    text += i == 0 ? "" : i + 1 == kCount ? " and " : ", ";
    text += concatenate(arguments[i].name, verb, describe(arguments[i].tensor));
  }
  return text;
}

template <std::size_t kCount>
void check_one_device(const char* op, const Argument (&arguments)[kCount]) {
  for (const Argument& argument : arguments) {
    MYVISION_CHECK(op, same_device(argument.tensor, arguments[0].tensor), "tensors must be on one device, but got ",
                   list(arguments, " on ", device_name));
  }
}

template <std::size_t kCount>
std::string list_dtypes(const Argument (&arguments)[kCount]) {
  return list(arguments, " of ", [](const Tensor& tensor) { return name_of(tensor.scalar_type()); });
}

template <std::size_t kCount>
std::string list_shapes(const Argument (&arguments)[kCount]) {
  return list(arguments, " of ", [](const Tensor& tensor) { return shape_name(tensor.sizes()); });
}

}  // namespace myvision
