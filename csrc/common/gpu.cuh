// One kernel source for CUDA, HIP and the CPU emulator. What differs between them stands in nvidia.cuh, amd.cuh and
// tests/simt/simt.h, under the names that are listed here; what kernels share stands below.
//
//   Half, BFloat16, to_real, from_real    element types, and the way to float and back
//   kWarpSize                             32, or 64 on some AMD GPUs; a collective takes every lane of a whole warp
//   shuffle(value, lane)                  the value of another lane; orders no memory
//   shuffle_xor(value, lane_mask)         that of the lane whose number differs in these bits
//   sync_warp()                           orders the memory accesses of a warp, as __syncthreads() those of a block
//   rounded_product(a, b)                 a * b, of float or double, that no compiler fuses with an addition: kernels
//                                         that have to agree on a number multiply by it
//   atomic_add(target, value)             relaxed: of no use as a signal
//   load_vector, store_vector             up to 16 bytes by one access
//   copy_async(to_shared, from_global)    16 bytes, aligned, that arrive by the time wait_for_copies says so
//   commit_copies()                       makes a group of the thread's copies since the last call
//   wait_for_copies<kPending>()           until at most so many of the thread's groups are under way; other threads see
//                                         what arrived after a barrier
//   kHasMma                               whether device code may use the next two; choose by if constexpr
//   device_has_mma(kernel)                whether what the current GPU runs of the kernel was compiled with them: on
//   the
//                                         host, where kHasMma
//   mma_m16n8k16<T>(sums, a, b)           sums += a [16 x 16] * b [16 x 8], T is Half or BFloat16, sums are float
//   ldmatrix<kTransposed>(matrices, row)  1, 2 or 4 matrices [8 x 8] of 16-bit elements; lane i brings the address of
//                                         row i % 8 of matrix i / 8
//   current_device()                      the GPU that the host's thread launches on
//   set_dynamic_shared_limit(kernel, n)   lets the kernel have n bytes of dynamic shared memory on the current GPU
//
// Lane l of a warp, with g = l / 4 and t = l % 4, holds two neighbours of a row (of b: of a column) in each register:
//   a[i]        row g + i % 2 * 8, columns 2 t + i / 2 * 8 and the next
//   b[i]        column g, rows 2 t + i * 8 and the next
//   sums[i]     row g + i / 2 * 8, column 2 t + i % 2
//   matrices[i] row g, columns 2 t and the next of matrix i (of its transpose where kTransposed)
#pragma once
#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <type_traits>
#include <utility>

#include "common/dtype.h"

