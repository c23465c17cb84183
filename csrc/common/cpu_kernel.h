// How an operator's header declares its CPU kernels. Every *_cpu.cpp is compiled once per instruction set and defines
// them in the namespace CPU_CAPABILITY::<op>, where CPU_CAPABILITY is DEFAULT, AVX2 or AVX512, as the build says.
#pragma once
#include "common/cpu_capability.h"

// MYVISION_CPU_KERNEL(my_add, forward, MyAddParams) declares forward(const MyAddParams&) in the namespace my_add of
// every instruction set, and my_add_forward_cpu(params), which calls the one for this CPU. A kernel that is declared
// here and defined nowhere fails at link time.
#define MYVISION_DECLARE_KERNEL(instruction_set, op, name, ...) \
  namespace instruction_set::op {                               \
  CpuKernel<__VA_ARGS__> name;                                  \
  }
#if defined(CPU_CAPABILITY)
#define MYVISION_CPU_KERNEL(op, name, ...) MYVISION_DECLARE_KERNEL(CPU_CAPABILITY, op, name, __VA_ARGS__)
#elif defined(MYVISION_CPU_X86)
#define MYVISION_CPU_KERNEL(op, name, ...)                \
  MYVISION_DECLARE_KERNEL(DEFAULT, op, name, __VA_ARGS__) \
  MYVISION_DECLARE_KERNEL(AVX2, op, name, __VA_ARGS__)    \
  MYVISION_DECLARE_KERNEL(AVX512, op, name, __VA_ARGS__)  \
  constexpr CpuDispatch<__VA_ARGS__> op##_##name##_cpu = {&DEFAULT::op::name, &AVX2::op::name, &AVX512::op::name};
#else
#define MYVISION_CPU_KERNEL(op, name, ...)                \
  MYVISION_DECLARE_KERNEL(DEFAULT, op, name, __VA_ARGS__) \
  constexpr CpuDispatch<__VA_ARGS__> op##_##name##_cpu = {&DEFAULT::op::name};
#endif

namespace myvision {

template <typename... Params>
using CpuKernel = void(const Params&...);

// One kernel in every instruction set that was built, in the order of CpuCapability.
template <typename... Params>
struct CpuDispatch {
  CpuKernel<Params...>* kernels[kCpuCapabilities];

  void operator()(const Params&... params) const { kernels[static_cast<int>(cpu_capability())](params...); }
};

}  // namespace myvision
