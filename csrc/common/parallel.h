// Threads for the kernels. The library runs them on torch's pool (parallel.cpp); the kernel tests bring their own.
#pragma once
#include <cstdint>

namespace myvision {

int64_t num_threads();

namespace detail {
void parallel_for(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context);
void parallel_tasks(int64_t workers, int64_t tasks, void (*body)(int64_t, int64_t, void*), void* context);
}  // namespace detail

// Runs body(first, last) over disjoint ranges that cover [begin, end), each of at least `grain` where possible.
template <typename Body>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Body& body) {
  detail::parallel_for(
      begin, end, grain,
      [](int64_t first, int64_t last, void* context) { (*static_cast<const Body*>(context))(first, last); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

// Runs body(task, worker) for every task in [0, tasks), handed out one at a time to at most `workers` threads.
template <typename Body>
void parallel_tasks(int64_t workers, int64_t tasks, const Body& body) {
  detail::parallel_tasks(
      workers, tasks,
      [](int64_t task, int64_t worker, void* context) { (*static_cast<const Body*>(context))(task, worker); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace myvision