namespace myvision {

inline constexpr int kVectorBytes = 16;                // the widest access of a thread
inline constexpr int kUnaskedSharedBytes = 48 * 1024;  // of a block, its variables included; for more a kernel must ask

// kWidth elements that are read and written by one access; their address is a multiple of their size.
template <typename T, int kWidth>
struct alignas(kWidth * sizeof(T)) Pack {
  T value[kWidth];
};

// A number for each kernel on each GPU, 0 at first.
class NumberOfKernels {
 public:
  // Calls update with the number, for one host thread at a time, and returns what it is then.
  template <typename Update>
  int update(const void* kernel, int device, Update update) {
    const std::lock_guard lock(mutex_);
    int& number = numbers_[{kernel, device}];
    update(number);
    return number;
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<const void*, int>, int> numbers_;
};

}  // namespace myvision

#if defined(MYVISION_EMULATOR)
#include "simt/simt.h"
#elif defined(__HIP__) || defined(__HIPCC__)
#include "common/amd.cuh"
#else
#include "common/nvidia.cuh"
#endif

#if !defined(MYVISION_EMULATOR)
#define MYVISION_START(kernel, blocks, threads, bytes, stream, ...) \
  kernel<<<blocks, threads, bytes, stream>>>(__VA_ARGS__)
// A variable in the block's shared memory; the third argument holds the dimensions of an array.
#define MYVISION_SHARED(type, name, ...) __shared__ type name __VA_ARGS__
// Points name to the dynamic shared memory. The third argument, a constant, declares how many bytes the kernel's
// variables in shared memory take beside it: the emulator holds kernels to it, and tools/check_gpu_build.py compares
// what compilers find, as it reads in their assembly.
#define MYVISION_DYNAMIC_SHARED(type, name, ...)                                           \
  extern __shared__ __align__(16) unsigned char myvision_dynamic_shared[];                 \
  asm volatile(MYVISION_ASSEMBLY_COMMENT "shared variables: %0 bytes" ::"n"(__VA_ARGS__)); \
  type* const name = reinterpret_cast<type*>(myvision_dynamic_shared)
#endif
// Runs kernel on `blocks` blocks of `threads` with `bytes` of dynamic shared memory; no block, no launch.
#define MYVISION_LAUNCH_WITH_SHARED(kernel, blocks, threads, bytes, stream, ...)    \
  do {                                                                              \
    if ((blocks) > 0) {                                                             \
      myvision::allow_dynamic_shared(reinterpret_cast<const void*>(kernel), bytes); \
      MYVISION_START(kernel, blocks, threads, bytes, stream, __VA_ARGS__);          \
    }                                                                               \
  } while (false)
#define MYVISION_LAUNCH(kernel, blocks, threads, stream, ...) \
  MYVISION_LAUNCH_WITH_SHARED(kernel, blocks, threads, 0, stream, __VA_ARGS__)

namespace myvision {

// ---- launches -------------------------------------------------------------------------------------------------------

// Before a launch with so many bytes. A kernel's variables share the memory that it need not ask for, so it asks for
// any dynamic memory; and never for less than before, as another thread may be about to launch with that.
inline void allow_dynamic_shared(const void* kernel, int bytes) {
  static NumberOfKernels limits;
  if (bytes == 0) return;
  limits.update(kernel, current_device(), [&](int& limit) {
    if (bytes <= limit) return;
    set_dynamic_shared_limit(kernel, bytes);
    limit = bytes;
  });
}

// ---- element types --------------------------------------------------------------------------------------------------

// What arithmetic on T runs in.
template <typename T>
using RealOf = std::conditional_t<std::is_same_v<T, double>, double, float>;
inline int64_t real_size(Dtype dtype) { return dtype == Dtype::Float64 ? sizeof(double) : sizeof(float); }

__device__ __forceinline__ double to_real(double value) { return value; }
__device__ __forceinline__ float to_real(float value) { return value; }

template <typename T>
__device__ __forceinline__ T from_real(RealOf<T> value) {
  if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>) {
    T rounded;
    set_real(rounded, value);
    return rounded;
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

inline bool is_vector_aligned(const void* data) { return reinterpret_cast<std::uintptr_t>(data) % kVectorBytes == 0; }

#if !defined(MYVISION_EMULATOR)  // which checks alignment
template <int kWidth, typename T>
__device__ __forceinline__ Pack<T, kWidth> load_vector(const T* data) {
  return *reinterpret_cast<const Pack<T, kWidth>*>(data);
}

template <int kWidth, typename T>
__device__ __forceinline__ void store_vector(T* data, const Pack<T, kWidth>& pack) {
  *reinterpret_cast<Pack<T, kWidth>*>(data) = pack;
}
#endif

// A pack whose elements lie `stride` apart; one access where they are neighbours.
template <int kWidth, typename T>
__device__ __forceinline__ Pack<T, kWidth> load_pack(const T* data, int64_t stride) {
  if (stride == 1) return load_vector<kWidth>(data);
  Pack<T, kWidth> pack;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) pack.value[i] = data[i * stride];
  return pack;
}

template <int kWidth, typename T>
__device__ __forceinline__ void store_pack(T* data, int64_t stride, const Pack<T, kWidth>& pack) {
  if (stride == 1) return store_vector(data, pack);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) data[i * stride] = pack.value[i];
}

// A pack as arithmetic takes it, and back.
template <typename T, int kWidth>
__device__ __forceinline__ Pack<RealOf<T>, kWidth> reals_of(const Pack<T, kWidth>& pack) {
  Pack<RealOf<T>, kWidth> reals;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) reals.value[j] = to_real(pack.value[j]);
  return reals;
}

