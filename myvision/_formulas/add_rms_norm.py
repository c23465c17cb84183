"""Dropout, addition and normalisation by the root of the mean square, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from myvision._formulas._dropout import dropout
from myvision._formulas._normalise import real
from myvision._formulas.rms_norm import rms_norm


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    eps: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """What ``torch.ops.myvision.add_rms_norm`` computes: the normalised sum, and the sum."""
    sum = (dropout(input, dropout_p, seed) + real(residual)).to(input.dtype)
    return rms_norm(sum, normalized_shape, weight, None, False, eps, None, 0.0), sum
