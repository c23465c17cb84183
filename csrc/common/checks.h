// What the glue says of tensors that an operator does not take. Each check names the argument, what it got and what it
// wants; myvision/_elementwise.py has the same words for the fakes.
#pragma once
#include <cstddef>
#include <string>

#include "common/stable.h"

namespace myvision {

// A tensor with the name that the schema gives it.
struct Argument {
  const char* name;
  const Tensor& tensor;
};

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
void check_defined(const char* op, const Argument (&arguments)[kCount]) {
  for (const Argument& argument : arguments) {
    MYVISION_CHECK(argument.tensor.defined(), op, ": ", argument.name, " must be a tensor, but is None");
  }
}

template <std::size_t kCount>
void check_one_device(const char* op, const Argument (&arguments)[kCount]) {
  for (const Argument& argument : arguments) {
    MYVISION_CHECK(same_device(argument.tensor, arguments[0].tensor), op, ": tensors must be on one device, but got ",
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
