"""rms_norm in ONNX: RMSNormalization from opset 23 on; the formula before, and where channels come first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from myvision.onnx._graph import Opset, Value
from myvision.onnx._norm import affine, channel_shape, finish, normalise, scale_and_shift


def rms_norm(
    op: Opset,
    *,
    input: Value,
    normalized_shape: Sequence[int],
    weight: Value,
    channels_first: bool,
    eps: float,
    **end: Any,
) -> Value:
    if channels_first:
        normalised = normalise(op, input, [1], eps, centered=False)
        output = scale_and_shift(op, normalised, input, weight, None, channel_shape(input))
    else:
        output = over_last_dimensions(op, input, normalized_shape, weight, eps)
    return finish(op, output, **end)


def over_last_dimensions(op: Opset, input: Value, normalized_shape: Sequence[int], weight: Value, eps: float) -> Value:
    dims = len(normalized_shape)
    if op.version >= 23 and eps >= 0:
        scale, _ = affine(op, input, weight, None, normalized_shape)
        return op.RMSNormalization(input, scale, axis=-dims, epsilon=eps)
    return scale_and_shift(op, normalise(op, input, range(-dims, 0), eps, centered=False), input, weight, None)


TRANSLATIONS = {torch.ops.myvision.rms_norm.default: rms_norm}
