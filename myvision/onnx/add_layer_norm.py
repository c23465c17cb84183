"""add_layer_norm in ONNX: Add, and the node or formula of layer_norm behind it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from myvision.onnx._graph import Opset, Value
from myvision.onnx._norm import add
from myvision.onnx.layer_norm import over_last_dimensions


def add_layer_norm(
    op: Opset,
    *,
    input: Value,
    residual: Value,
    normalized_shape: Sequence[int],
    weight: Value,
    bias: Value,
    eps: float,
    dropout_p: float,
    seed: Value,
) -> tuple[Value, Value]:
    sum = add(op, input, residual, dropout_p, "add_layer_norm")
    return over_last_dimensions(op, sum, normalized_shape, weight, bias, eps), sum


TRANSLATIONS = {torch.ops.myvision.add_layer_norm.default: add_layer_norm}
