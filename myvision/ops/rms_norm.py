"""Normalisation by the root of the mean square."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from myvision._checks import FLOATING as _DTYPES  # noqa: F401  for `python -m myvision ops`
from myvision._checks import check_tensors
from myvision._dispatch.nested import is_nested, on_nested_rows
from myvision._dispatch.overrides import overridable
from myvision._formulas.rms_norm import rms_norm as formula
from myvision.ops._layer_norm import as_shape, is_first, register
from myvision.ops._norm import default_rms_eps

_ops = torch.ops.myvision


@overridable
def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    residual: Tensor | None = None,
    activation: str | None = None,
    negative_slope: float = 0.01,
    channels: Literal["first", "last"] = "last",
) -> Tensor:
    r"""Normalisation by the root of the mean square with what often follows it, in one pass over memory.

    ``activation(input / sqrt(mean(input ** 2) + eps) * weight + residual)``, with a mean for each row. A superset of
    :func:`torch.nn.functional.rms_norm`. Numbers, layouts and autocast are as for :func:`~myvision.ops.layer_norm`.

    Args:
        input: ``[..., *normalized_shape]``, of float64, float32, float16 or bfloat16; or a nested tensor, jagged or
            strided, whose components have these last dimensions.
        normalized_shape: the last dimensions, over which the mean is taken; one number for the last one.
        weight: of shape ``normalized_shape``, of any of these dtypes. Default: ones.
        eps: added to the mean. Default: the resolution of what is computed in, 1.2e-7 or, for float64, 2.2e-16.
        residual: of the input's shape and dtype, added before the activation. Default: none.
        activation: None, ``"relu"``, ``"leaky_relu"``, ``"silu"``, ``"gelu"``, ``"gelu_tanh"`` or ``"hardswish"``.
        negative_slope: of ``"leaky_relu"``. Default: 0.01.
        channels: ``"last"``: ``normalized_shape`` is the end of the input's shape. ``"first"``: images
            ``[batch, channels, ...]`` are normalised over their channels, for each pixel, and ``normalized_shape`` is
            their number. Neither layout is copied. Default: ``"last"``.

    Returns:
        A tensor of the input's shape and dtype; contiguous, or with ``channels="first"`` channels_last if the input is.

    Raises:
        TypeError: an argument is no tensor where it must be one.
        RuntimeError: shapes or devices do not fit together, a dtype is not supported, or the activation is unknown.
        ValueError: ``channels`` is an unknown word.

    Example::

        >>> import torch
        >>> from myvision.ops import rms_norm
        >>> rms_norm(torch.randn(8, 128, 768), 768).shape
        torch.Size([8, 128, 768])

    Paper: `Root Mean Square Layer Normalization <https://arxiv.org/abs/1910.07467>`_.
    """
    shape, channels_first = as_shape(normalized_shape), is_first("rms_norm", channels)
    if is_nested(input) and not channels_first:

        def of_rows(input: Tensor, residual: Tensor | None) -> Tensor:
            options: dict[str, Any] = {"activation": activation, "negative_slope": negative_slope}
            return rms_norm(input, shape, weight, eps, residual=residual, **options)

        return on_nested_rows("rms_norm", of_rows, input, residual, len(shape))
    check_tensors("rms_norm", {"input": input}, weight=weight, residual=residual)
    if eps is None:
        eps = default_rms_eps(input)
    return _ops.rms_norm.default(input, shape, weight, residual, channels_first, eps, activation, negative_slope)


register(_ops.rms_norm.default, _ops._rms_norm_forward.default, formula)
