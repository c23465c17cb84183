"""Group normalisation as a module."""

from __future__ import annotations

from torch import Tensor, nn

from myvision.nn._fused import FusedActivation
from myvision.ops.group_norm import group_norm


class GroupNorm(FusedActivation, nn.GroupNorm):
    """Group normalisation, see :func:`myvision.ops.group_norm`: ``activation(norm(input) + residual)`` in one pass.

    A ``torch.nn.GroupNorm`` in every other respect.

    Args:
        num_groups, num_channels, eps, affine, device, dtype, bias: as in ``torch.nn.GroupNorm``.
        activation: ``"relu"``, ``"leaky_relu"``, ``"silu"``, ``"gelu"``, ``"gelu_tanh"``, ``"hardswish"`` or None.
            Default: None.
        negative_slope: of ``"leaky_relu"``. Default: 0.01.

    Shape:
        - input: ``[batch, num_channels, ...]``.
        - residual: as input, or None. Default: None.
        - output: as input.

    Raises:
        ValueError: no such activation, or channels that are no multiple of the groups.
        RuntimeError: in the call, where shapes, dtypes or devices do not fit together.

    Example::

        >>> import torch
        >>> from myvision.nn import GroupNorm
        >>> layer = GroupNorm(4, 8, activation="silu")
        >>> layer(torch.rand(2, 8, 16, 16)).shape
        torch.Size([2, 8, 16, 16])

    Paper: `Group Normalization <https://arxiv.org/abs/1803.08494>`_.
    """

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        return group_norm(
            input,
            self.num_groups,
            self.weight,
            self.bias,
            self.eps,
            residual=residual,
            activation=self.activation,
            negative_slope=self.negative_slope,
        )
