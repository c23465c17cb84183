// Fibers: stacks that one thread of the CPU switches between, on Linux and x86-64. AddressSanitizer and ThreadSanitizer
// are told of every switch; to the latter each fiber is a thread that nothing orders.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <new>
#include <utility>

#if !defined(__x86_64__) || !defined(__linux__)
#error "the GPU emulator runs on Linux and x86-64"
#endif

// machine.cpp is not instrumented itself; these say how the kernels are.
#if defined(SIMT_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(SIMT_TSAN)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* object);
void __tsan_release(void* object);
}
#endif

// Saves the registers that a function must keep, and the stack pointer in *saved; goes on with those of `next`.
extern "C" void simt_switch_stack(void** saved, void* next);
asm(R"(
.text
.hidden simt_switch_stack
.type simt_switch_stack, @function
simt_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

namespace simt {

#if defined(SIMT_TSAN)
inline constexpr unsigned kUnordered = 1;  // a switch that orders nothing
inline void release(void* object) { __tsan_release(object); }
inline void acquire(void* object) { __tsan_acquire(object); }
#else
inline void release(void*) {}
inline void acquire(void*) {}
#endif

// Fresh zeros; its old contents, and what ThreadSanitizer knew of them, are gone.
inline void* map_memory(void* where, size_t bytes) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (where ? MAP_FIXED : 0);
  void* memory = mmap(where, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return memory;
}

class Fiber {
 public:
  Fiber() : stack_(static_cast<char*>(map_memory(nullptr, kStackBytes))) {
    mprotect(stack_, kGuardBytes, PROT_NONE);
#if defined(SIMT_TSAN)
    tsan_fiber_ = __tsan_create_fiber(0);
#endif
  }
  Fiber(const Fiber&) = delete;
  ~Fiber() {
#if defined(SIMT_ASAN)
    __asan_unpoison_memory_region(stack_, kStackBytes);
#endif
    munmap(stack_, kStackBytes);
#if defined(SIMT_TSAN)
    __tsan_destroy_fiber(tsan_fiber_);
#endif
  }

  // The next resume() calls entry, which never returns; whatever the fiber was doing is forgotten.
  void start(void (*entry)()) {
    void** top = reinterpret_cast<void**>(stack_ + kStackBytes) - 3;  // aligned as after a call
    *top = nullptr;
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < kSavedRegisters; ++i) *--top = nullptr;
    stack_pointer_ = top;
  }

  // Runs the fiber until it suspends.
  void resume() {
#if defined(SIMT_ASAN)
    void* fake_stack = nullptr;
    __sanitizer_start_switch_fiber(&fake_stack, stack_, kStackBytes);
#elif defined(SIMT_TSAN)
    resumer_fiber_ = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(tsan_fiber_, kUnordered);
#endif
    simt_switch_stack(&resumer_pointer_, stack_pointer_);
#if defined(SIMT_ASAN)
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
  }

  // Called on the fiber: back to resume().
  void suspend() {
#if defined(SIMT_ASAN)
    void* fake_stack = nullptr;
    __sanitizer_start_switch_fiber(&fake_stack, resumer_stack_, resumer_bytes_);
#elif defined(SIMT_TSAN)
    __tsan_switch_to_fiber(resumer_fiber_, kUnordered);
#endif
    simt_switch_stack(&stack_pointer_, resumer_pointer_);
#if defined(SIMT_ASAN)
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
  }

  // The first thing that entry does.
  void arrive() {
#if defined(SIMT_ASAN)
    __sanitizer_finish_switch_fiber(nullptr, &resumer_stack_, &resumer_bytes_);
#endif
  }

  // What the fiber did so far comes before whoever acquires the object.
  void release([[maybe_unused]] void* object) {
#if defined(SIMT_TSAN)
    void* self = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(tsan_fiber_, kUnordered);
    simt::release(object);
    __tsan_switch_to_fiber(self, kUnordered);
#endif
  }

 private:
  static constexpr size_t kStackBytes = 256 * 1024, kGuardBytes = 4096;
  static constexpr int kSavedRegisters = 6;

  char* stack_;
  void* stack_pointer_ = nullptr;
  void* resumer_pointer_ = nullptr;
#if defined(SIMT_ASAN)
  const void* resumer_stack_ = nullptr;
  size_t resumer_bytes_ = 0;
#elif defined(SIMT_TSAN)
  void* tsan_fiber_ = nullptr;
  void* resumer_fiber_ = nullptr;
#endif
};

}  // namespace simt
