// Launches my_add's kernels: 16 bytes an access where the layout lets it, single elements elsewhere.
#include "ops/my_add/my_add_kernel.cuh"

namespace myvision {
namespace {

int64_t number_of_elements(const MyAddParams& params) {
  int64_t count = 1;
  for (int dim = 0; dim < params.dims; ++dim) count *= params.size[dim];
  return count;
}

bool is_contiguous(const MyAddParams& params) {
  if (params.dims == 0) return true;
  return params.dims == 1 && params.x_stride[0] == 1 && params.y_stride[0] == 1 && params.output_stride[0] == 1;
}

// Whether every row along dimension 0 starts at a multiple of `width` elements.
bool has_aligned_rows(const MyAddParams& params, const void* data, const int64_t* stride, int width) {
  bool aligned = is_vector_aligned(data);
  for (int dim = 1; dim < params.dims; ++dim) aligned = aligned && stride[dim] % width == 0;
  return aligned;
}

// An input that is not contiguous along dimension 0 is gathered, so its alignment does not matter.
bool is_packable(const MyAddParams& params, const void* input, const int64_t* stride, int width) {
  return stride[0] != 1 || has_aligned_rows(params, input, stride, width);
}

bool rows_hold_packs(const MyAddParams& params, int width) {
  return params.size[0] % width == 0 && params.output_stride[0] == 1 &&
         has_aligned_rows(params, params.output, params.output_stride, width) &&
         is_packable(params, params.x, params.x_stride, width) && is_packable(params, params.y, params.y_stride, width);
}

MyAddParams in_packs(MyAddParams params, int width) {
  params.size[0] /= width;
  params.x_stride[0] *= width;
  params.y_stride[0] *= width;
  params.output_stride[0] *= width;
  return params;
}

template <typename T, int kWidth>
const char* launch_contiguous(const MyAddParams& params, int64_t size, GpuStream stream) {
  MYVISION_LAUNCH((my_add_contiguous<T, kWidth>), walk_blocks(size / kWidth + size % kWidth), kWalkThreads, stream,
                  static_cast<const T*>(params.x), static_cast<const T*>(params.y), static_cast<T*>(params.output),
                  size);
  return launch_error();
}

template <typename T, int kWidth>
const char* launch_strided(const MyAddParams& params, int64_t size, GpuStream stream) {
  const int64_t packs = size / kWidth;
  MYVISION_LAUNCH((my_add_strided<T, kWidth>), walk_blocks(packs), kWalkThreads, stream, in_packs(params, kWidth),
                  packs);
  return launch_error();
}

template <typename T>
const char* launch(const MyAddParams& params, GpuStream stream) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  const int64_t size = number_of_elements(params);
  if (is_contiguous(params)) {
    const bool aligned = is_vector_aligned(params.x) && is_vector_aligned(params.y) && is_vector_aligned(params.output);
    return aligned ? launch_contiguous<T, kWidth>(params, size, stream) : launch_contiguous<T, 1>(params, size, stream);
  }
  return rows_hold_packs(params, kWidth) ? launch_strided<T, kWidth>(params, size, stream)
                                         : launch_strided<T, 1>(params, size, stream);
}

}  // namespace

const char* my_add_cuda(const MyAddParams& params, void* stream_handle) {
  const auto stream = static_cast<GpuStream>(stream_handle);
  switch (params.dtype) {
    case Dtype::Int64:
      return launch<int64_t>(params, stream);
    case Dtype::Int32:
      return launch<int32_t>(params, stream);
    case Dtype::Int16:
      return launch<int16_t>(params, stream);
    case Dtype::Int8:
    case Dtype::UInt8:  // the same bits: sums wrap around
      return launch<uint8_t>(params, stream);
    default:
      return visit_floating(params.dtype, [&](auto element) { return launch<decltype(element)>(params, stream); });
  }
}

}  // namespace myvision
