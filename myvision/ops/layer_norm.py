"""Layer normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from myvision._checks import FLOATING as _DTYPES  # noqa: F401  for `python -m myvision ops`
from myvision._checks import check_tensors
from myvision._dispatch.nested import is_nested, on_nested_rows
from myvision._dispatch.overrides import overridable
from myvision._formulas.layer_norm import layer_norm as formula
from myvision.ops._layer_norm import as_shape, is_first, register

_ops = torch.ops.myvision


@overridable
def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    activation: str | None = None,
    negative_slope: float = 0.01,
    channels: Literal["first", "last"] = "last",
) -> Tensor:
    r"""Layer normalisation with what often follows it, in one pass over memory.

    ``activation((input - mean) / sqrt(var + eps) * weight + bias + residual)``, with a mean and a variance for each
    row. A superset of :func:`torch.nn.functional.layer_norm`.

    Half types are computed in float32. Statistics hold to the last bits where values are large beside their spread.
    Every memory layout is read as it is. Under autocast the input's dtype decides.

    Args:
        input: ``[..., *normalized_shape]``, of float64, float32, float16 or bfloat16; or a nested tensor, jagged or
            strided, whose components have these last dimensions.
        normalized_shape: the last dimensions, over which the mean is taken; one number for the last one.
        weight: of shape ``normalized_shape``, of any of these dtypes. Default: ones.
        bias: likewise. Default: zeros.
        eps: added to the variance. Default: 1e-5.
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
        >>> from myvision.ops import layer_norm
        >>> layer_norm(torch.randn(8, 128, 768), 768, activation="gelu").shape
        torch.Size([8, 128, 768])
        >>> layer_norm(torch.randn(2, 96, 56, 56), 96, channels="first").shape
        torch.Size([2, 96, 56, 56])

    Paper: `Layer Normalization <https://arxiv.org/abs/1607.06450>`_.
    """
    shape, channels_first = as_shape(normalized_shape), is_first("layer_norm", channels)
    if is_nested(input) and not channels_first:

        def of_rows(input: Tensor, residual: Tensor | None) -> Tensor:
            options: dict[str, Any] = {"activation": activation, "negative_slope": negative_slope}
            return layer_norm(input, shape, weight, bias, eps, residual=residual, **options)

        return on_nested_rows("layer_norm", of_rows, input, residual, len(shape))
    check_tensors("layer_norm", {"input": input}, weight=weight, bias=bias, residual=residual)
    return _ops.layer_norm.default(
        input, shape, weight, bias, residual, channels_first, eps, activation, negative_slope
    )


register(_ops.layer_norm.default, _ops._layer_norm_forward.default, formula)
