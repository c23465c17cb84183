// What every kernel of an element-wise operator is given. Free of torch.
#pragma once
#include "common/broadcast.h"
#include "common/dtype.h"
#include "common/kernel.h"

namespace myvision {

enum class Numbers { Floating, FloatingAndInteger };

inline constexpr int kMaxInputs = 5;  // so that the parameters stay below 4 KB, the limit of a GPU kernel's arguments

// The parameters of an operator of so many tensors, for these types; its own numbers come in a struct derived from it.
template <int kInputs, Numbers kTypes>
struct Elementwise : Broadcast<kInputs> {
  static_assert(kInputs >= 1 && kInputs <= kMaxInputs);
  static constexpr Numbers kNumbers = kTypes;

  const void* input[kInputs];
  void* output;
  Dtype dtype;  // of all
};

// Calls visit with a null pointer to each element type that the operator takes, until it is the one of dtype. Half and
// BFloat16 are the compiler's types for them.
template <typename Half, typename BFloat16, Numbers kNumbers, typename Visit>
auto visit_dtype(Dtype dtype, const Visit& visit) {
  if constexpr (kNumbers == Numbers::FloatingAndInteger) {
    switch (dtype) {
      case Dtype::Int64:
        return visit(static_cast<int64_t*>(nullptr));
      case Dtype::Int32:
        return visit(static_cast<int32_t*>(nullptr));
      case Dtype::Int16:
        return visit(static_cast<int16_t*>(nullptr));
      case Dtype::Int8:
        return visit(static_cast<int8_t*>(nullptr));
      case Dtype::UInt8:
        return visit(static_cast<uint8_t*>(nullptr));
      default:
        break;
    }
  }
  switch (dtype) {
    case Dtype::Float64:
      return visit(static_cast<double*>(nullptr));
    case Dtype::Float16:
      return visit(static_cast<Half*>(nullptr));
    case Dtype::BFloat16:
      return visit(static_cast<BFloat16*>(nullptr));
    default:
      return visit(static_cast<float*>(nullptr));
  }
}

}  // namespace myvision
