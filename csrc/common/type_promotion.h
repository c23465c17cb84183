// torch.result_type for the element types that kernels have, and bool.
#pragma once
#include "common/stable.h"

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
// where an element type is not supported.
inline std::optional<ScalarType> result_type(const Tensor& x, const Tensor& y) {
  const ScalarType x_type = x.scalar_type(), y_type = y.scalar_type();
  if (x_type == y_type) return to_dtype(x_type) ? std::optional(x_type) : std::nullopt;
  const auto known = [](ScalarType type) { return type == ScalarType::Bool || to_dtype(type); };
  if (!known(x_type) || !known(y_type)) return std::nullopt;
  const auto kind = [](ScalarType type) { return is_floating(type) ? 2 : type != ScalarType::Bool; };
  if (x.dim() > 0 && y.dim() == 0 && kind(x_type) >= kind(y_type)) return x_type;
  if (y.dim() > 0 && x.dim() == 0 && kind(y_type) >= kind(x_type)) return y_type;
  return promote_types(x_type, y_type);
}

}  // namespace myvision
