// my_add for torch: schema and registration.
#include "ops/my_add/my_add.h"

#include "common/elementwise.h"

namespace myvision {
namespace {

Tensor my_add(const Tensor& x, const Tensor& y) {
  MyAddParams params;
  return elementwise("my_add", my_add_forward_kernel, params, {{"x", x}, {"y", y}}, /*leader=*/1);
}

}  // namespace
}  // namespace myvision

MYVISION_SCHEMAS(m) { m.def("my_add(Tensor x, Tensor y) -> Tensor"); }

MYVISION_IMPLEMENTATIONS(m) { m.impl("my_add", TORCH_BOX(&myvision::my_add)); }
