"""Instance normalisation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from myvision._checks import FLOATING as _DTYPES  # noqa: F401  for `python -m myvision ops`
from myvision._checks import check_tensors
from myvision._dispatch.overrides import overridable
from myvision._formulas.instance_norm import instance_norm as formula
from myvision._formulas.instance_norm import instance_norm_update as update_formula
from myvision.ops._batch_norm import register, running_fakes
from myvision.ops._norm import check_more_than_one

_ops = torch.ops.myvision


@overridable
def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    activation: str | None = None,
    negative_slope: float = 0.01,
) -> Tensor:
    r"""Instance normalisation with what often follows it, in as few passes over memory as there can be.

    ``activation((input - mean) / sqrt(var + eps) * weight + bias + residual)``, with a mean and a variance for each
    channel of each image. A superset of :func:`torch.nn.functional.instance_norm`. Numbers, layouts and autocast are as
    for :func:`~myvision.ops.batch_norm`.

    Args:
        input: ``[batch, channels, ...]``, of float64, float32, float16 or bfloat16.
        running_mean: ``[channels]``, of any of these dtypes, as every parameter. Default: none.
        running_var: ``[channels]``, likewise.
        weight: ``[channels]``. Default: ones.
        bias: ``[channels]``. Default: zeros.
        use_input_stats: normalise by each image's own mean and biased variance, and move the running statistics, where
            given, towards the batch's average of the means and of the unbiased variances; otherwise normalise by the
            running ones. Default: True.
        momentum: how far they move, 0 ... 1. Default: 0.1.
        eps: added to the variance. Default: 1e-5.
        residual: of the input's shape and dtype, added before the activation. Default: none.
        activation: None, ``"relu"``, ``"leaky_relu"``, ``"silu"``, ``"gelu"``, ``"gelu_tanh"`` or ``"hardswish"``.
        negative_slope: of ``"leaky_relu"``. Default: 0.01.

    Returns:
        A tensor of the input's shape and dtype.

    Raises:
        TypeError: an argument is no tensor where it must be one.
        RuntimeError: shapes or devices do not fit together, a dtype is not supported, a tensor is nested, the
            activation is unknown, or a running statistic requires a gradient, is to be updated and expanded, or,
            without ``use_input_stats``, is missing. Running statistics are then as they were.
        ValueError: an image with a single pixel is to be normalised by itself.

    Example::

        >>> import torch
        >>> from myvision.ops import instance_norm
        >>> instance_norm(torch.randn(2, 64, 32, 32), activation="relu").shape
        torch.Size([2, 64, 32, 32])

    Paper: `Instance Normalization: The Missing Ingredient for Fast Stylization <https://arxiv.org/abs/1607.08022>`_.
    """
    statistics = {"running_mean": running_mean, "running_var": running_var}
    check_tensors("instance_norm", {"input": input}, **statistics, weight=weight, bias=bias, residual=residual)
    affine = weight, bias, residual
    if not use_input_stats:
        if running_mean is None or running_var is None:
            raise RuntimeError(
                "instance_norm: without use_input_stats, running_mean and running_var must be given, but one is None"
            )
        return _ops.instance_norm.default(input, running_mean, running_var, *affine, eps, activation, negative_slope)
    check_more_than_one("spatial element", input, input.shape[2:])
    if running_mean is None or running_var is None:
        return _ops.instance_norm.default(input, running_mean, running_var, *affine, eps, activation, negative_slope)
    return _ops.instance_norm.update(
        input, running_mean, running_var, *affine, momentum, eps, activation, negative_slope
    )


def _has_own_statistics(call: Any) -> bool:
    return call.running_mean is None


def _channels(call: Any) -> int:
    return call.input.shape[1]


_fake, _fake_update = running_fakes("instance_norm")
register(
    _ops.instance_norm.default,
    _ops._instance_norm_forward.default,
    _fake,
    formula,
    own_statistics=_has_own_statistics,
    groups=_channels,
)
register(_ops.instance_norm.update, _ops._instance_norm_forward.update, _fake_update, update_formula, groups=_channels)
