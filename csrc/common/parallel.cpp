#include "common/parallel.h"

#include <algorithm>
#include <atomic>

#include "common/stable.h"

namespace myvision {

int64_t num_threads() { return torch::stable::get_num_threads(); }

void detail::parallel_for(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*),
                          void* context) {
  torch::stable::parallel_for(begin, end, grain, [&](int64_t first, int64_t last) { body(first, last, context); });
}

void detail::parallel_tasks(int64_t workers, int64_t tasks, void (*body)(int64_t, int64_t, void*), void* context) {
  std::atomic<int64_t> next{0};
  myvision::parallel_for(0, std::min(workers, tasks), 1, [&](int64_t first, int64_t last) {
    for (int64_t worker = first; worker < last; ++worker)
      for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) body(task, worker, context);
  });
}

}  // namespace myvision
