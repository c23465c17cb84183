// layer_norm on the GPU.
#pragma once
#include "common/gpu.cuh"
#include "ops/layer_norm/layer_norm.h"
