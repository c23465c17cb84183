"""Layer normalisation in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from myvision._formulas._normalise import finish, normalise, per_channel, real


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    channels_first: bool,
    eps: float,
    activation: str | None,
    negative_slope: float,
) -> Tensor:
    """What ``torch.ops.myvision.layer_norm`` computes: over the last dimensions, or over dimension 1."""
    normalised = normalise(real(input), normalised_dims(normalized_shape, channels_first), eps)
    if channels_first:
        weight, bias = per_channel(weight, input), per_channel(bias, input)
    return finish(normalised, weight, bias, residual, activation, negative_slope, input.dtype)


def normalised_dims(normalized_shape: Sequence[int], channels_first: bool) -> list[int]:
    return [1] if channels_first else list(range(-len(normalized_shape), 0))
