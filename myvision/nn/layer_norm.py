"""Layer normalisation as modules."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from myvision.nn._channels import NormalisesChannels
from myvision.nn._fused import FusedActivation
from myvision.ops.add_layer_norm import add_layer_norm
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


class AddLayerNorm(nn.LayerNorm):
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
        RuntimeError: in the call, where shapes, dtypes or devices do not fit together.

    Example::

        >>> import torch
        >>> from myvision.nn import AddLayerNorm
        >>> layer = AddLayerNorm(768, dropout_p=0.1)
        >>> branch, stream = torch.rand(2, 197, 768), torch.rand(2, 197, 768)
        >>> normalised, stream = layer(branch, stream)
    """

    def __init__(self, *args: Any, dropout_p: float = 0.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dropout_p = dropout_p

    def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return add_layer_norm(
            input, residual, self.normalized_shape, self.weight, self.bias, self.eps, self.dropout_p, self.training
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, dropout_p={self.dropout_p}"
