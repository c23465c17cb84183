// Operators that tell about the library itself.
#include <string>

#include "build_configuration.h"
#include "common/cpu_capability.h"
#include "common/stable.h"

namespace myvision {
namespace {

std::string cpu_capability_name() { return name_of(cpu_capability()); }
std::string build_configuration() { return MYVISION_BUILD_CONFIGURATION; }

}  // namespace
}  // namespace myvision

STABLE_TORCH_LIBRARY_FRAGMENT(myvision, m) {
  m.def("_cpu_capability() -> str");
  m.def("_build_configuration() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(myvision, CompositeExplicitAutograd, m) {
  m.impl("_cpu_capability", TORCH_BOX(&myvision::cpu_capability_name));
  m.impl("_build_configuration", TORCH_BOX(&myvision::build_configuration));
}
