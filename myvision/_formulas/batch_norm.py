"""Batch normalisation in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from myvision._formulas._normalise import finish, moments, normalise, per_channel, real, update_


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    activation: str | None,
    negative_slope: float,
) -> Tensor:
    """What ``torch.ops.myvision.batch_norm`` computes: by the running statistics, or by the input's own."""
    x = real(input)
    mean, variance = per_channel(running_mean, input), per_channel(running_var, input)
    if mean is None or variance is None:
        normalised = normalise(x, _all_but_channels(input), eps)
    else:
        normalised = (x - real(mean)) * torch.rsqrt(real(variance) + eps)
    weight, bias = per_channel(weight, input), per_channel(bias, input)
    return finish(normalised, weight, bias, residual, activation, negative_slope, input.dtype)


def batch_norm_update(
    input: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    momentum: float,
    eps: float,
    activation: str | None,
    negative_slope: float,
) -> Tensor:
    """What ``torch.ops.myvision.batch_norm.update`` computes: by the input's statistics, which the running ones follow.

    The running variance follows the unbiased one. An empty batch changes nothing.
    """
    if input.numel() > 0:
        count = input.numel() // input.shape[1]
        mean, variance = moments(real(input.detach()), _all_but_channels(input))
        update_(running_mean, mean, momentum)
        update_(running_var, variance * count / (count - 1), momentum)
    return batch_norm(input, None, None, weight, bias, residual, eps, activation, negative_slope)


def _all_but_channels(input: Tensor) -> list[int]:
    return [0, *range(2, input.dim())]
