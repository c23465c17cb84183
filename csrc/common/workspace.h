// Scratch memory of a kernel: aligned to a cache line, uninitialised, given back at the end of the scope.
#pragma once
#include <cstdint>

namespace myvision {

class Workspace {
 public:
  explicit Workspace(int64_t bytes);  // std::bad_alloc when there is not enough
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  int64_t bytes_;
  void* data_;
};

}  // namespace myvision
