"""Dropout, addition and normalisation by the root of the mean square as a module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from myvision.nn._add_norm import AddNorm
from myvision.ops.add_rms_norm import add_rms_norm


class AddRMSNorm(AddNorm, nn.RMSNorm):
    """The step between two branches of a transformer, see :func:`myvision.ops.add_rms_norm`.

    ``sum = dropout(x) + residual`` goes on as the residual, ``norm(sum)`` into the next branch. Parameters and
    ``state_dict`` are those of ``torch.nn.RMSNorm``.

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype: as in ``torch.nn.RMSNorm``.
        dropout_p: probability to drop an element of the input in training. Default: 0.

    Shape:
        - x, residual: ``[..., *normalized_shape]``.
        - output: a tuple of the norm and the sum, both as x.

    Raises:
        ValueError: ``dropout_p`` is not between 0 and 1.
        RuntimeError: in the call, where shapes, dtypes or devices do not fit together.

    Example::

        >>> import torch
        >>> from myvision.nn import AddRMSNorm
        >>> layer = AddRMSNorm(768, dropout_p=0.1)
        >>> branch, stream = torch.rand(2, 197, 768), torch.rand(2, 197, 768)
        >>> normalised, stream = layer(branch, stream)
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        dropout_p: float = 0.0,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self._set_dropout(dropout_p)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return add_rms_norm(x, residual, self.normalized_shape, self.weight, self.eps, self.dropout_p, self.training)
