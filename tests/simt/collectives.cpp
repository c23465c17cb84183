#include "simt/collectives.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <utility>

namespace simt {
namespace {

constexpr int kMmaLanes = 32;

void resolve_shuffle(void* const* lanes) {
  for (int lane = 0; lane < kWarpSize; ++lane) {
    auto* mine = static_cast<Shuffle*>(lanes[lane]);
    const unsigned source = static_cast<unsigned>(mine->source_lane) % kWarpSize;  // as on the GPU
    mine->taken = static_cast<const Shuffle*>(lanes[source])->brought;
  }
}

// One of the two 16-bit numbers in a register.
template <typename T>
float element(uint32_t pair, int which) {
  return T(static_cast<uint16_t>(pair >> 16 * which), T::from_bits());
}

template <typename T>
void resolve_mma(void* const* lanes) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < kMmaLanes; ++lane) {
    const auto* from = static_cast<const Mma*>(lanes[lane]);
    const int line = lane / 4, place = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) {
      for (int j : {0, 1}) a[line + i % 2 * 8][place + i / 2 * 8 + j] = element<T>(from->a[i], j);
    }
    for (int i = 0; i < 2; ++i) {
      for (int j : {0, 1}) b[place + i * 8 + j][line] = element<T>(from->b[i], j);
    }
  }
  for (int lane = 0; lane < kMmaLanes; ++lane) {
    for (int i = 0; i < 4; ++i) {
      float& sum = static_cast<Mma*>(lanes[lane])->sums[i];
      const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
    }
  }
}

void resolve_load_matrices(void* const* lanes) {
  const auto element = [&](int matrix, int row, int column) -> uint32_t {
    const auto* owner = static_cast<const LoadMatrices*>(lanes[matrix * 8 + row]);
    return owner->row.elements[column];
  };
  for (int lane = 0; lane < kMmaLanes; ++lane) {
    auto* mine = static_cast<LoadMatrices*>(lanes[lane]);
    const int line = lane / 4, place = lane % 4 * 2;
    for (int i = 0; i < mine->count; ++i) {
      const uint32_t low = mine->transposed ? element(i, place, line) : element(i, line, place);
      const uint32_t high = mine->transposed ? element(i, place + 1, line) : element(i, line, place + 1);
      mine->matrices[i] = low | high << 16;
    }
  }
}

}  // namespace

void shuffle(Shuffle& operands, Location caller) { collective("a shuffle", &operands, resolve_shuffle, caller); }

template <typename T>
void mma(Mma& operands, Location caller) {
  collective("mma", &operands, resolve_mma<T>, caller);
}
template void mma<c10::Half>(Mma&, Location);
template void mma<c10::BFloat16>(Mma&, Location);

void load_matrices(LoadMatrices& operands, Location caller) {
  collective("ldmatrix", &operands, resolve_load_matrices, caller);
}

}  // namespace simt
