// A write past the end of an allocation, a race in shared memory: where compute-sanitizer misses one, it does not work.
#include <cuda_runtime.h>

namespace myvision {

__global__ void writes_past_the_end(int* data) { data[threadIdx.x] = 1; }

__global__ void misses_a_barrier(int* data) {
  __shared__ int shared[256];
  shared[threadIdx.x] = data[0];
  data[0] = shared[255 - threadIdx.x];
}

}  // namespace myvision

int main() {
  int* data;
  if (cudaMalloc(&data, 128 * sizeof(int)) != cudaSuccess) return 1;
  myvision::misses_a_barrier<<<1, 256>>>(data);
  myvision::writes_past_the_end<<<1, 256>>>(data);
  cudaDeviceSynchronize();  // an error here is compute-sanitizer's to tell: it looks at programs that succeed
  return 0;
}
