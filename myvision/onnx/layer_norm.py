"""layer_norm in ONNX: LayerNormalization, or the formula where channels come first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from myvision.onnx._graph import Opset, Value
from myvision.onnx._norm import affine, channel_shape, finish, normalise, scale_and_shift


def layer_norm(
    op: Opset,
    *,
    input: Value,
    normalized_shape: Sequence[int],
    weight: Value,
    bias: Value,
    channels_first: bool,
    eps: float,
    **end: Any,
) -> Value:
    if channels_first:
        output = scale_and_shift(op, normalise(op, input, [1], eps), input, weight, bias, channel_shape(input))
    else:
        output = over_last_dimensions(op, input, normalized_shape, weight, bias, eps)
    return finish(op, output, **end)


def over_last_dimensions(
    op: Opset, input: Value, normalized_shape: Sequence[int], weight: Value, bias: Value, eps: float
) -> Value:
    if eps < 0:
        return scale_and_shift(op, normalise(op, input, range(-len(normalized_shape), 0), eps), input, weight, bias)
    scale, shift = affine(op, input, weight, bias, normalized_shape)
    output, *_ = op.LayerNormalization(input, scale, shift, axis=-len(normalized_shape), epsilon=eps)
    return output


TRANSLATIONS = {torch.ops.myvision.layer_norm.default: layer_norm}
