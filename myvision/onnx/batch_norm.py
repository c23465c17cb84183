"""batch_norm in ONNX: BatchNormalization, or the formula where the batch gives the statistics."""

from __future__ import annotations

from typing import Any

import torch

from myvision.onnx._graph import Opset, Value, cast_to_type_of
from myvision.onnx._norm import affine, channel_shape, finish, normalise, scale_and_shift


def batch_norm(
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
    if running_mean is None:
        axes = [0, *range(2, len(input.shape))]
        output = scale_and_shift(op, normalise(op, input, axes, eps), input, weight, bias, channel_shape(input))
    else:
        mean, var = (cast_to_type_of(op, statistic, input) for statistic in (running_mean, running_var))
        scale, shift = affine(op, input, weight, bias, [input.shape[1]])
        output, *_ = op.BatchNormalization(input, scale, shift, mean, var, epsilon=eps)
    return finish(op, output, **end)


TRANSLATIONS = {torch.ops.myvision.batch_norm.default: batch_norm}
