// linear: the plain parameters that every backend takes. Checked once, in linear.cpp.
//
//   preactivation = input * transposed weight + bias
//   output        = dropout(activation(preactivation)) + residual
#pragma once
#include <cstdint>

#include "common/activation.h"
#include "common/dtype.h"
#include "common/host_device.h"
#include "common/kernel.h"

namespace myvision {

// Element (i, j) stands at data[i * row + j * column]; data is null where an optional matrix is absent.
struct Matrix {
  void* data;
  int64_t row, column;
};

// Up to so many rows the CPU's own product reads the weight once where it lies, at the speed of memory.
inline constexpr int64_t kFewRows = 32;

struct LinearParams {
  Dtype dtype;  // of everything: Float64, Float32, Float16 or BFloat16
  int64_t rows, features, outputs;
  Matrix input;         // [rows, features]
  Matrix weight;        // [outputs, features]
  const void* bias;     // [outputs], or null: 0
  Matrix residual;      // [rows, outputs], or none
  void* preactivation;  // [rows, outputs], contiguous. Forward writes it, where it is not null; backward reads it, and
                        // it is null where there is no activation
  void* output;         // [rows, outputs], contiguous; of forward
  Activation activation;
  double dropout_p;
  const int64_t* seed;  // of dropout, on the device; null where dropout_p is 0. Element row * outputs + output
};

// Null: not wanted; else contiguous.
struct LinearGradients {
  Matrix output;  // given, [rows, outputs]
  void* input;    // [rows, features]
  void* weight;   // [outputs, features]
  void* bias;     // [outputs]
};

MYVISION_CPU_KERNEL(linear, forward, LinearParams)
MYVISION_CPU_KERNEL(linear, backward, LinearParams, LinearGradients)

// What follows a product that torch has computed: output, which may be the product's own memory. The product has the
// bias already and is the preactivation, so that both of these are null.
MYVISION_KERNEL(linear, epilogue, LinearParams, Matrix)
// What comes before such products: the gradient of the preactivation, [rows, outputs] and contiguous, from that of the
// output.
MYVISION_KERNEL(linear, epilogue_backward, LinearParams, Matrix, void*)

}  // namespace myvision
