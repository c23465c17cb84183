"""Layer normalisation as a module."""

from __future__ import annotations

from torch import Tensor, nn

from myvision.nn._channels import NormalisesChannels
from myvision.nn._fused import FusedActivation
from myvision.ops.layer_norm import layer_norm


class LayerNorm(FusedActivation, NormalisesChannels, nn.LayerNorm):
    """Layer normalisation, see :func:`myvision.ops.layer_norm`: ``activation(norm(input) + residual)`` in one pass.

    A ``torch.nn.LayerNorm`` in every other respect.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as in ``torch.nn.LayerNorm``.
        channels: ``"last"`` to normalise over the last dimensions, ``"first"`` over dimension 1, as of images
            ``[batch, channels, height, width]``. Default: ``"last"``.
        activation: ``"relu"``, ``"leaky_relu"``, ``"silu"``, ``"gelu"``, ``"gelu_tanh"``, ``"hardswish"`` or None.
            Default: None.
        negative_slope: of ``"leaky_relu"``. Default: 0.01.

    Shape:
        - input: ``[..., *normalized_shape]``, or ``[batch, normalized_shape, ...]`` with ``channels="first"``.
        - residual: as input, or None. Default: None.
        - output: as input.

    Raises:
        ValueError: no such activation or channels, or ``channels="first"`` with several dimensions.
        RuntimeError: in the call, where shapes, dtypes or devices do not fit together.

    Example::

        >>> import torch
        >>> from myvision.nn import LayerNorm
        >>> LayerNorm(768)(torch.rand(2, 197, 768)).shape
        torch.Size([2, 197, 768])
        >>> LayerNorm(8, channels="first", activation="gelu")(torch.rand(2, 8, 16, 16)).shape
        torch.Size([2, 8, 16, 16])

    Paper: `Layer Normalization <https://arxiv.org/abs/1607.06450>`_.
    """

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        return layer_norm(
            input,
            self.normalized_shape,
            self.weight,
            self.bias,
            self.eps,
            residual=residual,
            activation=self.activation,
            negative_slope=self.negative_slope,
            channels=self.channels,
        )
