// Marks functions that run on the host and inside GPU kernels.
#pragma once
#if defined(__HIPCC__) || defined(__HIP__)  // whose __forceinline__ comes with a header that may be yet to come
#define MYVISION_HOST_DEVICE __host__ __device__ inline __attribute__((always_inline))
#elif defined(__CUDACC__)
#define MYVISION_HOST_DEVICE __host__ __device__ __forceinline__
#elif defined(_MSC_VER)
#define MYVISION_HOST_DEVICE __forceinline
#else
#define MYVISION_HOST_DEVICE inline __attribute__((always_inline))
#endif
