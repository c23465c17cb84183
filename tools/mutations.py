"""Small faults to plant in the sources, one at a time: the measure of the tests. tools/mutate.py plants them.

Each has a file, a piece of its text that occurs once, what stands there instead, and the tests that are asked first.
They were written down before the tests of ``make test`` were chosen.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    path: str
    before: str
    after: str
    tests: str  # names of test files, without test_ and .py, that are likely to see it


MUTATIONS = [
    # ---- what all kernels share
    Mutation(
        "csrc/common/moments.h",
        "a.squares + b.squares + step * step * a.count * share",
        "a.squares + b.squares + step * step * share",
        "norm",
    ),
    Mutation("csrc/common/activation.h", "z / 3 + Real(0.5)", "z / 3", "norm"),
    Mutation("csrc/common/vec_math.h", "one - tail, x > Vec<float>(0.0f)", "one - tail, x < Vec<float>(0.0f)", "norm"),
    Mutation(
        "csrc/common/vec_io.h",
        "store(square[c], to + c * to_row, m);",
        "store(square[c], to + c * to_row, n);",
        "native",
    ),
    Mutation(
        "csrc/common/gemm.h", "a.data += strip * a.row;", "a.data += kRows * a.row;", "native attention deform_conv2d"
    ),
    Mutation(
        "csrc/common/philox_vec.h",
        "WideLanes::store_narrow(lanes[0].c3, lanes[1].c3,",
        "WideLanes::store_narrow(lanes[0].c3, lanes[1].c2,",
        "attention",
    ),
    Mutation("csrc/common/gpu.cuh", "warp / warps * warps + warp % step;", "warp / warps * warps;", "simt norm"),
    Mutation(
        "csrc/common/norm.cuh", "(x - mean) * rstd - rest * rstd; }", "(x - mean) * rstd + rest * rstd; }", "norm"
    ),
    Mutation("csrc/common/norm.h", "rest[3 - after.count + i] = after.axis[i]", "rest[2 - i] = after.axis[i]", "norm"),
    Mutation(
        "csrc/common/broadcast.h",
        "if (b.size[inner] > b.size[outer]) return 1;",
        "if (b.size[inner] < b.size[outer]) return 1;",
        "my_add",
    ),
    # ---- my_add
    Mutation(
        "csrc/common/elementwise_cpu.h",
        "stride_[dim + 1] - broadcast_.size[dim] * stride_[dim];",
        "stride_[dim + 1];",
        "my_add",
    ),
    Mutation(
        "csrc/common/elementwise.cuh",
        "for (int dim = 1; dim < b.dims; ++dim) aligned",
        "for (int dim = 2; dim < b.dims; ++dim) aligned",
        "my_add",
    ),
    # ---- attention
    Mutation(
        "csrc/ops/attention/attention.cpp",
        "mask.size(dim - first) == 1 ? 0 : mask.stride(dim - first)",
        "mask.stride(dim - first)",
        "attention",
    ),
    Mutation(
        "csrc/ops/attention/cpu/attention_softmax.h",
        "row.total += factor * from[p.value_width + 1];",
        "row.total += from[p.value_width + 1];",
        "attention",
    ),
    Mutation(
        "csrc/ops/attention/cpu/attention_mask_gradient.h",
        "set * heads / p.key_heads : i / heads;",
        "set * heads / p.key_heads : i % heads;",
        "attention",
    ),
    Mutation(
        "csrc/ops/attention/gpu/attention_kernel.cuh",
        "last - shift + params.window_left, sequence.queries)",
        "last - 1 - shift + params.window_left, sequence.queries)",
        "attention_gpu attention",
    ),
    Mutation(
        "csrc/ops/attention/gpu/attention_mma.cuh",
        "if (kOfKeys || e % 2 == 0) words",
        "if (e % 2 == 0) words",
        "attention_gpu attention",
    ),
    # ---- batch_norm, instance_norm, group_norm
    Mutation(
        "csrc/ops/batch_norm/batch_norm.cpp",
        "torch::stable::copy_(running_var, var);",
        "torch::stable::copy_(running_var, mean);",
        "batch_norm instance_norm norm_modules",
    ),
    Mutation(
        "csrc/ops/batch_norm/cpu/batch_norm_cpu.cpp",
        "of_slice.squares / (of_slice.count - 1);",
        "of_slice.squares / of_slice.count;",
        "batch_norm norm_modules",
    ),
    Mutation(
        "csrc/ops/batch_norm/cpu/batch_norm_lines.h",
        "normalised.at(i, count)) : g * f;",
        "normalised.at(i, count)) : g;",
        "norm",
    ),
    Mutation(
        "csrc/ops/batch_norm/gpu/batch_norm_kernel.cuh",
        "chunk_squares + step * step * count * share;",
        "chunk_squares + step * step * share;",
        "norm norm_kernels",
    ),
    # ---- linear
    Mutation("csrc/common/product.h", "c + j * c_size, k > 0,", "c + j * c_size, block > 0,", "linear"),
    Mutation("csrc/ops/linear/cpu/linear_cpu.cpp", "g_.bias && column == 0", "g_.bias", "linear"),
    Mutation("csrc/common/pack.h", "to + i / kRows * Product<T>::kStrip + j", "to + i + j", "linear"),
    Mutation(
        "csrc/ops/linear/linear.cpp",
        "Result{new_output(call), product}",
        "Result{product, product}",
        "linear linear_gpu",
    ),
    Mutation("csrc/ops/linear/gpu/linear_kernel.cuh", "if (++j == outputs) j = 0, ++i;", "++j;", "linear_gpu"),
    Mutation(
        "csrc/ops/linear/gpu/linear_cuda.cu",
        "params.outputs % width == 0 && matrix.row % width == 0;",
        "matrix.row % width == 0;",
        "linear_gpu",
    ),
    # ---- layer_norm, rms_norm and those with an addition
    Mutation("csrc/ops/layer_norm/layer_norm_cpu.cpp", "length - row % length, most}", "most}", "norm"),
    Mutation("csrc/common/dropout_vec.h", "skipped = first % 4;", "skipped = first % 2;", "add_layer_norm linear"),
    Mutation(
        "csrc/ops/layer_norm/layer_norm_kernel.cuh",
        "* params.channels + channel + j / kSets;",
        "* params.channels + channel + j;",
        "norm_kernels add_layer_norm",
    ),
    Mutation(
        "csrc/ops/layer_norm/layer_norm.cpp",
        ".dropped = new_gradient(call, output_mask[0]),",
        ".dropped = new_gradient(call, output_mask[1]),",
        "norm_autograd",
    ),
    # ---- deform_conv2d
    Mutation(
        "csrc/ops/deform_conv2d/deform_conv2d_math.h",
        "position >= Real(-1)",
        "position > Real(-1)",
        "deform_conv2d native",
    ),
    Mutation(
        "csrc/ops/deform_conv2d/cpu/deform_conv2d_cpu.cpp",
        "columns + j, Base::columns_row, k > 0,",
        "columns + j, Base::columns_row, false,",
        "deform_conv2d",
    ),
    Mutation(
        "csrc/ops/deform_conv2d/gpu/deform_conv2d_backward.cuh",
        "mask = sample.corners ? sample.mask : 0;",
        "mask = sample.mask;",
        "deform_conv2d",
    ),
    Mutation(
        "csrc/ops/deform_conv2d/gpu/deform_conv2d_cuda.cu",
        "gradients.mask = from_image(gradients.mask, first, size);",
        "",
        "deform_conv2d",
    ),
    # ---- Python
    Mutation(
        "myvision/_dispatch/autograd.py",
        "ctx.mark_non_differentiable(*results[count:])",
        "pass",
        "autograd norm_autograd",
    ),
    Mutation(
        "myvision/_dispatch/autocast.py",
        "            torch.set_autocast_enabled(device_type, True)",
        "            torch.set_autocast_enabled(device_type, False)",
        "autograd norm_autograd deform_conv2d_autograd",
    ),
    Mutation("myvision/_dispatch/vmap.py", "arg.select(dim, index)", "arg.select(0, index)", "norm_autograd"),
    Mutation("myvision/ops/_norm.py", "if promotes else", "if not promotes else", "norm_autograd"),
    Mutation(
        "myvision/ops/_batch_norm.py",
        "call.residual if ctx.activated else None",
        "call.residual if not ctx.activated else None",
        "norm",
    ),
    Mutation("myvision/ops/attention.py", "mask = mask.to(torch.float32)", "mask = mask.to(dtype)", "attention_graphs"),
    Mutation("myvision/ops/linear.py", "if of_parameters or call.dropout_p > 0:", "if of_parameters:", "linear_graphs"),
    Mutation("myvision/nn/linear.py", "self.dropout_p if self.training else 0.0", "self.dropout_p", "linear_modules"),
    Mutation("myvision/onnx/linear.py", "transB=1", "transB=0", "onnx_linear"),
    Mutation(
        "myvision/ops/deform_conv2d.py",
        "F.pad(input, [0, right % 2, 0, down % 2])",
        "F.pad(input, [right % 2, 0, down % 2, 0])",
        "deform_conv2d_modules deform_conv2d",
    ),
    Mutation(
        "myvision/nn/attention.py",
        "value=float(mask.dtype == torch.bool)",
        "value=0.0",
        "multihead_attention",
    ),
    Mutation(
        "myvision/nn/_masks.py",
        "key_padding_mask.masked_fill(attn_mask, -math.inf)",
        "key_padding_mask.masked_fill(~attn_mask, -math.inf)",
        "multihead_attention",
    ),
    Mutation(
        "myvision/nn/batch_norm.py",
        "1 / batches.to(mean.dtype)",
        "1 / (batches + 1).to(mean.dtype)",
        "norm_modules",
    ),
    Mutation(
        "myvision/nn/sync_batch_norm.py",
        "self.variance * self.count / (self.count - 1).clamp(min=1)",
        "self.variance",
        "sync_batch_norm",
    ),
]
