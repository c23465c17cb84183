// The only door to torch: its stable C++ interface, pinned to the oldest torch served.
#pragma once
#define TORCH_TARGET_VERSION 0x020b000000000000ULL  // 2.11; not a compiler flag: ATen/cpu/vec refuses to see it
#if defined(MYVISION_GPU) && !defined(USE_CUDA)
#define USE_CUDA  // declares aoti_torch_get_current_cuda_stream, which ROCm builds of torch have as well
#endif
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/HeaderOnlyArrayRef.h>

#include <cctype>
#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "common/dtype.h"

#ifndef STABLE_TORCH_ERROR_CODE_CHECK  // newer than torch 2.11; it says why a call failed
#define STABLE_TORCH_ERROR_CODE_CHECK TORCH_ERROR_CODE_CHECK
#endif

// An operator's <op>.cpp is compiled once per library: as it stands for the CPU, with MYVISION_GPU for CUDA and HIP,
// with MYVISION_EMULATOR as well for the GPU kernels emulated on the CPU, under a namespace of their own.
#ifndef MYVISION_OP_NAMESPACE
#define MYVISION_OP_NAMESPACE myvision
#endif
#if defined(MYVISION_GPU) && !defined(MYVISION_EMULATOR)
#define MYVISION_DISPATCH_KEY CUDA
// The CPU library has defined the schemas already.
#define MYVISION_SCHEMAS(m) [[maybe_unused]] static void myvision_schemas(torch::stable::detail::StableLibrary& m)
#else
#define MYVISION_DISPATCH_KEY CPU
#define MYVISION_SCHEMAS(m) STABLE_TORCH_LIBRARY_FRAGMENT(MYVISION_OP_NAMESPACE, m)
#endif
#define MYVISION_IMPLEMENTATIONS(m) STABLE_TORCH_LIBRARY_IMPL(MYVISION_OP_NAMESPACE, MYVISION_DISPATCH_KEY, m)

// Raises a RuntimeError in Python, "op: message"; the message is put together only when the condition fails.
#define MYVISION_CHECK(op, condition, ...)                                    \
  do {                                                                        \
    if (!(condition)) [[unlikely]] {                                          \
      throw std::runtime_error(myvision::concatenate(op, ": ", __VA_ARGS__)); \
    }                                                                         \
  } while (false)

