"""Dropout, addition and normalisation by the root of the mean square: the step between the blocks of a transformer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from myvision._checks import FLOATING as _DTYPES  # noqa: F401  for `python -m myvision ops`
from myvision._checks import check_tensors
from myvision._dispatch.overrides import overridable
from myvision._formulas.add_rms_norm import add_rms_norm as formula
from myvision.ops._dropout import check_probability, new_seed
from myvision.ops._layer_norm import as_shape, register_add
from myvision.ops._norm import default_rms_eps

_ops = torch.ops.myvision


@overridable
def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    dropout_p: float = 0.0,
    training: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""The step between the blocks of a pre-norm transformer, by root mean square, in one pass over memory.

    ``sum = dropout(input) + residual``; ``output = rms_norm(sum)``. Numbers and layouts are as for
    :func:`~myvision.ops.layer_norm`. Under autocast input and residual take the wider of their dtypes.

    Args:
        input: ``[..., *normalized_shape]``, what a block returned, of float64, float32, float16 or bfloat16.
        residual: of the same shape and dtype, what went past the block.
        normalized_shape: the last dimensions, over which the mean is taken; one number for the last one.
        weight: of shape ``normalized_shape``, of any of these dtypes. Default: ones.
        eps: added to the mean. Default: the resolution of what is computed in, 1.2e-7 or, for float64, 2.2e-16.
        dropout_p: with what probability an element of the input is dropped in training; the others are scaled by
            ``1 / (1 - dropout_p)``. Which ones follows from a number of torch's default generator, so that
            :func:`torch.manual_seed` repeats it; no mask is kept for backward. Default: 0.
        training: drop at all. Default: False.

    Returns:
        ``(output, sum)``, both of the input's shape and dtype and contiguous: the normalised sum, for the next block,
        and the sum ``dropout(input) + residual``, the residual of the step after it.

    Raises:
        TypeError: an argument is no tensor where it must be one.
        RuntimeError: shapes or devices do not fit together, a dtype is not supported, a tensor is nested, or
            ``dropout_p`` is not between 0 and 1.

    Example::

        >>> import torch
        >>> from myvision.ops import add_rms_norm
        >>> attended, residual = torch.randn(8, 128, 768), torch.randn(8, 128, 768)
        >>> output, sum = add_rms_norm(attended, residual, 768)

    Paper: `Root Mean Square Layer Normalization <https://arxiv.org/abs/1910.07467>`_.
    """
    check_tensors("add_rms_norm", {"input": input, "residual": residual}, weight=weight)
    check_probability("add_rms_norm", dropout_p)
    dropout_p = dropout_p if training else 0.0
    if eps is None:
        eps = default_rms_eps(input)
    return _ops.add_rms_norm.default(
        input, residual, as_shape(normalized_shape), weight, eps, dropout_p, new_seed(input, dropout_p)
    )


register_add(_ops.add_rms_norm.default, _ops._add_rms_norm_forward.default, formula)
