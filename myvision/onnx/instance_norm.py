"""instance_norm in ONNX: InstanceNormalization, or BatchNormalization where running statistics normalise."""

from __future__ import annotations

from typing import Any

import torch

from myvision.onnx._graph import Opset, Value
from myvision.onnx._norm import affine, channel_shape, finish, normalise, scale_and_shift
from myvision.onnx.batch_norm import batch_norm


def instance_norm(
    op: Opset,
    *,
    input: Value,
    running_mean: Value,
    running_var: Value,
    weight: Value,
    bias: Value,
    eps: float,
    **end: Any,
) -> Value:
    if running_mean is not None:
        return batch_norm(
            op,
            input=input,
            running_mean=running_mean,
            running_var=running_var,
            weight=weight,
            bias=bias,
            eps=eps,
            **end,
        )
    if eps < 0:
        normalised = normalise(op, input, range(2, len(input.shape)), eps)
        return finish(op, scale_and_shift(op, normalised, input, weight, bias, channel_shape(input)), **end)
    scale, shift = affine(op, input, weight, bias, [input.shape[1]])
    return finish(op, op.InstanceNormalization(input, scale, shift, epsilon=eps), **end)


TRANSLATIONS = {torch.ops.myvision.instance_norm.default: instance_norm}
