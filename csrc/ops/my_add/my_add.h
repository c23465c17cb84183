// my_add: output = 2 * x + y.
#pragma once
#include "common/elementwise_params.h"

namespace myvision {

struct MyAddParams : Elementwise<2, Numbers::FloatingAndInteger> {};

MYVISION_ELEMENTWISE_KERNEL(my_add, forward, MyAddParams)

}  // namespace myvision
