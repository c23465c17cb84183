// How an operator's header declares a kernel of the CPU and the GPU at once, for launch() in common/launch.h.
#pragma once
#include <cstdint>

#include "common/cpu_kernel.h"

// MYVISION_KERNEL(my_add, forward, MyAddParams) declares
//   forward(const MyAddParams&) in the namespace my_add of every instruction set, for my_add_cpu.cpp to define,
//   my_add_forward_cuda(const MyAddParams&, void* stream), for my_add_cuda.cu to define: null, or what went wrong,
//   my_add_forward, which the glue passes to launch(): the one of the two that its library has.
// What is declared here and defined nowhere fails at link time.
#define MYVISION_KERNEL(op, name, ...)       \
  MYVISION_CPU_KERNEL(op, name, __VA_ARGS__) \
  MYVISION_GPU_KERNEL(op, name, __VA_ARGS__)

// The same for an element-wise kernel, which memory limits: vectors of 512 bits were 3 to 12 % slower than torch.add
// and those of 256 bits as fast, so that CPUs with AVX-512 run the AVX2 kernel.
#define MYVISION_ELEMENTWISE_KERNEL(op, name, ...)       \
  MYVISION_CPU_KERNEL_OF_256_BITS(op, name, __VA_ARGS__) \
  MYVISION_GPU_KERNEL(op, name, __VA_ARGS__)

#if defined(MYVISION_CPU_X86) && !defined(CPU_CAPABILITY)
#define MYVISION_CPU_KERNEL_OF_256_BITS(op, name, ...)    \
  MYVISION_DECLARE_KERNEL(DEFAULT, op, name, __VA_ARGS__) \
  MYVISION_DECLARE_KERNEL(AVX2, op, name, __VA_ARGS__)    \
  constexpr CpuDispatch<__VA_ARGS__> op##_##name##_cpu = {&DEFAULT::op::name, &AVX2::op::name, &AVX2::op::name};
#else
#define MYVISION_CPU_KERNEL_OF_256_BITS(op, name, ...) MYVISION_CPU_KERNEL(op, name, __VA_ARGS__)
#endif

#if defined(MYVISION_GPU)
#define MYVISION_GPU_KERNEL(op, name, ...)   \
  GpuKernel<__VA_ARGS__> op##_##name##_cuda; \
  constexpr GpuKernel<__VA_ARGS__>* op##_##name = &op##_##name##_cuda;
#elif defined(CPU_CAPABILITY) || defined(__CUDACC__) || defined(__HIPCC__)  // a file of kernels
#define MYVISION_GPU_KERNEL(op, name, ...) GpuKernel<__VA_ARGS__> op##_##name##_cuda;
#else
#define MYVISION_GPU_KERNEL(op, name, ...)   \
  GpuKernel<__VA_ARGS__> op##_##name##_cuda; \
  constexpr const CpuDispatch<__VA_ARGS__>& op##_##name = op##_##name##_cpu;
#endif

namespace myvision {

// Null, or what went wrong with the launch.
template <typename... Params>
using GpuKernel = const char*(const Params&..., void* stream);

}  // namespace myvision
