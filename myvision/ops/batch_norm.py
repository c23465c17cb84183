"""Batch normalisation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from myvision._checks import FLOATING as _DTYPES  # noqa: F401  for `python -m myvision ops`
from myvision._checks import check_tensors
from myvision._dispatch.overrides import overridable
from myvision._formulas.batch_norm import batch_norm as formula
from myvision._formulas.batch_norm import batch_norm_update as update_formula
from myvision.ops._batch_norm import register, running_fakes
from myvision.ops._norm import check_more_than_one

_ops = torch.ops.myvision


@overridable
def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    activation: str | None = None,
    negative_slope: float = 0.01,
) -> Tensor:
    r"""Batch normalisation with what often follows it, in as few passes over memory as there can be.

    ``activation((input - mean) / sqrt(var + eps) * weight + bias + residual)``, with a mean and a variance for each
    channel: the running ones, or, in training, those of the batch. A superset of
    :func:`torch.nn.functional.batch_norm`.

    Half types are computed in float32. Statistics hold to the last bits where values are large beside their spread. An
    empty batch leaves the running statistics as they are. Every memory layout is read as it is, and a channels_last
    input gives a channels_last output. Under autocast the input's dtype decides.

    Args:
        input: ``[batch, channels, ...]``, of float64, float32, float16 or bfloat16; or ``[0]``, returned as it is.
        running_mean: ``[channels]``, of any of these dtypes, as every parameter. May be None in training.
        running_var: ``[channels]``, likewise.
        weight: ``[channels]``. Default: ones.
        bias: ``[channels]``. Default: zeros.
        training: normalise by the batch's own mean and biased variance, and move the running statistics towards the
            mean and the unbiased variance. Default: False.
        momentum: how far they move, 0 ... 1. Default: 0.1.
        eps: added to the variance, and not negative. Default: 1e-5.
        residual: of the input's shape and dtype, added before the activation. Default: none.
        activation: None, ``"relu"``, ``"leaky_relu"``, ``"silu"``, ``"gelu"``, ``"gelu_tanh"`` or ``"hardswish"``.
        negative_slope: of ``"leaky_relu"``. Default: 0.01.

    Returns:
        A tensor of the input's shape and dtype.

    Raises:
        TypeError: an argument is no tensor where it must be one.
        RuntimeError: shapes or devices do not fit together, a dtype is not supported, a tensor is nested, the
            activation is unknown, eps is negative, or a running statistic requires a gradient, is to be updated and
            expanded, or, without ``training``, is missing. Running statistics are then as they were.
        ValueError: in training a channel has a single value.

    Example::

        >>> import torch
        >>> from myvision.ops import batch_norm
        >>> input, residual = torch.randn(8, 64, 56, 56), torch.randn(8, 64, 56, 56)
        >>> running_mean, running_var = torch.zeros(64), torch.ones(64)
        >>> batch_norm(input, running_mean, running_var, training=True, residual=residual, activation="relu").shape
        torch.Size([8, 64, 56, 56])

    Paper: `Batch Normalization: Accelerating Deep Network Training by Reducing Internal Covariate Shift
    <https://arxiv.org/abs/1502.03167>`_.
    """
    statistics = {"running_mean": running_mean, "running_var": running_var}
    check_tensors("batch_norm", {"input": input}, **statistics, weight=weight, bias=bias, residual=residual)
    affine = weight, bias, residual
    if input.dim() == 1 and input.shape[0] == 0:  # what torch's own function returns as it is
        return batch_norm(input[:, None], None, None, training=True, eps=eps, activation=activation)[:, 0]
    if not training:
        if running_mean is None or running_var is None:
            raise RuntimeError(
                "batch_norm: without training, running_mean and running_var must be given, but one is None"
            )
        return _ops.batch_norm.default(input, running_mean, running_var, *affine, eps, activation, negative_slope)
    check_more_than_one("value per channel", input, input.shape[:1] + input.shape[2:])
    if running_mean is None or running_var is None:
        return _ops.batch_norm.default(input, running_mean, running_var, *affine, eps, activation, negative_slope)
    return _ops.batch_norm.update(input, running_mean, running_var, *affine, momentum, eps, activation, negative_slope)


def _has_own_statistics(call: Any) -> bool:
    return call.running_mean is None


_fake, _fake_update = running_fakes("batch_norm")
register(
    _ops.batch_norm.default,
    _ops._batch_norm_forward.default,
    _fake,
    formula,
    own_statistics=_has_own_statistics,
)
register(_ops.batch_norm.update, _ops._batch_norm_forward.update, _fake_update, update_formula)
