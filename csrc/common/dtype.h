// Element types as the kernels see them: free of torch, shared by CPU, CUDA, HIP and the tests.
#pragma once
#include <cstdint>

namespace myvision {

enum class Dtype : int8_t { Float64, Float32, Float16, BFloat16, Int64, Int32, Int16, Int8, UInt8 };

inline constexpr bool is_floating(Dtype dtype) { return dtype <= Dtype::BFloat16; }

inline constexpr int64_t size_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::Float64:
    case Dtype::Int64:
      return 8;
    case Dtype::Float32:
    case Dtype::Int32:
      return 4;
    case Dtype::Int8:
    case Dtype::UInt8:
      return 1;
    default:
      return 2;
  }
}

}  // namespace myvision
