"""Dropout, addition and layer normalisation in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from myvision._formulas._dropout import dropout
from myvision._formulas._normalise import real
from myvision._formulas.layer_norm import layer_norm


def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """What ``torch.ops.myvision.add_layer_norm`` computes: the normalised sum, and the sum."""
    sum = (dropout(input, dropout_p, seed) + real(residual)).to(input.dtype)
    return layer_norm(sum, normalized_shape, weight, bias, None, False, eps, None, 0.0), sum
