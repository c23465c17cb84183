// Kernels with a bug each, beside their correct selves: shows that the emulator finds what it is there to find.
//   seeded_bugs NAME correct|seeded
// exits with 0 where the result is right, with 1 where it is wrong or the emulator stopped the kernel.
// tests/test_simt.py says which bug is found by what.
#include <algorithm>
#include <cstdio>
#include <iterator>
#include <map>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/gpu.cuh"

namespace myvision {
namespace {

constexpr int kThreads = 128;

using Kernel = void (*)(const float* input, float* output);

// Each writes its input in reverse, unless it says otherwise.
template <bool kSeeded>
__global__ void missing_barrier(const float* input, float* output) {
  MYVISION_SHARED(float, shared, [kThreads]);
  shared[threadIdx.x] = input[threadIdx.x];
  if (!kSeeded) __syncthreads();
  output[threadIdx.x] = shared[kThreads - 1 - threadIdx.x];
}

// Seeded, a fast thread overwrites what a slow one has still to read.
template <bool kSeeded>
__global__ void missing_second_barrier(const float* input, float* output) {
  MYVISION_SHARED(float, shared, [kThreads]);
  float sum = 0;
  for (int round = 0; round < 2; ++round) {
    shared[threadIdx.x] = input[threadIdx.x] * (1 + round);
    __syncthreads();
    sum += shared[kThreads - 1 - threadIdx.x];
    if (!kSeeded) __syncthreads();
  }
  output[threadIdx.x] = sum / 3;
}

template <bool kSeeded>
__global__ void missing_warp_barrier(const float* input, float* output) {
  MYVISION_SHARED(float, shared, [kThreads]);
  shared[threadIdx.x] = input[kThreads - 1 - threadIdx.x];
  if (!kSeeded) sync_warp();
  const float neighbour = shared[threadIdx.x ^ 1];
  output[threadIdx.x] = shuffle_xor(neighbour, 1);  // which orders no memory
}

template <bool kSeeded>
__global__ void divergent_barrier(const float* input, float* output) {
  MYVISION_SHARED(float, shared, [kThreads]);
  shared[threadIdx.x] = input[threadIdx.x];
  if (kSeeded && threadIdx.x < kThreads / 2) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  output[threadIdx.x] = shared[kThreads - 1 - threadIdx.x];
}

// Seeded, half of a warp waits for the other half, and that for the whole block.
template <bool kSeeded>
__global__ void hang(const float* input, float* output) {
  float value = input[kThreads - 1 - threadIdx.x];
  if (!kSeeded || threadIdx.x % kWarpSize < kWarpSize / 2) value = shuffle_xor(shuffle_xor(value, 1), 1);
  __syncthreads();
  output[threadIdx.x] = value;
}

template <bool kSeeded>
__global__ void exited_lane(const float* input, float* output) {
  if (kSeeded && threadIdx.x % kWarpSize == 20) return;
  output[threadIdx.x] = shuffle_xor(shuffle_xor(input[kThreads - 1 - threadIdx.x], 1), 1);
}

template <bool kSeeded>
__global__ void divergent_warp(const float* input, float* output) {
  float value = input[kThreads - 1 - threadIdx.x];
  if (kSeeded && threadIdx.x % 2) {
    value = shuffle_xor(value, 2);
  } else {
    value = shuffle_xor(value, 2);
  }
  output[threadIdx.x] = shuffle_xor(value, 2);
}

template <bool kSeeded>
__global__ void part_of_a_warp(const float* input, float* output) {
  float value = input[kThreads - 1 - threadIdx.x];
  output[threadIdx.x] = kSeeded || blockDim.x % kWarpSize == 0 ? shuffle_xor(shuffle_xor(value, 1), 1) : value;
}

// The first output is a sum of equal parts.
template <bool kSeeded>
__device__ void add_part(float* output, float part) {
  if (kSeeded) {
    output[0] += part;
  } else {
    atomic_add(output, part);
  }
}

template <bool kSeeded>
__global__ void non_atomic_sum(const float* input, float* output) {
  if (threadIdx.x > 0) output[threadIdx.x] = input[kThreads - 1 - threadIdx.x];
  add_part<kSeeded>(output, input[kThreads - 1] / kThreads);
}

template <bool kSeeded>
__global__ void non_atomic_sum_of_blocks(const float* input, float* output) {
  const bool writes = blockIdx.x == 0 && threadIdx.x > 0;
  if (writes) output[threadIdx.x] = input[kThreads - 1 - threadIdx.x];
  __syncthreads();  // which orders the threads of a block only
  if (threadIdx.x == 0) add_part<kSeeded>(output, input[kThreads - 1] / float(gridDim.x));
}

template <bool kSeeded>
__global__ void outside_of_shared_memory(const float* input, float* output) {
  MYVISION_SHARED(float, shared, [kThreads]);
  MYVISION_SHARED(float, other, [kThreads]);
  other[threadIdx.x] = 0;
  shared[threadIdx.x] = input[threadIdx.x];
  __syncthreads();
  output[threadIdx.x] = shared[kThreads - 1 - threadIdx.x];
  const float* next = shared + 1;
  if (kSeeded) other[threadIdx.x] = next[threadIdx.x];
}

template <bool kSeeded>
__global__ void outside_of_dynamic_shared_memory(const float* input, float* output) {
  MYVISION_DYNAMIC_SHARED(float, shared, 0);
  shared[threadIdx.x + kSeeded] = input[threadIdx.x];
  __syncthreads();
  output[threadIdx.x] = shared[kThreads - 1 - threadIdx.x + kSeeded];
}

// Its variable is of 512 bytes.
template <bool kSeeded>
__global__ void undeclared_variable(const float* input, float* output) {
  MYVISION_DYNAMIC_SHARED(float, shared, sizeof(float) * (kSeeded ? kThreads / 2 : kThreads));
  MYVISION_SHARED(float, variable, [kThreads]);
  shared[threadIdx.x] = variable[threadIdx.x] = input[threadIdx.x];
  __syncthreads();
  output[threadIdx.x] = (shared[kThreads - 1 - threadIdx.x] + variable[kThreads - 1 - threadIdx.x]) / 2;
}

// Seeded, a launch is as large as it may be without the kernel's variable.
template <bool kSeeded>
__global__ void forgotten_variable(const float* input, float* output) {
  undeclared_variable<false>(input, output);
}

template <bool kSeeded>
__global__ void too_much_shared_memory(const float* input, float* output) {
  undeclared_variable<false>(input, output);
}

template <bool kSeeded>
__global__ void outside_of_a_tensor(const float* input, float* output) {
  output[threadIdx.x + kSeeded] = input[kThreads - 1 - threadIdx.x];
}

template <bool kSeeded>
__global__ void uninitialised_shared_memory(const float* input, float* output) {
  MYVISION_SHARED(float, shared, [kThreads]);
  if (!kSeeded || threadIdx.x != 5) shared[threadIdx.x] = input[threadIdx.x];
  __syncthreads();
  output[threadIdx.x] = shared[kThreads - 1 - threadIdx.x];
}

struct alignas(kVectorBytes) Row {
  float value[kThreads];
};
constexpr int kWidth = kVectorBytes / sizeof(float);

__device__ void copy_row(Row& row, const float* input) {
  const int first = threadIdx.x * kWidth;
  if (first < kThreads) copy_async(&row.value[first], input + first);
  commit_copies();
}

template <bool kSeeded>
__global__ void missing_copy_wait(const float* input, float* output) {
  MYVISION_SHARED(Row, row);
  copy_row(row, input);
  if (!kSeeded) wait_for_copies<0>();
  __syncthreads();
  output[threadIdx.x] = row.value[kThreads - 1 - threadIdx.x];
}

// Two copies are under way, the first of which is needed; seeded, it waits until two or fewer are.
template <bool kSeeded>
__global__ void too_short_copy_wait(const float* input, float* output) {
  MYVISION_SHARED(Row, first);
  MYVISION_SHARED(Row, second);
  copy_row(first, input);
  copy_row(second, input);
  wait_for_copies<kSeeded ? 2 : 1>();
  __syncthreads();
  output[threadIdx.x] = first.value[kThreads - 1 - threadIdx.x];
}

// Seeded, the next copy overwrites what is still to be read.
template <bool kSeeded>
__global__ void early_copy(const float* input, float* output) {
  MYVISION_SHARED(Row, row);
  copy_row(row, input);
  wait_for_copies<0>();
  __syncthreads();
  if (kSeeded) copy_row(row, input + kThreads);
  output[threadIdx.x] = row.value[kThreads - 1 - threadIdx.x];
  __syncthreads();
  copy_row(row, input + kThreads);
  wait_for_copies<0>();
}

template <bool kSeeded>
__global__ void misaligned_vector(const float* input, float* output) {
  const int first = threadIdx.x * kWidth;
  if (first >= kThreads) return;
  const Pack<float, kWidth> pack = load_vector<kWidth>(input + first + kSeeded);
  for (int i = 0; i < kWidth; ++i) output[kThreads - 1 - first - i] = pack.value[i];
}

// Without load_vector, which checks.
template <bool kSeeded>
__global__ void misaligned_pointer(const float* input, float* output) {
  const int first = threadIdx.x * kWidth;
  if (first >= kThreads) return;
  const auto& pack = *reinterpret_cast<const Pack<float, kWidth>*>(input + first + kSeeded);
  for (int i = 0; i < kWidth; ++i) output[kThreads - 1 - first - i] = pack.value[i];
}

// ---- the program ----------------------------------------------------------------------------------------------------

constexpr int kDynamicBytes = kThreads * sizeof(float);

struct Bug {
  Kernel seeded, correct;
  int blocks = 1, seeded_threads = kThreads, seeded_bytes = kDynamicBytes;
  bool asks = true;  // for its dynamic shared memory, where seeded
};

#define BUG(name) \
  #name, Bug { name<true>, name<false> }
const std::map<std::string, Bug> kBugs = {
    {BUG(missing_barrier)},
    {BUG(missing_second_barrier)},
    {BUG(missing_warp_barrier)},
    {BUG(divergent_barrier)},
    {BUG(hang)},
    {BUG(exited_lane)},
    {BUG(divergent_warp)},
    {"part_of_a_warp", {part_of_a_warp<true>, part_of_a_warp<false>, 1, kThreads - 1}},
    {BUG(non_atomic_sum)},
    {"non_atomic_sum_of_blocks", {non_atomic_sum_of_blocks<true>, non_atomic_sum_of_blocks<false>, 4}},
    {BUG(outside_of_shared_memory)},
    {BUG(outside_of_dynamic_shared_memory)},
    {BUG(undeclared_variable)},
    {"forgotten_variable",
     {forgotten_variable<true>, forgotten_variable<false>, 1, kThreads, simt::kUnaskedSharedBytes, false}},
    {"too_much_shared_memory",
     {too_much_shared_memory<true>, too_much_shared_memory<false>, 1, kThreads, simt::kMaxSharedBytes}},
    {BUG(outside_of_a_tensor)},
    {BUG(uninitialised_shared_memory)},
    {BUG(missing_copy_wait)},
    {BUG(too_short_copy_wait)},
    {BUG(early_copy)},
    {BUG(misaligned_vector)},
    {BUG(misaligned_pointer)},
    {"too_many_threads", {missing_barrier<false>, missing_barrier<false>, 1, 2048}},
};

// Whether the result is right.
bool run(const Bug& bug, bool seeded) {
  alignas(kVectorBytes) static float input[2 * kThreads];
  std::iota(std::begin(input), std::end(input), 1.0f);
  std::vector<float> output(kThreads);
  if (!seeded) {
    MYVISION_LAUNCH_WITH_SHARED(bug.correct, bug.blocks, kThreads, kDynamicBytes, nullptr, input, output.data());
  } else if (bug.asks) {
    MYVISION_LAUNCH_WITH_SHARED(bug.seeded, bug.blocks, bug.seeded_threads, bug.seeded_bytes, nullptr, input,
                                output.data());
  } else {
    MYVISION_START(bug.seeded, bug.blocks, bug.seeded_threads, bug.seeded_bytes, nullptr, input, output.data());
  }
  if (const char* error = launch_error()) throw std::runtime_error(error);
  return std::equal(output.begin(), output.end(), std::make_reverse_iterator(input + kThreads));
}

}  // namespace
}  // namespace myvision

int main(int count, char** arguments) {
  const auto bug = count == 3 ? myvision::kBugs.find(arguments[1]) : myvision::kBugs.end();
  if (bug == myvision::kBugs.end()) {
    std::fprintf(stderr, "usage: seeded_bugs NAME correct|seeded\n");
    return 2;
  }
  try {
    const bool right = myvision::run(bug->second, arguments[2] == std::string("seeded"));
    std::puts(right ? "right" : "wrong");
    return right ? 0 : 1;
  } catch (const std::exception& error) {
    std::puts(error.what());
    return 1;
  }
}
