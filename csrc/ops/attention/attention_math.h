// What attention computes, one number at a time: shared by the CPU and GPU kernels.
#pragma once
#include "common/host_device.h"
#include "ops/attention/attention.h"

namespace myvision {

// The keys [first, last) of a sequence, which are none where first >= last.
struct KeyRange {
  int64_t first, last;
};

// The keys that the window leaves to query i of the sequence.
MYVISION_HOST_DEVICE KeyRange keys_of(const AttentionParams& p, const AttentionSequence& sequence, int64_t i) {
  const int64_t center = i + sequence.shift(p);
  const int64_t first = detail::between(0, center - p.window_left, sequence.keys);
  return {first, detail::between(first, center + p.window_right + 1, sequence.keys)};
}

}  // namespace myvision
