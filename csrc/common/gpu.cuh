// One kernel source for CUDA, HIP and the CPU emulator: everything that differs between them stands here.
#pragma once
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "common/dtype.h"

#if defined(MYVISION_EMULATOR)
#include "simt/simt.h"  // gives g++ and clang++ the language extensions, the intrinsics and the two macros below
#elif defined(__HIP__) || defined(__HIPCC__)
#include <hip/hip_runtime.h>
// After the runtime, which they need.
#include <hip/hip_bfloat16.h>
#include <hip/hip_fp16.h>
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#endif

#if defined(__HIP__) || defined(__HIPCC__)  // where the second number means another thing
#define MYVISION_LAUNCH_BOUNDS(threads, min_blocks) __launch_bounds__(threads)
#else
#define MYVISION_LAUNCH_BOUNDS(threads, min_blocks) __launch_bounds__(threads, min_blocks)
#endif

#if !defined(MYVISION_EMULATOR)
// Runs kernel on `blocks` blocks of `threads`; no block, no launch.
#define MYVISION_LAUNCH(kernel, blocks, threads, stream, ...)              \
  do {                                                                     \
    if ((blocks) > 0) kernel<<<blocks, threads, 0, stream>>>(__VA_ARGS__); \
  } while (false)
// A variable in the block's shared memory; the third argument holds the dimensions of an array.
#define MYVISION_SHARED(type, name, ...) __shared__ type name __VA_ARGS__
#endif

namespace myvision {

#if defined(MYVISION_EMULATOR)
using GpuStream = simt::Stream;
inline const char* launch_error() { return simt::launch_error(); }
inline constexpr int kWarpSize = simt::kWarpSize;
inline constexpr int64_t kMaxBlocks = simt::kMaxBlocks;  // few, so that small tests make blocks loop
#elif defined(__HIP__) || defined(__HIPCC__)
using GpuStream = hipStream_t;
// Null, or what went wrong with the last launch.
inline const char* launch_error() {
  const hipError_t error = hipGetLastError();
  return error == hipSuccess ? nullptr : hipGetErrorString(error);
}
#if defined(__GFX9__)
inline constexpr int kWarpSize = 64;
#else
inline constexpr int kWarpSize = 32;
#endif
#else
using GpuStream = cudaStream_t;
// Null, or what went wrong with the last launch.
inline const char* launch_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
inline constexpr int kWarpSize = 32;
#endif

// ---- element types --------------------------------------------------------------------------------------------------

using Half = __half;
#if defined(__HIP__) || defined(__HIPCC__)
using BFloat16 = hip_bfloat16;
#else
using BFloat16 = __nv_bfloat16;
#endif

// What arithmetic on T runs in.
template <typename T>
using RealOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

__device__ __forceinline__ double to_real(double value) { return value; }
__device__ __forceinline__ float to_real(float value) { return value; }
__device__ __forceinline__ float to_real(Half value) { return __half2float(value); }
#if defined(__HIP__) || defined(__HIPCC__)
__device__ __forceinline__ float to_real(BFloat16 value) { return static_cast<float>(value); }
#else
__device__ __forceinline__ float to_real(BFloat16 value) { return __bfloat162float(value); }
#endif

template <typename T>
__device__ __forceinline__ T from_real(RealOf<T> value) {
  if constexpr (std::is_same_v<T, Half>) {
    return __float2half(value);
#if !defined(__HIP__) && !defined(__HIPCC__)
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return __float2bfloat16(value);
#endif
  } else {
    return T(value);
  }
}

// Calls visit with a value of the dtype's element type; the result is visit's, or a text where dtype is no float.
template <typename Visit>
const char* visit_floating(Dtype dtype, Visit visit) {
  switch (dtype) {
    case Dtype::Float64:
      return visit(double{});
    case Dtype::Float32:
      return visit(float{});
    case Dtype::Float16:
      return visit(Half{});
    case Dtype::BFloat16:
      return visit(BFloat16{});
    default:
      return "this operator takes floating dtypes only";
  }
}

// ---- memory ---------------------------------------------------------------------------------------------------------

inline constexpr int kVectorBytes = 16;  // the widest access of a thread

// kWidth elements that are read and written by one access; their address is a multiple of their size.
template <typename T, int kWidth>
struct alignas(kWidth * sizeof(T)) Pack {
  T value[kWidth];
};

inline bool is_vector_aligned(const void* data) { return reinterpret_cast<std::uintptr_t>(data) % kVectorBytes == 0; }

// ---- grids ----------------------------------------------------------------------------------------------------------

// Every kernel loops until its work is done, whatever the grid.
#if !defined(MYVISION_EMULATOR)
inline constexpr int64_t kMaxBlocks = INT32_MAX;  // of a grid's x dimension
#endif
inline constexpr int kWalkThreads = 256;         // of a block that walks over elements, one per thread and step
inline constexpr int64_t kWalkBlocks = 1 << 16;  // fills any GPU many times over

inline unsigned blocks_for(int64_t pieces) { return static_cast<unsigned>(std::min(pieces, kMaxBlocks)); }
inline unsigned walk_blocks(int64_t elements) {
  return blocks_for(std::min((elements + kWalkThreads - 1) / kWalkThreads, kWalkBlocks));
}

__device__ __forceinline__ int64_t global_thread() { return int64_t(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ __forceinline__ int64_t global_threads() { return int64_t(gridDim.x) * blockDim.x; }

// a / b, by the much cheaper 32-bit division where both allow it; neither may be negative.
__device__ __forceinline__ int64_t divide(int64_t a, int64_t b) {
  if ((a | b) >> 32 == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

// ---- reductions -----------------------------------------------------------------------------------------------------

template <typename T>
__device__ __forceinline__ T shuffle_xor(T value, int lane_mask) {
#if defined(__HIP__) || defined(__HIPCC__)
  return __shfl_xor(value, lane_mask);
#elif defined(MYVISION_EMULATOR)
  return simt::shuffle_xor(value, lane_mask);
#else
  return __shfl_xor_sync(0xffffffffu, value, lane_mask);
#endif
}

// Of all lanes, in every lane: each adds in the same order.
template <typename Real>
__device__ __forceinline__ Real warp_sum(Real value) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) value += shuffle_xor(value, distance);
  return value;
}

// Of all threads, in every thread. kThreads is the block's size, a multiple of the warp size.
template <int kThreads, typename Real>
__device__ __forceinline__ Real block_sum(Real value) {
  MYVISION_SHARED(Real, warp_sums, [kThreads / kWarpSize]);
  value = warp_sum(value);
  __syncthreads();  // the readers of an earlier call are done
  if (threadIdx.x % kWarpSize == 0) warp_sums[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  value = warp_sums[0];
#pragma unroll
  for (int warp = 1; warp < kThreads / kWarpSize; ++warp) value += warp_sums[warp];
  return value;
}

}  // namespace myvision
