// Rounding of sizes, for the CPU kernels. Compiled once per instruction set.
#pragma once
#include <cstdint>

namespace myvision::CPU_CAPABILITY {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Row pitch for a matrix of `columns`: an odd number of cache lines, so that rows do not compete for cache sets.
inline int64_t padded_row(int64_t columns) { return (ceil_div(columns, 16) | 1) * 16; }

}  // namespace myvision::CPU_CAPABILITY
