// What the lanes of a warp exchange. Each lane brings its operands and finds its results in them.
#pragma once
#include <cstdint>

#include "simt/machine.h"

namespace simt {

struct Shuffle {
  struct alignas(16) Value {
    char bytes[16];
  };
  int source_lane;
  Value brought = {}, taken = {};
};
void shuffle(Shuffle& operands, Location caller);

// sums[16 x 8] += a[16 x 16] * b[16 x 8]; T is c10::Half or c10::BFloat16.
struct Mma {
  const uint32_t *a, *b;
  float* sums;
};
template <typename T>
void mma(Mma& operands, Location caller);

// Lane i brings row i % 8 of matrix i / 8 and takes a register of each.
struct LoadMatrices {
  struct Row {
    uint16_t elements[8];
  };
  int count;
  bool transposed;
  uint32_t* matrices;
  Row row = {};
};
void load_matrices(LoadMatrices& operands, Location caller);

}  // namespace simt
