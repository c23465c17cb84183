#include "common/workspace.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <new>
#include <utility>

namespace myvision {

namespace {

constexpr int64_t kLineBytes = 64;
constexpr std::align_val_t kCacheLine{kLineBytes};
constexpr int64_t kSmall = int64_t(64) << 10, kKept = int64_t(32) << 20;

struct Free {
  void operator()(void* data) const { ::operator delete(data, kCacheLine); }
};

// The largest blocks this thread used, if neither small nor huge. The system takes such blocks back at once, and hands
// them out page by page, zeroed: up to a tenth of a kernel's time.
struct Block {
  std::unique_ptr<void, Free> data;
  int64_t bytes = 0;
};
thread_local std::array<Block, 2> kept;

// The smallest block that has so many bytes, else the largest.
Block* best_kept(int64_t bytes) {
  return std::ranges::max_element(kept, {}, [bytes](const Block& block) {
    return block.bytes >= bytes ? std::pair(true, -block.bytes) : std::pair(false, block.bytes);
  });
}

}  // namespace

void* Carver::take_bytes(int64_t bytes) {
  void* const piece = memory_ ? memory_ + taken_ : nullptr;
  taken_ += (bytes + kLineBytes - 1) / kLineBytes * kLineBytes;
  return piece;
}

Workspace::Workspace(int64_t bytes) : bytes_(bytes) {
  Block* const best = bytes > kSmall ? best_kept(bytes) : nullptr;
  if (best && best->bytes >= bytes) {
    bytes_ = std::exchange(best->bytes, 0);
    data_ = best->data.release();
    return;
  }
  if (best && bytes <= kKept) *best = {};  // this block will take its place
  data_ = ::operator new(static_cast<std::size_t>(bytes), kCacheLine);
}

Workspace::~Workspace() {
  std::unique_ptr<void, Free> data(data_);
  Block& least = *std::ranges::min_element(kept, {}, &Block::bytes);
  if (bytes_ <= std::max(least.bytes, kSmall) || bytes_ > kKept) return;
  least = {std::move(data), bytes_};
}

}  // namespace myvision
