// How an operator's header declares a kernel of the CPU and the GPU at once, for launch() in common/stable.h.
#pragma once
#include <cstdint>

#include "common/cpu_kernel.h"

// MYVISION_KERNEL(my_add, forward, MyAddParams) declares
//   forward(const MyAddParams&) in the namespace my_add of every instruction set, for my_add_cpu.cpp to define,
//   my_add_forward_cuda(const MyAddParams&, void* stream), for my_add_cuda.cu to define: null, or what went wrong,
//   my_add_forward_kernel, which the glue passes to launch(): the one of the two that its library has.
// What is declared here and defined nowhere fails at link time.
#define MYVISION_KERNEL(op, name, ...)       \
  MYVISION_CPU_KERNEL(op, name, __VA_ARGS__) \
  MYVISION_GPU_KERNEL(op, name, __VA_ARGS__)

// The same for a GPU kernel that wants a workspace:
//   my_norm_forward_cuda_workspace(const MyNormParams&), the bytes of device memory that it wants, and
//   my_norm_forward_cuda(const MyNormParams&, void* workspace, void* stream).
#define MYVISION_KERNEL_WITH_WORKSPACE(op, name, ...)       \
  MYVISION_CPU_KERNEL(op, name, __VA_ARGS__)                \
  GpuWorkspace<__VA_ARGS__> op##_##name##_cuda_workspace;   \
  GpuLauncherWithWorkspace<__VA_ARGS__> op##_##name##_cuda; \
  MYVISION_LAUNCHED(op, name, GpuKernelWithWorkspace,       \
                    MYVISION_BRACED(&op##_##name##_cuda_workspace, &op##_##name##_cuda), __VA_ARGS__)
#define MYVISION_BRACED(...) {__VA_ARGS__}

#define MYVISION_GPU_KERNEL(op, name, ...)     \
  GpuLauncher<__VA_ARGS__> op##_##name##_cuda; \
  MYVISION_LAUNCHED(op, name, GpuKernel, &op##_##name##_cuda, __VA_ARGS__)

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

// What the glue passes to launch().
#if defined(MYVISION_GPU)
#define MYVISION_LAUNCHED(op, name, type, gpu, ...) constexpr type<__VA_ARGS__> op##_##name##_kernel = gpu;
#elif defined(CPU_CAPABILITY) || defined(__CUDACC__) || defined(__HIPCC__)  // a file of kernels, which launches none
#define MYVISION_LAUNCHED(op, name, type, gpu, ...)
#else
#define MYVISION_LAUNCHED(op, name, type, gpu, ...) \
  constexpr const CpuDispatch<__VA_ARGS__>& op##_##name##_kernel = op##_##name##_cpu;
#endif

namespace myvision {

// Null, or what went wrong with the launch.
template <typename... Params>
using GpuLauncher = const char*(const Params&..., void* stream);
template <typename... Params>
using GpuKernel = GpuLauncher<Params...>*;

template <typename... Params>
using GpuWorkspace = int64_t(const Params&...);
template <typename... Params>
using GpuLauncherWithWorkspace = const char*(const Params&..., void* workspace, void* stream);
template <typename... Params>
struct GpuKernelWithWorkspace {
  GpuWorkspace<Params...>* workspace;
  GpuLauncherWithWorkspace<Params...>* run;
};

}  // namespace myvision
