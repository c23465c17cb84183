// The tiles, statistics and sums that the GPU kernels of the norms share.
//
// A pack holds kWidth neighbours in memory. They belong to kSets sets of numbers, element j to set j % kSets: to one
// where memory runs along a set, each to another where it runs across them.
#pragma once
#include "common/activation.h"
#include "common/gpu.cuh"
#include "common/host_device.h"
#include "common/strided.h"

namespace myvision {

// How the threads of a block share work: the `members` of a slot reduce a set of numbers together, the slots have
// different sets. Neighbouring threads are neighbours in memory: members of a slot, or slots where the tile is
// `across`. Both are powers of two.
struct Tile {
  int members, slots;
  bool across;

  __device__ __forceinline__ int member() const { return across ? threadIdx.x / slots : threadIdx.x % members; }
  __device__ __forceinline__ int slot() const { return across ? threadIdx.x % slots : threadIdx.x / members; }

  // Returns the sum over the members of the thread's slot to each of them.
  template <typename Value>
  __device__ __forceinline__ Value sum(const Value& value) const {
    return strided_sum(value, across ? slots : 1, members);
  }
};

// A number is normalised by (x - mean) * rstd - rest * rstd.
template <typename Real>
struct Statistics {
  Real mean;
  Real rest;  // what rounding took from the mean
  Real rstd;

  __device__ __forceinline__ Real normalize(Real x) const { return (x - mean) * rstd - rest * rstd; }
};

template <typename Real>
__device__ __forceinline__ Real rstd_of(Real variance, Real eps) {
  return 1 / std::sqrt(variance + eps);
}

// ---- sums of parts --------------------------------------------------------------------------------------------------

inline constexpr Tile kColumnTile = {32, 8, true};

// Adds up the columns of partial[rows][columns], in a fixed order: sums is [2][columns]. What is null is not wanted.
template <typename Real>
__global__ void sum_columns(const Pair<Real>* partial, int64_t rows, int64_t columns, Real* sums, Real* first,
                            Real* second) {
  const Tile tile = kColumnTile;
  for (int64_t start = int64_t(blockIdx.x) * tile.slots; start < columns; start += int64_t(gridDim.x) * tile.slots) {
    const int64_t column = start + tile.slot();
    Pair<Real> sum{};
    for (int64_t row = tile.member(); row < rows && column < columns; row += tile.members) {
      sum += partial[row * columns + column];
    }
    sum = tile.sum(sum);
    if (tile.member() != 0 || column >= columns) continue;
    if (sums) sums[column] = sum.first;
    if (sums) sums[columns + column] = sum.second;
    if (first) first[column] = sum.first;
    if (second) second[column] = sum.second;
  }
}

template <typename Real>
void launch_sum_columns(const Pair<Real>* partial, int64_t rows, int64_t columns, void* sums, void* first, void* second,
                        GpuStream stream) {
  const int64_t tiles = (columns + kColumnTile.slots - 1) / kColumnTile.slots;
  MYVISION_LAUNCH(sum_columns<Real>, blocks_for(tiles), kColumnTile.members * kColumnTile.slots, stream, partial, rows,
                  columns, static_cast<Real*>(sums), static_cast<Real*>(first), static_cast<Real*>(second));
}

// ---- choices of the launchers ---------------------------------------------------------------------------------------

// Returns the least power of two that is at least `count`, within bounds that are powers of two themselves.
inline int power_of_two(int64_t count, int least, int most) {
  int power = least;
  while (power < count && power < most) power *= 2;
  return power;
}

// Whether packs along dimension `dim` can be read or written: in one access each where they are neighbours, and one by
// one where not. sizes are those of the tensor.
inline bool holds_packs(const Strided4& tensor, int dim, int width, const int64_t (&sizes)[4]) {
  if (!tensor.data || tensor.stride[dim] != 1) return true;
  bool aligned = is_vector_aligned(tensor.data);
  for (int other = 0; other < 4; ++other) {
    aligned = aligned && (other == dim || sizes[other] == 1 || tensor.stride[other] % width == 0);
  }
  return aligned;
}

// Calls launch(width, sets), both constants, with those of the packs.
template <typename T, typename Launch>
void with_packs(bool packs, bool across, Launch launch) {
  constexpr std::integral_constant<int, kVectorBytes / sizeof(T)> width;
  constexpr std::integral_constant<int, 1> one;
  if (!packs) return launch(one, one);
  return across ? launch(width, width) : launch(width, one);
}

}  // namespace myvision