template <typename T, int kWidth>
__device__ __forceinline__ Pack<T, kWidth> rounded(const Pack<RealOf<T>, kWidth>& reals) {
  Pack<T, kWidth> pack;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) pack.value[j] = from_real<T>(reals.value[j]);
  return pack;
}

// ---- grids ----------------------------------------------------------------------------------------------------------

// Every kernel loops until its work is done, whatever the grid.
#if !defined(MYVISION_EMULATOR)                              // which takes little of both, so that small tests loop
inline constexpr int64_t kMaxBlocks = INT32_MAX;             // of a grid's x dimension
inline constexpr int64_t kScratchBytes = int64_t(64) << 20;  // beside the tensors, where parts of a batch do
#endif
inline constexpr int kWalkThreads = 256;         // of a block that walks over elements, one per thread and step
inline constexpr int64_t kWalkBlocks = 1 << 16;  // fills any GPU many times over

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline unsigned blocks_for(int64_t pieces) { return static_cast<unsigned>(std::min(pieces, kMaxBlocks)); }
inline unsigned walk_blocks(int64_t elements) {
  return blocks_for(std::min(ceil_div(elements, kWalkThreads), kWalkBlocks));
}

__device__ __forceinline__ int64_t global_thread() { return int64_t(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ __forceinline__ int64_t global_threads() { return int64_t(gridDim.x) * blockDim.x; }

// a / b, by the much cheaper 32-bit division where both allow it; neither may be negative.
__device__ __forceinline__ int64_t divide(int64_t a, int64_t b) {
  if ((a | b) >> 32 == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

// ---- reductions -----------------------------------------------------------------------------------------------------

inline constexpr int kMaxStridedSums = 256;  // of all warps of a block, in strided_sum

// Of all lanes, in every lane: each adds in the same order.
template <typename Real>
__device__ __forceinline__ Real warp_sum(Real value) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) value += shuffle_xor(value, distance);
  return value;
}

template <int kThreads, typename Real>
inline constexpr int kBlockSumBytes = kThreads / kWarpSize * sizeof(Real);  // of shared memory

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

// Two sums that are taken together.
template <typename Real>
struct Pair {
  Real first, second;

  __device__ __forceinline__ void operator+=(const Pair& other) {
    first += other.first;
    second += other.second;
  }
};

template <typename Real>
__device__ __forceinline__ Pair<Real> shuffle_xor(const Pair<Real>& value, int lane_mask) {
  return {shuffle_xor(value.first, lane_mask), shuffle_xor(value.second, lane_mask)};
}

template <typename Value>
inline constexpr int kStridedSumBytes = kMaxStridedSums * sizeof(Value);  // of shared memory

// Of the `count` threads whose numbers differ by multiples of `stride` alone, in each of them: so many sums at once.
// Both are powers of two, the same for the whole block, and count * stride divides its size.
template <typename Value>
__device__ __forceinline__ Value strided_sum(Value value, int stride, int count) {
  MYVISION_SHARED(Value, sums, [kMaxStridedSums]);
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  for (int distance = stride; distance < min(stride * count, kWarpSize); distance *= 2) {
    value += shuffle_xor(value, distance);
  }
  if (stride * count <= kWarpSize) return value;
  const int kept = min(stride, kWarpSize);  // sums of a warp
  const int warps = stride * count / kWarpSize, step = max(stride / kWarpSize, 1);
  __syncthreads();  // the readers of an earlier call are done
  if (lane < kept) sums[warp * kept + lane] = value;
  __syncthreads();
  const int first = warp / warps * warps + warp % step;
  value = sums[first * kept + lane % kept];
  for (int i = step; i < warps; i += step) value += sums[(first + i) * kept + lane % kept];
  return value;
}

}  // namespace myvision
