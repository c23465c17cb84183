// Large pages for large tensors.
#pragma once
#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace myvision {

// Asks for large pages where new memory is about to be written all over, which the system otherwise hands out and
// clears page by page of 4 KiB: that takes several times as long as writing to them. A mere hint.
inline void prefer_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHugePage = uintptr_t(2) << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kHugePage - 1) & ~(kHugePage - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes)) & ~(kHugePage - 1);
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace myvision
