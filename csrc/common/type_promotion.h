// torch.result_type for the element types that kernels have, and bool.
#pragma once
#include "common/checks.h"

namespace myvision {

inline bool is_floating(ScalarType type) {
  const std::optional<Dtype> dtype = to_dtype(type);
  return dtype && is_floating(*dtype);
}

inline ScalarType promote_types(ScalarType a, ScalarType b) {
  if (a == b || b == ScalarType::Bool) return a;
  if (a == ScalarType::Bool) return b;
  if (is_floating(a) != is_floating(b)) return is_floating(a) ? a : b;
  const int64_t a_size = size_of(*to_dtype(a)), b_size = size_of(*to_dtype(b));
  if (a_size != b_size) return a_size > b_size ? a : b;
  return is_floating(a) ? ScalarType::Float : ScalarType::Short;  // float16 with bfloat16, uint8 with int8
}

// A tensor without dimensions raises the type only where its kind (bool, integer, floating) is the higher one. Nothing
// where an element type is not supported, or all are bool.
template <std::size_t kCount>
std::optional<ScalarType> result_type(const Argument (&arguments)[kCount]) {
  std::optional<ScalarType> of_scalars, of_others;
  for (const auto& [name, tensor] : arguments) {
    const ScalarType type = tensor.scalar_type();
    if (type != ScalarType::Bool && !to_dtype(type)) return std::nullopt;
    std::optional<ScalarType>& promoted = tensor.dim() == 0 ? of_scalars : of_others;
    promoted = promoted ? promote_types(*promoted, type) : type;
  }
  const auto kind = [](ScalarType type) { return is_floating(type) ? 2 : type != ScalarType::Bool; };
  ScalarType type = of_others ? *of_others : *of_scalars;
  if (of_others && of_scalars && kind(*of_scalars) > kind(type)) type = promote_types(type, *of_scalars);
  return type == ScalarType::Bool ? std::nullopt : std::optional(type);
}

}  // namespace myvision
