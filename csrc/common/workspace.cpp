#include "common/workspace.h"

#include <cstddef>
#include <memory>
#include <new>
#include <utility>

namespace myvision {

namespace {

constexpr std::align_val_t kCacheLine{64};
constexpr int64_t kKept = int64_t(32) << 20;

struct Free {
  void operator()(void* data) const { ::operator delete(data, kCacheLine); }
};

// The block this thread used last, if not large. The system takes large blocks back at once, and hands them out page by
// page, zeroed: up to a tenth of a kernel's time.
struct Block {
  std::unique_ptr<void, Free> data;
  int64_t bytes = 0;
};
thread_local Block kept;

}  // namespace

Workspace::Workspace(int64_t bytes) : bytes_(bytes) {
  if (kept.bytes >= bytes) {
    bytes_ = std::exchange(kept.bytes, 0);
    data_ = kept.data.release();
  } else {
    data_ = ::operator new(static_cast<std::size_t>(bytes), kCacheLine);
  }
}

Workspace::~Workspace() {
  std::unique_ptr<void, Free> data(data_);
  if (bytes_ < kept.bytes || bytes_ > kKept) return;
  kept = {std::move(data), bytes_};
}

}  // namespace myvision
