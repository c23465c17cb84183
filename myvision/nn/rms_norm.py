"""Normalisation by the root of the mean square as a module."""

from __future__ import annotations

from torch import Tensor, nn

from myvision.nn._channels import NormalisesChannels
from myvision.nn._fused import FusedActivation
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
