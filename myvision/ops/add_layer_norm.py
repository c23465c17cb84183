"""Dropout, addition and layer normalisation: the step between the blocks of a transformer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from myvision._checks import FLOATING as _DTYPES  # noqa: F401  for `python -m myvision ops`
from myvision._checks import check_tensors
from myvision._dispatch.overrides import overridable
from myvision._formulas.add_layer_norm import add_layer_norm as formula
from myvision.ops._dropout import check_probability, new_seed
from myvision.ops._layer_norm import as_shape, register_add

_ops = torch.ops.myvision


@overridable
def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    dropout_p: float = 0.0,
    training: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""The step between the blocks of a pre-norm transformer, in one pass over memory.

    ``sum = dropout(input) + residual``; ``output = layer_norm(sum)``. Numbers and layouts are as for
    :func:`~myvision.ops.layer_norm`. Under autocast input and residual take the wider of their dtypes.

    Args:
        input: ``[..., *normalized_shape]``, what a block returned, of float64, float32, float16 or bfloat16.
        residual: of the same shape and dtype, what went past the block.
        normalized_shape: the last dimensions, over which the mean is taken; one number for the last one.
        weight: of shape ``normalized_shape``, of any of these dtypes. Default: ones.
        bias: likewise. Default: zeros.
        eps: added to the variance. Default: 1e-5.
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
        >>> from myvision.ops import add_layer_norm
        >>> attended, residual = torch.randn(8, 128, 768), torch.randn(8, 128, 768)
        >>> output, sum = add_layer_norm(attended, residual, 768, dropout_p=0.1, training=True)

    Papers: `Layer Normalization <https://arxiv.org/abs/1607.06450>`_ and `On Layer Normalization in the Transformer
    Architecture <https://arxiv.org/abs/2002.04745>`_.
    """
    check_tensors("add_layer_norm", {"input": input, "residual": residual}, weight=weight, bias=bias)
    check_probability("add_layer_norm", dropout_p)
    dropout_p = dropout_p if training else 0.0
    return _ops.add_layer_norm.default(
        input, residual, as_shape(normalized_shape), weight, bias, eps, dropout_p, new_seed(input, dropout_p)
    )


register_add(_ops.add_layer_norm.default, _ops._add_layer_norm_forward.default, formula)
