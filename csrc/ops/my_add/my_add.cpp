// my_add for torch: schema, checks, allocation, registration.
#include "ops/my_add/my_add.h"

#include "common/stable.h"
#include "common/type_promotion.h"

namespace myvision {
namespace {

ScalarType check_types(const Tensor& x, const Tensor& y) {
  MYVISION_CHECK(x.defined() && y.defined(), "my_add: x and y must be tensors, got None as ", x.defined() ? "y" : "x");
  MYVISION_CHECK(same_device(x, y), "my_add: x and y must be on one device, got x on ", device_name(x), " and y on ",
                 device_name(y));
  const std::optional<ScalarType> type = result_type(x, y);
  MYVISION_CHECK(type, "my_add: x and y must be of floating-point or integer types, got x of ",
                 name_of(x.scalar_type()), " and y of ", name_of(y.scalar_type()));
  return *type;
}

Shape shape_of(const Tensor& tensor) { return {tensor.dim(), tensor.sizes().data(), tensor.strides().data()}; }

OutputShape check_shapes(const Tensor& x, const Tensor& y, MyAddParams& params) {
  OutputShape output;
  MYVISION_CHECK(x.dim() <= kMaxDims && y.dim() <= kMaxDims, "my_add: x and y may have at most ", kMaxDims,
                 " dimensions, got ", x.dim(), " and ", y.dim());
  MYVISION_CHECK(broadcast(shape_of(x), shape_of(y), output, params),
                 "my_add: the shapes of x and y do not broadcast: ", shape_name(x.sizes()), " and ",
                 shape_name(y.sizes()));
  return output;
}

void run(const MyAddParams& params, [[maybe_unused]] const Tensor& output) {
#ifdef MYVISION_GPU
  const GpuScope gpu(output);
  check_launch("my_add", my_add_cuda(params, gpu.stream()));
#else
  my_add_forward_cpu(params);
#endif
}

Tensor my_add(const Tensor& x, const Tensor& y) {
  const ScalarType type = check_types(x, y);
  const Tensor x_cast = cast(x, type), y_cast = cast(y, type);
  MyAddParams params;
  const OutputShape shape = check_shapes(x_cast, y_cast, params);
  const Tensor output = empty_strided(shape.dims, shape.sizes, shape.strides, type, x);
  if (output.numel() == 0) return output;
  params.x = x_cast.const_data_ptr();
  params.y = y_cast.const_data_ptr();
  params.output = output.mutable_data_ptr();
  params.dtype = *to_dtype(type);
  run(params, output);
  return output;
}

}  // namespace
}  // namespace myvision

MYVISION_SCHEMAS(m) { m.def("my_add(Tensor x, Tensor y) -> Tensor"); }

MYVISION_IMPLEMENTATIONS(m) { m.impl("my_add", TORCH_BOX(&myvision::my_add)); }
