"""Batch normalisation with fixed statistics and parameters as a module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.jit import is_scripting  # type: ignore[attr-defined]

from myvision.nn._norm import Norm, NormAct, promoted
from myvision.ops.batch_norm import batch_norm


class _FrozenBatchNorm2d(nn.Module):
    """The buffers of ``torchvision.ops.FrozenBatchNorm2d``, for where torchvision does not import."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, num_features: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        for name, value in {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1.0}.items():
            self.register_buffer(name, torch.full((num_features,), value))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict.pop(f"{prefix}num_batches_tracked", None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.weight.shape[0]}, eps={self.eps})"


if TYPE_CHECKING:
    _Base = _FrozenBatchNorm2d
else:
    try:
        from torchvision.ops import FrozenBatchNorm2d as _Base
    except Exception:  # torchvision is optional, and one made for another torch fails in many ways
        _Base = _FrozenBatchNorm2d


class FrozenBatchNormForward(Norm):
    """The call of a frozen batch norm; its result has the dtype that torch's arithmetic makes of all tensors."""

    __constants__: ClassVar = ["eps", "activation", "negative_slope"]

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.fused(x, residual, self.activation, self.negative_slope)

    def fused(self, x: Tensor, residual: Tensor | None, activation: str | None, negative_slope: float) -> Tensor:
        """``activation(norm(x) + residual)``, whatever the module's own activation."""
        mean, var, weight, bias = self.running_mean, self.running_var, self.weight, self.bias
        dtype = promoted([x, mean, var, weight, bias] if residual is None else [x, residual, mean, var, weight, bias])
        x = x.to(dtype)
        if residual is not None:
            residual = residual.to(dtype)
        mean, var, weight, bias = mean.to(dtype), var.to(dtype), weight.to(dtype), bias.to(dtype)
        if not is_scripting():
            return batch_norm(
                x,
                mean,
                var,
                weight,
                bias,
                eps=self.eps,
                residual=residual,
                activation=activation,
                negative_slope=negative_slope,
            )
        else:  # noqa: RET505  TorchScript compiles what follows
            return torch.ops.myvision.batch_norm(
                x, mean, var, weight, bias, residual, self.eps, activation, negative_slope
            )


class FrozenBatchNorm2d(FrozenBatchNormForward, _Base):
    """Batch normalisation by fixed statistics, scale and shift: ``norm(x) + residual`` in one pass.

    A ``torchvision.ops.FrozenBatchNorm2d`` where torchvision is installed, and the same in every respect where it is
    not: all four tensors are buffers, which no optimiser sees, and a ``state_dict`` of ``torch.nn.BatchNorm2d`` loads.
    With an activation it is :class:`FrozenBatchNormAct2d`.

    Args:
        num_features: channels of the input.
        eps: added to the variance. Default: 1e-5.

    Shape:
        - x: ``[batch, num_features, height, width]``.
        - residual: as x, or None. Default: None.
        - output: as x, of the widest dtype among x, residual and buffers.

    Raises:
        RuntimeError: in the call, where shapes or devices do not fit together.

    Example::

        >>> import torch
        >>> from myvision.nn import FrozenBatchNorm2d
        >>> layer = FrozenBatchNorm2d(8)
        >>> layer(torch.rand(2, 8, 16, 16)).shape
        torch.Size([2, 8, 16, 16])
    """


class FrozenBatchNormAct2d(NormAct, FrozenBatchNormForward, _FrozenBatchNorm2d):
    """A frozen batch norm with an activation: ``activation(norm(x) + residual)`` in one pass.

    Buffers and ``state_dict`` are those of :class:`FrozenBatchNorm2d`.

    Args:
        num_features: channels of the input.
        eps: added to the variance. Default: 1e-5.
        activation: ``"relu"``, ``"leaky_relu"``, ``"silu"``, ``"gelu"``, ``"gelu_tanh"``, ``"hardswish"`` or None.
            Default: ``"relu"``.
        negative_slope: of ``"leaky_relu"``. Default: 0.01.

    Shape:
        - x: ``[batch, num_features, height, width]``.
        - residual: as x, or None. Default: None.
        - output: as x, of the widest dtype among x, residual and buffers.

    Raises:
        ValueError: no such activation.
        RuntimeError: in the call, where shapes or devices do not fit together.

    Example::

        >>> import torch
        >>> from myvision.nn import FrozenBatchNormAct2d
        >>> layer = FrozenBatchNormAct2d(8)
        >>> layer(torch.rand(2, 8, 16, 16)).shape
        torch.Size([2, 8, 16, 16])
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        *,
        activation: str | None = "relu",
        negative_slope: float = 0.01,
    ) -> None:
        super().__init__(num_features, eps)
        self._set_activation(activation, negative_slope)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}{self._activation_repr()})"