namespace myvision {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using IntArray = torch::headeronly::IntHeaderOnlyArrayRef;

template <typename... Parts>
std::string concatenate(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

// As Python spells it, for messages: "float32".
inline std::string name_of(ScalarType type) {
  switch (type) {
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::ComplexHalf:
      return "complex32";
    case ScalarType::ComplexFloat:
      return "complex64";
    case ScalarType::ComplexDouble:
      return "complex128";
    default: {
      std::string name = torch::headeronly::toString(type);  // "Float8_e5m2", where Python has "float8_e5m2"
      for (char& letter : name) letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
      return name;
    }
  }
}

// The same for shapes and devices: "(2, 3)", "cuda:0".
inline std::string shape_name(IntArray sizes) {
  std::string text;
  for (const int64_t size : sizes) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "(" + text + (sizes.size() == 1 ? ",)" : ")");
}

inline std::string device_name(const Tensor& tensor) {
  if (tensor.is_cpu()) return "cpu";
  return (tensor.is_cuda() ? "cuda:" : "another device, index ") + std::to_string(tensor.get_device_index());
}

inline bool same_device(const Tensor& a, const Tensor& b) { return a.device() == b.device(); }

// The type that is computed in where tensors are of this floating-point one: float32 for half types.
inline ScalarType real_type(const Tensor& tensor) {
  return tensor.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// The kernels' name of an element type; nothing where they have no such type.
inline std::optional<Dtype> to_dtype(ScalarType type) {
  switch (type) {
    case ScalarType::Double:
      return Dtype::Float64;
    case ScalarType::Float:
      return Dtype::Float32;
    case ScalarType::Half:
      return Dtype::Float16;
    case ScalarType::BFloat16:
      return Dtype::BFloat16;
    case ScalarType::Long:
      return Dtype::Int64;
    case ScalarType::Int:
      return Dtype::Int32;
    case ScalarType::Short:
      return Dtype::Int16;
    case ScalarType::Char:
      return Dtype::Int8;
    case ScalarType::Byte:
      return Dtype::UInt8;
    default:
      return std::nullopt;
  }
}

inline Tensor cast(const Tensor& tensor, ScalarType type) {
  return tensor.scalar_type() == type ? tensor : torch::stable::to(tensor, type);
}

inline const void* data_of(const std::optional<Tensor>& tensor) { return tensor ? tensor->const_data_ptr() : nullptr; }

// Whether the strides of [batch, channels, ...] in 4 or 5 dimensions say channels_last, by the rule of torch's own
// operators: slices count, what is contiguous as well does not. myvision/_layout.py predicts the same.
inline bool is_channels_last(const Tensor& tensor) {
  const IntArray sizes = tensor.sizes(), strides = tensor.strides();
  const int dims = static_cast<int>(sizes.size());
  if ((dims != 4 && dims != 5) || strides[1] == 0) return false;
  int64_t least = 0;  // stride of the next dimension outwards
  for (int i = 0; i < dims; ++i) {
    const int dim = i == 0 ? 1 : i == dims - 1 ? 0 : dims - i;  // channels, the image from its last dimension on, batch
    if (sizes[dim] == 0 || strides[dim] < least || (dim == 0 && least == strides[1])) return false;
    least = strides[dim] * sizes[dim];
  }
  return true;
}

// An uninitialised tensor of these sizes and strides on the device of `like`. Cheaper than torch::stable::empty_like,
// which goes through the dispatcher.
inline Tensor empty_strided(int64_t dims, const int64_t* sizes, const int64_t* strides, ScalarType type,
                            const Tensor& like) {
  int32_t device_type = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      dims, sizes, strides, torch::stable::detail::to<int32_t>(torch::stable::detail::from(type)), device_type,
      like.get_device_index(), &handle));
  return Tensor(handle);
}

// Whether this library runs on the GPU, or emulates it.
#ifdef MYVISION_GPU
inline constexpr bool kOnGpu = true;
#else
inline constexpr bool kOnGpu = false;
#endif

#ifdef MYVISION_GPU
// Makes a tensor's GPU the current one and hands out torch's current stream there.
class GpuScope {
 public:
#ifdef MYVISION_EMULATOR
  explicit GpuScope(const Tensor&) {}
#else
  explicit GpuScope(const Tensor& tensor) : guard_(tensor.get_device_index()) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream_));
  }
#endif
  void* stream() const { return stream_; }

 private:
#ifndef MYVISION_EMULATOR
  torch::stable::accelerator::DeviceGuard guard_;
#endif
  void* stream_ = nullptr;
};

// Raises what a GPU launcher reports: null where all went well.
inline void check_launch(const char* op, const char* error) {
  MYVISION_CHECK(op, error == nullptr, "the GPU kernel did not start: ", error);
}

// Runs the kernel that an operator's header declares by MYVISION_KERNEL, on the GPU of the tensor `on`.
template <typename Kernel, typename... Params>
void launch(const char* op, const Tensor& on, const Kernel& kernel, const Params&... params) {
  const GpuScope gpu(on);
  if constexpr (std::is_invocable_v<Kernel, const Params&..., void*>) {
    check_launch(op, kernel(params..., gpu.stream()));
  } else {
    const Tensor workspace = torch::stable::new_empty(on, {kernel.workspace(params...)}, ScalarType::Byte);
    check_launch(op, kernel.run(params..., workspace.mutable_data_ptr(), gpu.stream()));
  }
}
#else
// Runs the kernel that an operator's header declares by MYVISION_KERNEL, in this CPU's instruction set.
template <typename Kernel, typename... Params>
void launch(const char*, const Tensor&, const Kernel& kernel, const Params&... params) {
  kernel(params...);
}
#endif

}  // namespace myvision
