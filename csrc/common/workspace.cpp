#include "common/workspace.h"

#include <new>

namespace myvision {

namespace {
constexpr std::align_val_t kCacheLine{64};
}

Workspace::Workspace(int64_t bytes) : data_(::operator new(static_cast<std::size_t>(bytes), kCacheLine)) {}
Workspace::~Workspace() { ::operator delete(data_, kCacheLine); }

}  // namespace myvision
