"""Group normalisation as modules."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.jit import is_scripting  # type: ignore[attr-defined]

from myvision.nn._activation import constants
from myvision.nn._norm import Norm, NormAct, make_affine
from myvision.ops.group_norm import group_norm


class GroupNormForward(Norm):
    """The call of a group norm."""

    __constants__: ClassVar = constants(nn.GroupNorm)

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.fused(input, residual, self.activation, self.negative_slope)

    def fused(self, input: Tensor, residual: Tensor | None, activation: str | None, negative_slope: float) -> Tensor:
        """``activation(norm(input) + residual)``, whatever the module's own activation."""
        if not is_scripting():
            return group_norm(
                input,
                self.num_groups,
                self.weight,
                self.bias,
                self.eps,
                residual=residual,
                activation=activation,
                negative_slope=negative_slope,
            )
        else:  # noqa: RET505  TorchScript compiles what follows
            return torch.ops.myvision.group_norm(
                input,
                self.num_groups,
                self.weight,
                self.bias,
                residual,
                self.eps,
                activation,
                negative_slope,
            )


class GroupNorm(GroupNormForward, nn.GroupNorm):
    """Group normalisation, see :func:`myvision.ops.group_norm`: ``norm(input) + residual`` in one pass.

    A ``torch.nn.GroupNorm`` in every other respect. With an activation it is :class:`GroupNormAct`.

    Args:
        num_groups, num_channels, eps, affine, device, dtype, bias: as in ``torch.nn.GroupNorm``.

    Shape:
        - input: ``[batch, num_channels, ...]``.
        - residual: as input, or None. Default: None.
        - output: as input.

    Raises:
        ValueError: the channels are no multiple of the groups.
        RuntimeError: in the call, where shapes, dtypes or devices do not fit together.

    Example::

        >>> import torch
        >>> from myvision.nn import GroupNorm
        >>> layer = GroupNorm(4, 8)
        >>> layer(torch.rand(2, 8, 16, 16)).shape
        torch.Size([2, 8, 16, 16])

    Paper: `Group Normalization <https://arxiv.org/abs/1803.08494>`_.
    """


class GroupNormAct(NormAct, GroupNormForward, nn.Module):
    """Group normalisation with an activation: ``activation(norm(input) + residual)`` in one pass.

    Parameters and ``state_dict`` are those of ``torch.nn.GroupNorm``, of which it is no subclass.

    Args:
        num_groups, num_channels, eps, affine, device, dtype, bias: as in ``torch.nn.GroupNorm``.
        activation: ``"relu"``, ``"leaky_relu"``, ``"silu"``, ``"gelu"``, ``"gelu_tanh"``, ``"hardswish"`` or None.
            Default: ``"relu"``.
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
        >>> from myvision.nn import GroupNormAct
        >>> layer = GroupNormAct(4, 8, activation="silu")
        >>> layer(torch.rand(2, 8, 16, 16)).shape
        torch.Size([2, 8, 16, 16])
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
        activation: str | None = "relu",
        negative_slope: float = 0.01,
    ) -> None:
        super().__init__()
        if num_channels % num_groups != 0:
            raise ValueError(f"num_channels ({num_channels}) must be divisible by num_groups ({num_groups})")
        self.num_groups = num_groups
        self.num_channels = num_channels
        self.eps = eps
        self.affine = affine
        make_affine(self, num_channels, affine, affine and bias, device, dtype)
        self.reset_parameters()
        self._set_activation(activation, negative_slope)

    def reset_parameters(self) -> None:
        nn.GroupNorm.reset_parameters(self)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        return nn.GroupNorm.extra_repr(self) + self._activation_repr()  # type: ignore[arg-type]
