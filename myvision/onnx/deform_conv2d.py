"""deform_conv2d in ONNX: its own node, DeformConv."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from myvision.onnx._graph import Opset, UnsupportedError, Value


def deform_conv2d(
    op: Opset,
    *,
    input: Value,
    weight: Value,
    offset: Value,
    mask: Value,
    bias: Value,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    offset_groups: int,
) -> Value:
    if op.version < 19:
        raise UnsupportedError(f"deform_conv2d needs ONNX opset 19 or later, got opset_version={op.version}")
    if op.version < 22 and offset.dtype.name == "BFLOAT16":
        raise UnsupportedError(f"deform_conv2d of bfloat16 needs ONNX opset 22 or later, got {op.version}")
    dtype = input.dtype
    if dtype != offset.dtype:  # the node has one type, which must not round places: that of the offset
        input, weight, mask, bias = (
            None if value is None else op.Cast(value, to=offset.dtype) for value in (input, weight, mask, bias)
        )
    output = op.DeformConv(
        input,
        weight,
        offset,
        bias,
        mask,
        strides=stride,
        pads=[*padding, *padding],  # in front of each axis, then behind each
        dilations=dilation,
        group=groups,
        offset_group=offset_groups,
    )
    return output if dtype == offset.dtype else op.Cast(output, to=dtype)


TRANSLATIONS = {torch.ops.myvision.deform_conv2d.default: deform_conv2d}
