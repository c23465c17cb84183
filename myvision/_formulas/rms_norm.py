"""Normalisation by the root of the mean square, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from myvision._formulas._normalise import finish, per_channel, real, squarable
from myvision._formulas.layer_norm import normalised_dims


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    residual: Tensor | None,
    channels_first: bool,
    eps: float,
    activation: str | None,
    negative_slope: float,
) -> Tensor:
    """What ``torch.ops.myvision.rms_norm`` computes: over the last dimensions, or over dimension 1."""
    dims = normalised_dims(normalized_shape, channels_first)
    x, factor = squarable(real(input), dims)
    mean_square = x.square().mean(dims, keepdim=True)
    if channels_first:
        weight = per_channel(weight, input)
    normalised = x * torch.rsqrt(mean_square + eps * factor.square())
    return finish(normalised, weight, None, residual, activation, negative_slope, input.dtype)
