// Scratch memory of kernels, and how it is laid out.
#pragma once
#include <cstdint>

namespace myvision {

// Hands out pieces of a block of memory, each aligned to a cache line. Without memory it only counts: so one function
// that takes every piece tells how large the block must be, and cuts it.
class Carver {
 public:
  explicit Carver(void* memory = nullptr) : memory_(static_cast<char*>(memory)) {}
  template <typename T>
  T* take(int64_t count) {
    return static_cast<T*>(take_bytes(count * static_cast<int64_t>(sizeof(T))));
  }
  int64_t taken() const { return taken_; }

 private:
  void* take_bytes(int64_t bytes);

  char* memory_;
  int64_t taken_ = 0;
};

// How many bytes layout(carver) takes.
template <typename Layout>
int64_t bytes_of(const Layout& layout) {
  Carver counter;
  layout(counter);
  return counter.taken();
}

// A block of memory: aligned to a cache line, uninitialised, given back at the end of the scope.
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
  // What layout(carver) makes of this memory.
  template <typename Layout>
  auto carve(const Layout& layout) const {
    Carver carver(data_);
    return layout(carver);
  }

 private:
  int64_t bytes_;
  void* data_;
};

}  // namespace myvision
