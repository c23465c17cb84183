// What a launcher asks of CUDA's runtime, which noting_cudart.cpp prints, on each of two GPUs.
#include <cstdio>
#include <cstdlib>

#include "common/gpu.cuh"

__global__ void first(float* data) { *data = 1; }
__global__ void second(float* data) { *data = 2; }

int main() {
  for (const char* device : {"0", "1"}) {
    setenv("DEVICE", device, 1);
    std::printf("has mma: %d %d\n", myvision::device_has_mma(first), myvision::device_has_mma(first));
    for (const int bytes : {0, 4096, 49152, 1024}) {
      MYVISION_LAUNCH_WITH_SHARED(first, 1, 32, bytes, nullptr, nullptr);
    }
    MYVISION_LAUNCH_WITH_SHARED(second, 1, 32, 512, nullptr, nullptr);
  }
}
