// The glue of element-wise operators: what torch's TensorIterator does for its own.
#pragma once
#include <array>

#include "common/checks.h"
#include "common/elementwise_params.h"
#include "common/type_promotion.h"

namespace myvision {

// The type that the kernel computes with: the one that torch promotes the operands to.
template <Numbers kNumbers, std::size_t kCount>
ScalarType checked_type(const char* op, const Argument (&arguments)[kCount]) {
  constexpr bool kIntegers = kNumbers == Numbers::FloatingAndInteger;
  const std::optional<ScalarType> type = result_type(arguments);
  MYVISION_CHECK(op, type && (kIntegers || is_floating(*type)), "tensors must have ",
                 kIntegers ? "floating-point or integer dtypes" : "floating-point dtypes", ", but got ",
                 list_dtypes(arguments));
  return *type;
}

template <int kInputs, std::size_t... I>
OutputShape checked_shape(const char* op, const Argument (&arguments)[kInputs],
                          const Tensor* const (&operands)[kInputs], int leader, Broadcast<kInputs>& broadcast_to,
                          std::index_sequence<I...>) {
  MYVISION_CHECK(op, ((arguments[I].tensor.dim() <= kMaxDims) && ...), "tensors must have at most ", kMaxDims,
                 " dimensions, but got ", list(arguments, " with ", [](const Tensor& tensor) { return tensor.dim(); }));
  const Shape shapes[] = {{operands[I]->dim(), operands[I]->sizes().data(), operands[I]->strides().data()}...};
  OutputShape output;
  MYVISION_CHECK(op, broadcast(shapes, leader, output, broadcast_to), "shapes must broadcast together, but got ",
                 list_shapes(arguments));
  return output;
}

// Checks the operands, promotes and broadcasts them, allocates the output and launches the kernel. `params` come with
// the operator's own numbers; the operand numbered `leader` is the first to say how the output lies in memory.
template <typename Params, typename Kernel>
Tensor elementwise(const char* op, const Kernel& kernel, Params& params, const Argument (&arguments)[Params::kOperands],
                   int leader = 0) {
  constexpr int kInputs = Params::kOperands;
  for (const Argument& argument : arguments) check_defined(op, argument);
  check_one_device(op, arguments);
  const ScalarType type = checked_type<Params::kNumbers>(op, arguments);
  std::array<std::optional<Tensor>, kInputs> casts;
  const Tensor* operands[kInputs];
  for (int i = 0; i < kInputs; ++i) {
    const Tensor& tensor = arguments[i].tensor;
    operands[i] = tensor.scalar_type() == type ? &tensor : &casts[i].emplace(cast(tensor, type));
    params.input[i] = operands[i]->const_data_ptr();
  }
  const OutputShape shape =
      checked_shape<kInputs>(op, arguments, operands, leader, params, std::make_index_sequence<kInputs>());
  const Tensor output = empty_strided(shape.dims, shape.sizes, shape.strides, type, arguments[0].tensor);
  if (output.numel() == 0) return output;
  params.output = output.mutable_data_ptr();
  params.dtype = *to_dtype(type);
  launch(op, output, kernel, params);
  return output;
}

}  // namespace myvision
