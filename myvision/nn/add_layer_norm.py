"""Dropout, addition and layer normalisation as a module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from myvision.nn._add_norm import AddNorm
from myvision.ops.add_layer_norm import add_layer_norm


class AddLayerNorm(AddNorm, nn.LayerNorm):
    """The step between two branches of a transformer, see :func:`myvision.ops.add_layer_norm`.

    ``sum = dropout(input) + residual`` goes on as the residual, ``norm(sum)`` into the next branch. Parameters and
    ``state_dict`` are those of ``torch.nn.LayerNorm``.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as in ``torch.nn.LayerNorm``.
        dropout_p: probability to drop an element of the input in training. Default: 0.

    Shape:
        - input, residual: ``[..., *normalized_shape]``.
        - output: a tuple of the norm and the sum, both as input.

    Raises:
        ValueError: ``dropout_p`` is not between 0 and 1.
        RuntimeError: in the call, where shapes, dtypes or devices do not fit together.

    Example::

        >>> import torch
        >>> from myvision.nn import AddLayerNorm
        >>> layer = AddLayerNorm(768, dropout_p=0.1)
        >>> branch, stream = torch.rand(2, 197, 768), torch.rand(2, 197, 768)
        >>> normalised, stream = layer(branch, stream)
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        dropout_p: float = 0.0,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self._set_dropout(dropout_p)

    def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return add_layer_norm(
            input, residual, self.normalized_shape, self.weight, self.bias, self.eps, self.dropout_p, self.training
        )
