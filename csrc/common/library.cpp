// Operators that tell about the library itself.
#include <string>

#include "build_configuration.h"
#include "common/cpu_capability.h"
#include "common/product_choice.h"
#include "common/stable.h"

namespace myvision {
namespace {

std::string cpu_capability_name() { return name_of(cpu_capability()); }
std::string build_configuration() { return MYVISION_BUILD_CONFIGURATION; }

std::string product_choice(ScalarType type) {
  const std::optional<Dtype> dtype = to_dtype(type);
  MYVISION_CHECK("_product_choice", dtype && is_floating(*dtype), "there are no products of ", name_of(type));
  const ProductChoice& choice = cpu_product(*dtype);
  return concatenate(choice.is_torch ? "torch's" : "myvision's", " (", choice.why, ")");
}

}  // namespace
}  // namespace myvision

STABLE_TORCH_LIBRARY_FRAGMENT(myvision, m) {
  m.def("_cpu_capability() -> str");
  m.def("_build_configuration() -> str");
  m.def("_product_choice(ScalarType dtype) -> str");
}

STABLE_TORCH_LIBRARY_IMPL(myvision, CompositeExplicitAutograd, m) {
  m.impl("_cpu_capability", TORCH_BOX(&myvision::cpu_capability_name));
  m.impl("_build_configuration", TORCH_BOX(&myvision::build_configuration));
  m.impl("_product_choice", TORCH_BOX(&myvision::product_choice));
}
