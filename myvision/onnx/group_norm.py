"""group_norm in ONNX: GroupNormalization from opset 21 on, InstanceNormalization of the groups before."""

from __future__ import annotations

from typing import Any

import torch

from myvision.onnx._graph import Opset, Value
from myvision.onnx._norm import affine, channel_shape, finish, normalise, scale_and_shift


def group_norm(
    op: Opset, *, input: Value, num_groups: int, weight: Value, bias: Value, eps: float, **end: Any
) -> Value:
    if op.version >= 21 and eps >= 0:
        scale, shift = affine(op, input, weight, bias, [input.shape[1]])
        output = op.GroupNormalization(input, scale, shift, epsilon=eps, num_groups=num_groups)
        return finish(op, output, **end)
    groups = op.Reshape(input, op.Constant(value_ints=[0, num_groups, -1]))  # the older node's affine map is of groups
    groups.dtype = input.dtype
    if eps < 0:
        normalised = normalise(op, groups, [2], eps)
    else:
        ones, zeros = affine(op, input, None, None, [num_groups])
        normalised = op.InstanceNormalization(groups, ones, zeros, epsilon=eps)
    output = op.Reshape(normalised, op.Shape(input))
    return finish(op, scale_and_shift(op, output, input, weight, bias, channel_shape(input)), **end)


TRANSLATIONS = {torch.ops.myvision.group_norm.default: group_norm}
