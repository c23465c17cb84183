#include "common/product_choice.h"

#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "common/cpu_capability.h"

namespace myvision {
namespace {

// Where torch's product is known to be faster. The own kernels multiply half types in float32; the peak of AMX is 16
// times as high. torch's wheels bring MKL, which on Intel's CPUs with AVX-512 reaches 94 % of the peak of float32 where
// the own kernels reach 80 to 88 %.
struct FasterTorch {
  Dtype dtype;
  CpuFeature feature;
  const char *with, *without;
};
constexpr FasterTorch kFasterTorch[] = {
    {Dtype::Float64, CpuFeature::Intel, "MKL on an Intel CPU with AVX-512", "not an Intel CPU with AVX-512"},
    {Dtype::Float32, CpuFeature::Intel, "MKL on an Intel CPU with AVX-512", "not an Intel CPU with AVX-512"},
    {Dtype::Float16, CpuFeature::AmxFloat16, "with AMX for float16", "without AMX for float16"},
    {Dtype::BFloat16, CpuFeature::AmxBFloat16, "with AMX for bfloat16", "without AMX for bfloat16"},
};

// Whether MYVISION_PRODUCT wants torch's product; nothing where it is not set.
std::optional<bool> wants_torch() {
  const char* variable = std::getenv("MYVISION_PRODUCT");
  const std::string_view value = variable == nullptr ? "" : variable;
  if (value.empty()) return std::nullopt;
  if (value != "own" && value != "torch") {
    throw std::runtime_error("myvision: the environment variable MYVISION_PRODUCT must be 'own' or 'torch', but is '" +
                             std::string(value) + "'");
  }
  return value == "torch";
}

ProductChoice choose(Dtype dtype) {
  if (const std::optional<bool> torch = wants_torch()) {
    return {*torch, true, *torch ? "MYVISION_PRODUCT=torch" : "MYVISION_PRODUCT=own"};
  }
  for (const FasterTorch& row : kFasterTorch) {
    if (row.dtype != dtype) continue;
    const bool is_faster = cpu_has(row.feature);
    return {is_faster, false, is_faster ? row.with : row.without};
  }
  throw std::logic_error("myvision: not a floating-point type");
}

}  // namespace

const ProductChoice& cpu_product(Dtype dtype) {
  static const ProductChoice choices[] = {choose(Dtype::Float64), choose(Dtype::Float32), choose(Dtype::Float16),
                                          choose(Dtype::BFloat16)};
  return choices[static_cast<int>(dtype)];
}

}  // namespace myvision
