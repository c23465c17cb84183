// batch_norm on the GPU.
#pragma once
#include "common/gpu.cuh"
#include "ops/batch_norm/batch_norm.h"
