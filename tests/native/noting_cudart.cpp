// A stand-in for CUDA's runtime that prints what is asked of it, for code that nvcc compiled, on a machine without a
// GPU. Functions have the version that the environment gives: PTX_VERSION, BINARY_VERSION. The current GPU is DEVICE's.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>

namespace {
int number(const char* variable) {
  const char* value = std::getenv(variable);
  return value ? std::atoi(value) : 0;
}
}  // namespace

extern "C" {

cudaError_t cudaGetDevice(int* device) {
  *device = number("DEVICE");
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  attributes->ptxVersion = number("PTX_VERSION");
  attributes->binaryVersion = number("BINARY_VERSION");
  std::puts("asked for a version");
  return attributes->ptxVersion ? cudaSuccess : cudaErrorNoKernelImageForDevice;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute attribute, int value) {
  std::printf("limit %s %d\n", attribute == cudaFuncAttributeMaxDynamicSharedMemorySize ? "of shared memory" : "?",
              value);
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return cudaSuccess; }

// What nvcc's own code calls.
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t bytes, void*) {
  std::printf("launch with %zu\n", bytes);
  return 1;  // which ends it
}
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaSuccess; }
cudaError_t __cudaGetKernel(cudaKernel_t*, const void*) { return cudaSuccess; }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) { return cudaSuccess; }
void** __cudaRegisterFatBinary(void*) { return nullptr; }
void __cudaRegisterFatBinaryEnd(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*, int*) {}

}  // extern "C"
