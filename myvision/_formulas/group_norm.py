"""Group normalisation in plain torch."""

from __future__ import annotations

from torch import Tensor

from myvision._formulas._normalise import finish, normalise, per_channel, real


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    activation: str | None,
    negative_slope: float,
) -> Tensor:
    """What ``torch.ops.myvision.group_norm`` computes."""
    grouped = real(input).unflatten(1, (num_groups, input.shape[1] // num_groups))
    normalised = normalise(grouped, list(range(2, grouped.dim())), eps).flatten(1, 2)
    weight, bias = per_channel(weight, input), per_channel(bias, input)
    return finish(normalised, weight, bias, residual, activation, negative_slope, input.dtype)
