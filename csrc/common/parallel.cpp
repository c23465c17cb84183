#include "common/parallel.h"

#include "common/stable.h"

namespace myvision {

int64_t num_threads() { return torch::stable::get_num_threads(); }

void detail::parallel_for(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*),
                          void* context) {
  torch::stable::parallel_for(begin, end, grain,
                              [&](int64_t first, int64_t last) { body(first, last, context); });
}

}  // namespace myvision
