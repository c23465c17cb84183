// my_add on the CPU, compiled once per instruction set.
#include "ops/my_add/my_add.h"

#include "common/elementwise_cpu.h"

namespace myvision::CPU_CAPABILITY::my_add {

void forward(const MyAddParams& params) {
  // 2 * x as x + x: the same bits on every instruction set, whether or not it fuses products.
  elementwise(params, []<typename T>(const T& x, const T& y) { return x + x + y; });
}

}  // namespace myvision::CPU_CAPABILITY::my_add
