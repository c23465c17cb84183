// gpu.cuh's primitives on the emulated GPU of machine.h, and the words of CUDA that C++ lacks.
#pragma once
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <tuple>

#include "simt/collectives.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define MYVISION_LAUNCH_BOUNDS(threads, min_blocks)

#define MYVISION_START(kernel, blocks, threads, bytes, stream, ...) \
  static_cast<void>(stream), simt::launch(blocks, threads, bytes, kernel, __VA_ARGS__)
#define MYVISION_SHARED(type, name, ...) \
  static char name##_key;                \
  using name##_type = type __VA_ARGS__;  \
  name##_type& name =                    \
      *static_cast<name##_type*>(simt::shared_variable(&name##_key, sizeof(name##_type), alignof(name##_type)))
#define MYVISION_DYNAMIC_SHARED(type, name, ...) \
  type* const name = static_cast<type*>(simt::dynamic_shared(__VA_ARGS__))

using std::max;
using std::min;
inline void __syncthreads(SIMT_CALLER) { simt::barrier(caller); }
inline float rsqrtf(float value) { return 1 / std::sqrt(value); }

namespace simt {

// The arguments are copied once, when the kernel is launched.
template <typename... Parameters, typename... Arguments>
void launch(dim3 blocks, dim3 threads, size_t shared_bytes, void (*kernel)(Parameters...), Arguments&&... arguments) {
  const std::tuple<Parameters...> copies(static_cast<Parameters>(arguments)...);
  run(reinterpret_cast<const void*>(kernel), blocks, threads, shared_bytes, [&] { std::apply(kernel, copies); });
}

}  // namespace simt

// ---- the primitives of gpu.cuh --------------------------------------------------------------------------------------

namespace myvision {

using GpuStream = void*;
using Half = c10::Half;
using BFloat16 = c10::BFloat16;
using simt::commit_copies;
using simt::kWarpSize;
using simt::launch_error;

inline constexpr int64_t kMaxBlocks = 3;
inline constexpr int64_t kScratchBytes = 512;  // so that batches are done in parts
inline constexpr bool kHasMma = kWarpSize == 32;
template <typename Kernel>
bool device_has_mma(Kernel*) {
  return kHasMma;
}

inline int current_device() { return 0; }
inline void set_dynamic_shared_limit(const void* kernel, int bytes) { simt::set_dynamic_shared_limit(kernel, bytes); }

inline float to_real(Half value) { return value; }
inline float to_real(BFloat16 value) { return value; }
inline void set_real(Half& target, float value) { target = value; }
inline void set_real(BFloat16& target, float value) { target = value; }

template <int kWidth, typename T>
Pack<T, kWidth> load_vector(const T* data, SIMT_CALLER) {
  simt::check_alignment(data, alignof(Pack<T, kWidth>), caller);
  return *reinterpret_cast<const Pack<T, kWidth>*>(data);
}

template <int kWidth, typename T>
void store_vector(T* data, const Pack<T, kWidth>& pack, SIMT_CALLER) {
  simt::check_alignment(data, alignof(Pack<T, kWidth>), caller);
  *reinterpret_cast<Pack<T, kWidth>*>(data) = pack;
}

template <typename T>
T shuffle(T value, int lane, SIMT_CALLER) {
  static_assert(sizeof(T) <= sizeof(simt::Shuffle::Value));
  simt::Shuffle operands{lane};
  std::memcpy(&operands.brought, &value, sizeof(T));
  simt::shuffle(operands, caller);
  std::memcpy(&value, &operands.taken, sizeof(T));
  return value;
}

template <typename T>
T shuffle_xor(T value, int lane_mask, SIMT_CALLER) {
  return myvision::shuffle(value, simt::lane() ^ lane_mask, caller);
}

inline void sync_warp(SIMT_CALLER) { simt::warp_barrier(caller); }

template <typename Real>
Real rounded_product(Real a, Real b) {
  return a * b;  // compiled for a processor without fused additions
}

template <typename T>
void atomic_add(T* target, T value) {
  std::atomic_ref<T>(*target).fetch_add(value, std::memory_order_relaxed);
}

inline void copy_async(void* to_shared, const void* from_global, SIMT_CALLER) {
  simt::check_alignment(to_shared, kVectorBytes, caller);
  simt::check_alignment(from_global, kVectorBytes, caller);
  const auto do_copy = [](void* to, const void* from) {
    using Bytes = Pack<char, kVectorBytes>;
    *static_cast<Bytes*>(to) = *static_cast<const Bytes*>(from);
  };
  simt::copy_async(to_shared, from_global, do_copy, caller);
}

template <int kPending>
void wait_for_copies() {
  simt::wait_for_copies(kPending);
}

template <typename T>
void mma_m16n8k16(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], SIMT_CALLER) {
  static_assert(sizeof(T) == 2 && kHasMma, "guard it by if constexpr (kHasMma)");
  simt::Mma operands{a, b, sums};
  simt::mma<T>(operands, caller);
}

template <bool kTransposed, int kCount>
void ldmatrix(uint32_t (&matrices)[kCount], const void* row, SIMT_CALLER) {
  static_assert(kHasMma && (kCount == 1 || kCount == 2 || kCount == 4), "guard it by if constexpr (kHasMma)");
  simt::LoadMatrices operands{kCount, kTransposed, matrices};
  if (simt::lane() < 8 * kCount) {  // the other lanes' addresses are of no use
    simt::check_alignment(row, sizeof(operands.row), caller);
    operands.row = *static_cast<const simt::LoadMatrices::Row*>(row);
  }
  simt::load_matrices(operands, caller);
}

}  // namespace myvision
