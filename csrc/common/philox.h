// Philox 4x32-10: random numbers by counting, so that any element's can be computed again on its own.
// Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011.
#pragma once
#include <cstdint>

#include "common/host_device.h"

namespace myvision {

struct PhiloxWords {
  uint32_t word[4];
};

MYVISION_HOST_DEVICE PhiloxWords philox(uint64_t key, uint64_t counter) {
  uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32), c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * c0, b = uint64_t{0xCD9E8D57} * c2;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(b);
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(a);
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return {{c0, c1, c2, c3}};
}

// Word element % 4, kept in registers, which an index known at run time alone would move to memory on a GPU.
MYVISION_HOST_DEVICE uint32_t word_of(const PhiloxWords& words, int64_t element) {
  const uint32_t low = element & 1 ? words.word[1] : words.word[0];
  const uint32_t high = element & 1 ? words.word[3] : words.word[2];
  return element & 2 ? high : low;
}

// Element e of a tensor, counted in the order of its indices, is kept where word e % 4 of philox(seed, e / 4) is not
// below this; 2^32 keeps none.
MYVISION_HOST_DEVICE uint64_t dropout_threshold(double p) { return static_cast<uint64_t>(p * 4294967296.0); }

}  // namespace myvision
