"""Normalisation by the root of the mean square as modules."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from myvision.nn._channels import NormalisesChannels
from myvision.nn._fused import FusedActivation
from myvision.ops.add_rms_norm import add_rms_norm
from myvision.ops.rms_norm import rms_norm


class RMSNorm(FusedActivation, NormalisesChannels, nn.RMSNorm):
    """RMS normalisation, see :func:`myvision.ops.rms_norm`: ``activation(norm(x) + residual)`` in one pass.

    A ``torch.nn.RMSNorm`` in every other respect.

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype: as in ``torch.nn.RMSNorm``.
        channels: ``"last"`` to normalise over the last dimensions, ``"first"`` over dimension 1, as of images
            ``[batch, channels, height, width]``. Default: ``"last"``.
        activation: ``"relu"``, ``"leaky_relu"``, ``"silu"``, ``"gelu"``, ``"gelu_tanh"``, ``"hardswish"`` or None.
            Default: None.
        negative_slope: of ``"leaky_relu"``. Default: 0.01.

    Shape:
        - x: ``[..., *normalized_shape]``, or ``[batch, normalized_shape, ...]`` with ``channels="first"``.
        - residual: as x, or None. Default: None.
        - output: as x.

    Raises:
        ValueError: no such activation or channels, or ``channels="first"`` with several dimensions.
        RuntimeError: in the call, where shapes, dtypes or devices do not fit together.

    Example::

        >>> import torch
        >>> from myvision.nn import RMSNorm
        >>> RMSNorm(768)(torch.rand(2, 197, 768)).shape
        torch.Size([2, 197, 768])

    Paper: `Root Mean Square Layer Normalization <https://arxiv.org/abs/1910.07467>`_.
    """

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return rms_norm(
            x,
            self.normalized_shape,
            self.weight,
            self.eps,
            residual=residual,
            activation=self.activation,
            negative_slope=self.negative_slope,
            channels=self.channels,
        )


class AddRMSNorm(nn.RMSNorm):
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
        RuntimeError: in the call, where shapes, dtypes or devices do not fit together.

    Example::

        >>> import torch
        >>> from myvision.nn import AddRMSNorm
        >>> layer = AddRMSNorm(768, dropout_p=0.1)
        >>> branch, stream = torch.rand(2, 197, 768), torch.rand(2, 197, 768)
        >>> normalised, stream = layer(branch, stream)
    """

    def __init__(self, *args: Any, dropout_p: float = 0.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dropout_p = dropout_p

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return add_rms_norm(x, residual, self.normalized_shape, self.weight, self.eps, self.dropout_p, self.training)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, dropout_p={self.dropout_p}"
