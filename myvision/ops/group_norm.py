"""Group normalisation."""

from __future__ import annotations

import torch
from torch import Tensor

from myvision._checks import FLOATING as _DTYPES  # noqa: F401  for `python -m myvision ops`
from myvision._checks import check_tensors, is_integer
from myvision._dispatch.overrides import overridable
from myvision._formulas.group_norm import group_norm as formula
from myvision.ops._batch_norm import fake_group_norm, register
from myvision.ops._norm import check_more_than_one

_ops = torch.ops.myvision


@overridable
def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    activation: str | None = None,
    negative_slope: float = 0.01,
) -> Tensor:
    r"""Group normalisation with what often follows it, in as few passes over memory as there can be.

    ``activation((input - mean) / sqrt(var + eps) * weight + bias + residual)``, with a mean and a variance for each
    group of neighbouring channels of each image. A superset of :func:`torch.nn.functional.group_norm`. Numbers, layouts
    and autocast are as for :func:`~myvision.ops.batch_norm`.

    Args:
        input: ``[batch, channels, ...]``, of float64, float32, float16 or bfloat16.
        num_groups: into how many groups the channels are divided; a divisor of their number.
        weight: ``[channels]``, of any of these dtypes. Default: ones.
        bias: ``[channels]``, likewise. Default: zeros.
        eps: added to the variance. Default: 1e-5.
        residual: of the input's shape and dtype, added before the activation. Default: none.
        activation: None, ``"relu"``, ``"leaky_relu"``, ``"silu"``, ``"gelu"``, ``"gelu_tanh"`` or ``"hardswish"``.
        negative_slope: of ``"leaky_relu"``. Default: 0.01.

    Returns:
        A tensor of the input's shape and dtype.

    Raises:
        TypeError: an argument is no tensor, or ``num_groups`` no integer, where it must be one.
        RuntimeError: shapes or devices do not fit together, a dtype is not supported, a tensor is nested,
            ``num_groups`` is no divisor, or the activation is unknown.
        ValueError: a single value is to be normalised by itself.

    Example::

        >>> import torch
        >>> from myvision.ops import group_norm
        >>> group_norm(torch.randn(2, 64, 32, 32), 8, activation="silu").shape
        torch.Size([2, 64, 32, 32])

    Paper: `Group Normalization <https://arxiv.org/abs/1803.08494>`_.
    """
    check_tensors("group_norm", {"input": input}, weight=weight, bias=bias, residual=residual)
    if not is_integer(num_groups):
        raise TypeError(f"group_norm: num_groups must be an integer, but got {type(num_groups).__name__}")
    if input.dim() >= 2 and num_groups >= 1:  # or else the operator says what is wrong
        check_more_than_one(
            "value per channel",
            input,
            (input.shape[0] * input.shape[1] // num_groups, *input.shape[2:]),
        )
    return _ops.group_norm.default(input, num_groups, weight, bias, residual, eps, activation, negative_slope)


register(
    _ops.group_norm.default,
    _ops._group_norm_forward.default,
    fake_group_norm,
    formula,
    groups=lambda call: call.num_groups,
)
