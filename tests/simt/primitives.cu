// What every primitive of gpu.cuh computes, bit for bit: a line of hexadecimal words each. The same program runs on
// the emulator and on a GPU, where it shows that the emulator tells the truth. From the repository's root:
//   nvcc -std=c++20 -arch=native -Icsrc tests/simt/primitives.cu -o on_gpu
//   g++ -std=c++20 -O1 -fno-strict-aliasing -DMYVISION_EMULATOR -Icsrc -Itests -isystem TORCH_INCLUDE -o emulated
//       -x c++ tests/simt/primitives.cu tests/simt/machine.cpp tests/simt/collectives.cpp
//   diff <(./on_gpu) <(./emulated)
// with the directory that torch.utils.cpp_extension.include_paths() names first. All sums are exact, as their order
// differs.
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "common/gpu.cuh"

namespace myvision {
namespace {

constexpr int kThreads = 4 * kWarpSize;

// A small whole number, another one at each place.
__device__ int number(unsigned place) { return static_cast<int>((place * 2654435761u >> 16) % 17) - 8; }

template <typename T>
__device__ T number_as(unsigned place) {
  if constexpr (std::is_integral_v<T>) return static_cast<T>(number(place));
  if constexpr (!std::is_integral_v<T>) return from_real<T>(RealOf<T>(number(place)));
}

// Writes the thread's value beside those of the others.
template <typename T>
__device__ void write(uint32_t* words, const T& value) {
  memcpy(words + threadIdx.x * ((sizeof(T) + 3) / 4), &value, sizeof(T));
}

template <typename T>
__device__ uint32_t bits(T value) {
  uint32_t word = 0;
  memcpy(&word, &value, sizeof(T));
  return word;
}

template <int kCount>
struct Words {
  uint32_t word[kCount];
};

// ---- products: the kernels of one warp ------------------------------------------------------------------------------

template <typename T>
__device__ uint32_t pair(unsigned place) {
  return bits(number_as<T>(place)) | bits(number_as<T>(place + 1)) << 16;
}

template <typename T>
__global__ void mma(uint32_t* words) {
  if constexpr (kHasMma) {
    const unsigned lane = threadIdx.x;
    uint32_t a[4], b[2];
    float sums[4];
    for (int i = 0; i < 4; ++i) a[i] = pair<T>(lane * 8 + 2 * i);
    for (int i = 0; i < 2; ++i) b[i] = pair<T>(1000 + lane * 4 + 2 * i);
    for (int i = 0; i < 4; ++i) sums[i] = number_as<float>(2000 + lane * 4 + i);
    mma_m16n8k16<T>(sums, a, b);
    mma_m16n8k16<T>(sums, a, b);
    write(words, Words<4>{bits(sums[0]), bits(sums[1]), bits(sums[2]), bits(sums[3])});
  }
}

struct alignas(kVectorBytes) Matrices {
  uint16_t row[32][24];  // 8 elements of each are loaded
};

template <int kCount, bool kTransposed>
__global__ void load_matrices(uint32_t* words) {
  if constexpr (kHasMma) {
    MYVISION_SHARED(Matrices, matrices);
    for (int i = 0; i < 24; ++i) matrices.row[threadIdx.x][i] = static_cast<uint16_t>(threadIdx.x * 256 + i);
    sync_warp();
    uint32_t loaded[kCount];
    ldmatrix<kTransposed>(loaded, &matrices.row[31 - threadIdx.x][8]);
    Words<kCount> result;
    for (int i = 0; i < kCount; ++i) result.word[i] = loaded[i];
    write(words, result);
  }
}

// ---- between threads ------------------------------------------------------------------------------------------------

template <typename T>
__global__ void shuffles(uint32_t* words) {
  const T value = number_as<T>(threadIdx.x);
  T result = shuffle(value, number(threadIdx.x) + 8);
  for (int lane_mask = 1; lane_mask < kWarpSize; lane_mask *= 2) result += shuffle_xor(value, lane_mask + 1) * T(2);
  write(words, result + warp_sum(value));
}

template <typename T>
__global__ void block_sums(uint32_t* words) {
  const T sum = block_sum<kThreads>(number_as<T>(threadIdx.x));
  write(words, sum + block_sum<kThreads>(number_as<T>(2 * threadIdx.x)));
}

constexpr int kPowers = std::bit_width(unsigned(kThreads));
constexpr int kSums = kPowers * (kPowers + 1) / 2;  // pairs of a stride and a count

template <typename T>
__global__ void strided_sums(uint32_t* words) {
  constexpr size_t kWords = kThreads * sizeof(T) / sizeof(*words);
  for (int stride = 1; stride <= kThreads; stride *= 2) {
    for (int count = 1; stride * count <= kThreads; count *= 2, words += kWords) {
      write(words, strided_sum(Pair<T>{number_as<T>(threadIdx.x), T(1)}, stride, count).first);
    }
  }
}

template <typename T>
__global__ void atomic_adds(uint32_t* words) {
  T* sums = reinterpret_cast<T*>(words);
  atomic_add(sums + threadIdx.x % 3, number_as<T>(threadIdx.x));
}

// ---- memory ---------------------------------------------------------------------------------------------------------

template <typename T>
__global__ void vectors(uint32_t* words) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  T* data = reinterpret_cast<T*>(words) + threadIdx.x * kWidth;
  for (int i = 0; i < kWidth; ++i) data[i] = number_as<T>(threadIdx.x * kWidth + i);
  Pack<T, kWidth> pack = load_vector<kWidth>(data);
  for (int i = 0; i < kWidth / 2; ++i) {
    const T first = pack.value[i];
    pack.value[i] = pack.value[kWidth - 1 - i];
    pack.value[kWidth - 1 - i] = first;
  }
  store_vector(data, pack);
}

struct alignas(kVectorBytes) Buffers {
  uint32_t word[2][kThreads * 4];
};

// Four stages through two buffers, the next under way while one is read, the source in the words that follow the
// result.
__global__ void asynchronous_copies(uint32_t* words) {
  MYVISION_SHARED(Buffers, buffers);
  uint32_t* source = words + kThreads;
  for (int stage = 0; stage < 4; ++stage) {
    for (int i = 0; i < 4; ++i)
      source[(stage * kThreads + threadIdx.x) * 4 + i] = number(stage * 1000 + 4 * threadIdx.x + i);
  }
  const auto copy = [&](int stage) {
    copy_async(&buffers.word[stage % 2][threadIdx.x * 4], &source[(stage * kThreads + threadIdx.x) * 4]);
    commit_copies();
  };
  uint32_t sum = 0;
  copy(0);
  for (int stage = 0; stage < 4; ++stage) {
    if (stage < 3) {
      copy(stage + 1);
      wait_for_copies<1>();
    } else {
      wait_for_copies<0>();
    }
    __syncthreads();
    for (int i = 0; i < 4; ++i) sum = sum * 31 + buffers.word[stage % 2][(kThreads - 1 - threadIdx.x) * 4 + i];
    __syncthreads();
  }
  words[threadIdx.x] = sum;
}

// In all more than the 48 KB that a kernel has unasked, and less than the 64 KB of GPUs with warps of 64.
constexpr int kSharedWords = 15 * 1024, kSharedStride = kSharedWords / kThreads;

__global__ void dynamic_shared_memory(uint32_t* words) {
  MYVISION_DYNAMIC_SHARED(uint32_t, shared, 0);
  shared[threadIdx.x * kSharedStride] = threadIdx.x;
  __syncthreads();
  words[threadIdx.x] = shared[(kThreads - 1 - threadIdx.x) * kSharedStride];
}

// ---- conversions, but of NaN, which has many forms ------------------------------------------------------------------

constexpr int kPatterns = 1 << 16;

template <typename T>
__global__ void to_float(uint32_t* words) {
  for (int i = threadIdx.x; i < kPatterns; i += blockDim.x) {
    const auto pattern = static_cast<uint16_t>(i);
    T value;
    memcpy(&value, &pattern, sizeof(value));
    const float real = to_real(value);
    words[i] = real == real ? bits(real) : 0;
  }
}

template <typename T>
__global__ void from_float(uint32_t* words) {
  for (unsigned i = threadIdx.x; i < kPatterns; i += blockDim.x) {
    const uint32_t pattern = i << 16 | (i * 2654435761u >> 16 & 0xf000) | (i % 3 == 0 ? 0x1000 : 0);  // some are ties
    float real;
    memcpy(&real, &pattern, sizeof(real));
    words[i] = real == real ? bits(from_real<T>(real)) : 0;
  }
}

// ---- the program ----------------------------------------------------------------------------------------------------

#if defined(MYVISION_EMULATOR)
uint32_t* allocate(size_t words) {
  const size_t vectors = (words * sizeof(uint32_t) + kVectorBytes - 1) / kVectorBytes;
  return static_cast<uint32_t*>(std::aligned_alloc(kVectorBytes, vectors * kVectorBytes));
}
void deallocate(uint32_t* words) { std::free(words); }
const char* wait() { return launch_error(); }
#else
uint32_t* allocate(size_t words) {
  void* memory = nullptr;
  if (cudaMallocManaged(&memory, words * sizeof(uint32_t)) != cudaSuccess) throw std::runtime_error(launch_error());
  return static_cast<uint32_t*>(memory);
}
void deallocate(uint32_t* words) { cudaFree(words); }
const char* wait() {
  cudaDeviceSynchronize();
  return launch_error();
}
#endif

void dump(const char* name, void (*kernel)(uint32_t*), int threads, size_t count, int shared_bytes = 0) {
  uint32_t* words = allocate(count);
  std::memset(words, 0, count * sizeof(uint32_t));
  MYVISION_LAUNCH_WITH_SHARED(kernel, 1, threads, shared_bytes, nullptr, words);
  if (const char* error = wait()) throw std::runtime_error(std::string(name) + ": " + error);
  std::printf("%s", name);
  for (size_t i = 0; i < count; ++i) std::printf(" %x", words[i]);
  std::printf("\n");
  deallocate(words);
}

void dump_all() {
  dump("mma half", mma<Half>, kWarpSize, 4 * kWarpSize);
  dump("mma bfloat16", mma<BFloat16>, kWarpSize, 4 * kWarpSize);
  dump("ldmatrix x1", load_matrices<1, false>, kWarpSize, kWarpSize);
  dump("ldmatrix x2", load_matrices<2, false>, kWarpSize, 2 * kWarpSize);
  dump("ldmatrix x4", load_matrices<4, false>, kWarpSize, 4 * kWarpSize);
  dump("ldmatrix x1 transposed", load_matrices<1, true>, kWarpSize, kWarpSize);
  dump("ldmatrix x2 transposed", load_matrices<2, true>, kWarpSize, 2 * kWarpSize);
  dump("ldmatrix x4 transposed", load_matrices<4, true>, kWarpSize, 4 * kWarpSize);
  dump("shuffle int", shuffles<int>, kThreads, kThreads);
  dump("shuffle float", shuffles<float>, kThreads, kThreads);
  dump("shuffle double", shuffles<double>, kThreads, 2 * kThreads);
  dump("block_sum float", block_sums<float>, kThreads, kThreads);
  dump("block_sum double", block_sums<double>, kThreads, 2 * kThreads);
  dump("strided_sum float", strided_sums<float>, kThreads, kSums * kThreads);
  dump("strided_sum double", strided_sums<double>, kThreads, 2 * kSums * kThreads);
  dump("atomic_add int", atomic_adds<int>, kThreads, 3);
  dump("atomic_add float", atomic_adds<float>, kThreads, 3);
  dump("atomic_add double", atomic_adds<double>, kThreads, 6);
  dump("vector double", vectors<double>, kThreads, 4 * kThreads);
  dump("vector float", vectors<float>, kThreads, 4 * kThreads);
  dump("vector half", vectors<Half>, kThreads, 4 * kThreads);
  dump("vector bfloat16", vectors<BFloat16>, kThreads, 4 * kThreads);
  dump("vector int8", vectors<int8_t>, kThreads, 4 * kThreads);
  dump("copy_async", asynchronous_copies, kThreads, (1 + 4 * 4) * kThreads);
  dump("dynamic shared memory", dynamic_shared_memory, kThreads, kThreads, kSharedWords * sizeof(uint32_t));
  dump("to_real half", to_float<Half>, kThreads, kPatterns);
  dump("to_real bfloat16", to_float<BFloat16>, kThreads, kPatterns);
  dump("from_real half", from_float<Half>, kThreads, kPatterns);
  dump("from_real bfloat16", from_float<BFloat16>, kThreads, kPatterns);
}

}  // namespace
}  // namespace myvision

int main() {
  try {
    myvision::dump_all();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "primitives: %s\n", error.what());
    return 1;
  }
}
