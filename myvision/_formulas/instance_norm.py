"""Instance normalisation in plain torch."""

from __future__ import annotations

from torch import Tensor

from myvision._formulas._normalise import finish, moments, normalise, per_channel, real, update_
from myvision._formulas.batch_norm import batch_norm


def instance_norm(
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
    """What ``torch.ops.myvision.instance_norm`` computes: by the running statistics, or by each image's own."""
    if running_mean is not None:
        return batch_norm(input, running_mean, running_var, weight, bias, residual, eps, activation, negative_slope)
    normalised = normalise(real(input), _spatial(input), eps)
    weight, bias = per_channel(weight, input), per_channel(bias, input)
    return finish(normalised, weight, bias, residual, activation, negative_slope, input.dtype)


def instance_norm_update(
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
    """What ``torch.ops.myvision.instance_norm.update`` computes: the running statistics follow the images' average.

    The running variance follows the unbiased ones. An empty batch changes nothing.
    """
    if input.numel() > 0:
        count = input.shape[2:].numel()
        mean, variance = moments(real(input.detach()), _spatial(input))
        update_(running_mean, mean.mean(0), momentum)
        update_(running_var, variance.mean(0) * count / (count - 1), momentum)
    return instance_norm(input, None, None, weight, bias, residual, eps, activation, negative_slope)


def _spatial(input: Tensor) -> list[int]:
    return list(range(2, input.dim()))
