// gpu.cuh's primitives by hipcc and clang -x hip.
#pragma once
#include <hip/hip_runtime.h>
// After the runtime, which they need.
#include <hip/hip_bfloat16.h>
#include <hip/hip_fp16.h>

#include <cstdint>

#define MYVISION_LAUNCH_BOUNDS(threads, min_blocks) __launch_bounds__(threads)  // the second number means another thing
#define MYVISION_ASSEMBLY_COMMENT "; "

namespace myvision {

using GpuStream = hipStream_t;
using Half = __half;
using BFloat16 = hip_bfloat16;

#if defined(__GFX9__)
inline constexpr int kWarpSize = 64;
#else
inline constexpr int kWarpSize = 32;
#endif
inline constexpr bool kHasMma = false;  // theirs have other shapes

template <typename Kernel>
bool device_has_mma(Kernel*) {
  return kHasMma;
}

inline int current_device() {
  int device = 0;
  static_cast<void>(hipGetDevice(&device));
  return device;
}

inline const char* launch_error() {
  const hipError_t error = hipGetLastError();
  return error == hipSuccess ? nullptr : hipGetErrorString(error);
}

inline void set_dynamic_shared_limit(const void*, int) {}  // all there is may be had unasked

__device__ __forceinline__ float to_real(Half value) { return __half2float(value); }
__device__ __forceinline__ float to_real(BFloat16 value) { return static_cast<float>(value); }
__device__ __forceinline__ void set_real(Half& target, float value) { target = __float2half(value); }
__device__ __forceinline__ void set_real(BFloat16& target, float value) { target = BFloat16(value); }

template <typename T>
__device__ __forceinline__ T shuffle(T value, int lane) {
  return __shfl(value, lane);
}
template <typename T>
__device__ __forceinline__ T shuffle_xor(T value, int lane_mask) {
  return __shfl_xor(value, lane_mask);
}
__device__ __forceinline__ void sync_warp() {  // lanes run in step; the compiler must not reorder
  __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
  __builtin_amdgcn_wave_barrier();
}

template <typename Real>
__device__ __forceinline__ Real rounded_product(Real a, Real b) {
#pragma clang fp contract(off)
  return a * b;
}

template <typename T>
__device__ __forceinline__ void atomic_add(T* target, T value) {
  atomicAdd(target, value);
}

__device__ __forceinline__ void copy_async(void* to_shared, const void* from_global) {
  *static_cast<uint4*>(to_shared) = *static_cast<const uint4*>(from_global);
}
__device__ __forceinline__ void commit_copies() {}
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {}

template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&)[4], const uint32_t (&)[4], const uint32_t (&)[2]) {
  static_assert(sizeof(T) == 0, "guard it by if constexpr (kHasMma)");
}
template <bool kTransposed, int kCount>
__device__ __forceinline__ void ldmatrix(uint32_t (&)[kCount], const void*) {
  static_assert(kCount == 0, "guard it by if constexpr (kHasMma)");
}

}  // namespace myvision
