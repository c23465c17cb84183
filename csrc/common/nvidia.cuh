// gpu.cuh's primitives by nvcc.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#define MYVISION_LAUNCH_BOUNDS(threads, min_blocks) __launch_bounds__(threads, min_blocks)
#define MYVISION_ASSEMBLY_COMMENT "// "

namespace myvision {

using GpuStream = cudaStream_t;
using Half = __half;
using BFloat16 = __nv_bfloat16;

inline constexpr int kWarpSize = 32;
inline constexpr unsigned kWholeWarp = 0xffffffffu;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
inline constexpr bool kHasMma = true;
#else
inline constexpr bool kHasMma = false;
#endif

inline int current_device() {
  int device = 0;
  cudaGetDevice(&device);
  return device;
}

// Not every GPU that has them runs code that has them: it may run what was compiled for an older one. The code was
// compiled twice, to PTX for one GPU and from that for another; what the first did not know is not in it.
inline bool is_compiled_with_mma(const void* kernel) {
  cudaFuncAttributes attributes{};
  if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) {
    cudaGetLastError();  // a launch will tell
    return false;
  }
  return attributes.ptxVersion >= 80 && attributes.binaryVersion >= 80;
}

template <typename Kernel>
bool device_has_mma(Kernel* kernel) {
  static NumberOfKernels answers;  // 0 until asked, then 1 for no, 2 for yes
  const auto* address = reinterpret_cast<const void*>(kernel);
  return answers.update(address, current_device(), [&](int& answer) {
    if (answer == 0) answer = is_compiled_with_mma(address) ? 2 : 1;
  }) == 2;
}

inline const char* launch_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

inline void set_dynamic_shared_limit(const void* kernel, int bytes) {
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

__device__ __forceinline__ float to_real(Half value) { return __half2float(value); }
__device__ __forceinline__ float to_real(BFloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ void set_real(Half& target, float value) { target = __float2half(value); }
__device__ __forceinline__ void set_real(BFloat16& target, float value) { target = __float2bfloat16(value); }

template <typename T>
__device__ __forceinline__ T shuffle(T value, int lane) {
  return __shfl_sync(kWholeWarp, value, lane);
}
template <typename T>
__device__ __forceinline__ T shuffle_xor(T value, int lane_mask) {
  return __shfl_xor_sync(kWholeWarp, value, lane_mask);
}
__device__ __forceinline__ void sync_warp() { __syncwarp(); }

__device__ __forceinline__ float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double rounded_product(double a, double b) { return __dmul_rn(a, b); }

template <typename T>
__device__ __forceinline__ void atomic_add(T* target, T value) {
  atomicAdd(target, value);
}

// ---- tensor cores and asynchronous copies: instructions that C++ has no name for ------------------------------------

__device__ __forceinline__ unsigned shared_address(const void* data) {
  return static_cast<unsigned>(__cvta_generic_to_shared(data));
}

__device__ __forceinline__ void copy_async(void* to_shared, const void* from_global) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to_shared)), "l"(from_global)
               : "memory");
#else
  *static_cast<uint4*>(to_shared) = *static_cast<const uint4*>(from_global);
#endif
}

__device__ __forceinline__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// Parts of an instruction's name.
template <typename T>
struct MmaType;
template <>
struct MmaType<Half> {
  static constexpr char kName[] = "f16";
};
template <>
struct MmaType<BFloat16> {
  static constexpr char kName[] = "bf16";
};
template <bool kTransposed>
struct Transposition {
  static constexpr char kName[] = "";
};
template <>
struct Transposition<true> {
  static constexpr char kName[] = ".trans";
};

template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  static_assert(sizeof(T) == 2 && kHasMma, "guard it by if constexpr (kHasMma)");
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.%10.%10.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "C"(MmaType<T>::kName));
}

template <bool kTransposed, int kCount>
__device__ __forceinline__ void ldmatrix(uint32_t (&matrices)[kCount], const void* row) {
  static_assert(kCount <= 4 && kHasMma, "guard it by if constexpr (kHasMma)");
  const unsigned address = shared_address(row);
  if constexpr (kCount == 1) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1%2.shared.b16 {%0}, [%1];"
                 : "=r"(matrices[0])
                 : "r"(address), "C"(Transposition<kTransposed>::kName)
                 : "memory");
  } else if constexpr (kCount == 2) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2%3.shared.b16 {%0, %1}, [%2];"
                 : "=r"(matrices[0]), "=r"(matrices[1])
                 : "r"(address), "C"(Transposition<kTransposed>::kName)
                 : "memory");
  } else {
    static_assert(kCount == 4, "ldmatrix loads 1, 2 or 4 matrices");
    asm volatile("ldmatrix.sync.aligned.m8n8.x4%5.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(address), "C"(Transposition<kTransposed>::kName)
                 : "memory");
  }
}

}  // namespace myvision
