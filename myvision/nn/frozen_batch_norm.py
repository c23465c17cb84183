"""Batch normalisation with fixed statistics and parameters as a module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from myvision.nn._fused import FusedActivation
from myvision.ops.batch_norm import batch_norm


class _FrozenBatchNorm2d(nn.Module):
    """The buffers of ``torchvision.ops.FrozenBatchNorm2d``, for where torchvision does not import."""

    def __init__(self, num_features: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        for name, value in {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1.0}.items():
            self.register_buffer(name, torch.full((num_features,), value))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict.pop(f"{prefix}num_batches_tracked", None)
        super()._load_from_state_dict(state_dict, prefix, *args)


if TYPE_CHECKING:
    _Base = _FrozenBatchNorm2d
else:
    try:
        from torchvision.ops import FrozenBatchNorm2d as _Base
    except Exception:  # torchvision is optional, and one made for another torch fails in many ways
        _Base = _FrozenBatchNorm2d


class FrozenBatchNorm2d(FusedActivation, _Base):
    """Batch normalisation by fixed statistics, scale and shift: ``activation(norm(x) + residual)`` in one pass.

    A ``torchvision.ops.FrozenBatchNorm2d`` where torchvision is installed, and the same in every respect where it is
    not: all four tensors are buffers, which no optimiser sees, and a ``state_dict`` of ``torch.nn.BatchNorm2d`` loads.

    Args:
        num_features: channels of the input.
        eps: added to the variance. Default: 1e-5.
        activation: ``"relu"``, ``"leaky_relu"``, ``"silu"``, ``"gelu"``, ``"gelu_tanh"``, ``"hardswish"`` or None.
            Default: None.
        negative_slope: of ``"leaky_relu"``. Default: 0.01.

    Shape:
        - x: ``[batch, num_features, height, width]``.
        - residual: as x, or None. Default: None.
        - output: as x.

    Raises:
        ValueError: no such activation.
        RuntimeError: in the call, where shapes, dtypes or devices do not fit together.

    Example::

        >>> import torch
        >>> from myvision.nn import FrozenBatchNorm2d
        >>> layer = FrozenBatchNorm2d(8, activation="relu")
        >>> layer(torch.rand(2, 8, 16, 16)).shape
        torch.Size([2, 8, 16, 16])
    """

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            eps=self.eps,
            residual=residual,
            activation=self.activation,
            negative_slope=self.negative_slope,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.weight.shape[0]}, eps={self.eps}{self._activation_repr()})"
