// A GPU emulated on the CPU: one fiber per GPU thread, one block at a time. It stops with simt::Fault, which tells
// file, line and thread, where threads of a block wait at different barriers, lanes of a warp take part in different
// collectives or have exited, everybody waits in vain, or an address is not aligned.
//
// It also refuses what a GPU refuses: blocks with more than 48 KB of shared memory, variables included, from a kernel
// that has not asked for more, and with more than GPUs have from one that has.
//
// Built with a sanitizer it finds more. AddressSanitizer: accesses outside of tensors and shared variables. UBSan:
// misaligned access. ThreadSanitizer: races, as only barriers and warp barriers order the threads of a block, and
// nothing orders blocks. Shared memory is filled with NaN for each block.
//
// What runs when is up to the environment, read at each launch, and the same in every run:
//   SIMT_ORDER   forward (default), reverse, random, or warp: one warp at a time runs as far as it can
//   SIMT_SEED    a number, for random and warp
//   SIMT_COPIES  lazy (default): asynchronous copies happen when they are waited for; eager: at once
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <source_location>
#include <stdexcept>

#ifndef SIMT_WARP_SIZE
#define SIMT_WARP_SIZE 32
#endif

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// As a kernel sees them.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace simt {

inline constexpr int kWarpSize = SIMT_WARP_SIZE;

using Location = std::source_location;
#define SIMT_CALLER simt::Location caller = simt::Location::current()

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// ---- called by the host ---------------------------------------------------------------------------------------------

// Of a block, variables included: where the kernel has not asked for more, and where it has. The latter is what the
// least of NVIDIA's GPUs from sm_80 on have (sm_86, sm_89 and sm_120), or, with warps of 64 lanes, AMD's.
inline constexpr size_t kUnaskedSharedBytes = 48 * 1024;
inline constexpr size_t kMaxSharedBytes = (kWarpSize == 32 ? 99 : 64) * 1024;

// Lets a kernel have so many bytes of dynamic shared memory.
void set_dynamic_shared_limit(const void* kernel, size_t bytes);

// Calls `call`, which calls the kernel, once per thread. A launch that a GPU would refuse does nothing but for
// launch_error, or raises a Fault as soon as it is known how much shared memory the kernel's variables take.
void run(const void* kernel, dim3 blocks, dim3 threads, size_t dynamic_shared_bytes, const std::function<void()>& call);

// Null, or what was wrong with the last launch.
const char* launch_error();

// ---- called by kernels ----------------------------------------------------------------------------------------------

void check_alignment(const void* data, size_t alignment, Location caller);

void barrier(Location caller);
void warp_barrier(Location caller);

// A variable of the block, the same for each thread that brings the same key.
void* shared_variable(const void* key, size_t bytes, size_t alignment, SIMT_CALLER);
// The block's dynamic shared memory, of a kernel whose variables take at most `declared` bytes.
void* dynamic_shared(size_t declared, SIMT_CALLER);

int lane();

// The lanes of a warp wait for each other. The last to come calls resolve with what each has brought.
using Resolve = void (*)(void* const* operands);
void collective(const char* operation, void* operands, Resolve resolve, Location caller);

// do_copy(to, from) runs when the copy happens.
void copy_async(void* to, const void* from, void (*do_copy)(void*, const void*), Location caller);
void commit_copies();
void wait_for_copies(int pending_groups);

}  // namespace simt
