// The only door to torch: its stable C++ interface, pinned to the oldest torch served.
#pragma once
#define TORCH_TARGET_VERSION 0x020b000000000000ULL  // 2.11; not a compiler flag: ATen/cpu/vec refuses to see it
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/HeaderOnlyArrayRef.h>

#include <cstdint>
#include <optional>

#include "common/dtype.h"

namespace myvision {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

}  // namespace myvision
