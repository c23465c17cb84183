"""What the normalisations share: half types are computed in float32, float32 and float64 as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from myvision._formulas._activation import activate


def real(tensor: Tensor) -> Tensor:
    """The tensor in the type in which its kind is computed."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def moments(x: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
    """Mean and variance over these dimensions, which are kept with size 1."""
    mean = x.mean(dims, keepdim=True)
    return mean, (x - mean).square().mean(dims, keepdim=True)


def normalise(x: Tensor, dims: list[int], eps: float) -> Tensor:
    x, factor = squarable(x, dims)
    mean, variance = moments(x, dims)
    return (x - mean) * torch.rsqrt(variance + eps * factor.square())


def squarable(x: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
    """The tensor times a power of 2, and that: 1, unless a sum of squares over these dimensions might overflow.

    A normalised tensor is the same with it, if eps is multiplied by its square.
    """
    if x.numel() == 0:
        return x, x.new_ones(())
    peak = x.detach().abs().amax(dims, keepdim=True)
    ordinary = (peak < torch.finfo(x.dtype).max ** 0.25) | ~peak.isfinite()
    factor = torch.where(ordinary, 1.0, torch.exp2(-torch.log2(torch.where(ordinary, 1.0, peak)).floor()))
    return x * factor, factor


def per_channel(parameter: Tensor | None, input: Tensor) -> Tensor | None:
    """A parameter of one number a channel, so that it broadcasts with [batch, channels, ...]."""
    return None if parameter is None else parameter.reshape(-1, *[1] * (input.dim() - 2))


def finish(
    normalised: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    negative_slope: float,
    dtype: torch.dtype,
) -> Tensor:
    """activation(normalised * weight + bias + residual), rounded once."""
    output = normalised
    if weight is not None:
        output = output * real(weight)
    for term in (bias, residual):
        if term is not None:
            output = output + real(term)
    return activate(output, activation, negative_slope).to(dtype)


def update_(running: Tensor, new: Tensor, momentum: float) -> None:
    """Moves a running statistic, of one number a channel, towards a new one."""
    with torch.no_grad():
        running.copy_((1 - momentum) * real(running) + momentum * new.reshape(running.shape))
