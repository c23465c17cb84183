"""Normalisation by the root of the mean square as modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.jit import is_scripting  # type: ignore[attr-defined]

from myvision.nn._activation import constants
from myvision.nn._norm import Norm, NormAct, make_affine
from myvision.ops._layer_norm import as_shape
from myvision.ops.rms_norm import rms_norm


class RMSNormForward(Norm):
    """The call of an RMS norm, whose result has the input's dtype whatever the dtype of the weight, as torch's has."""

    __constants__: ClassVar = [*constants(nn.RMSNorm), "channels"]

    channels: Literal["first", "last"] = "last"

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.fused(x, residual, self.activation, self.negative_slope)

    def fused(self, x: Tensor, residual: Tensor | None, activation: str | None, negative_slope: float) -> Tensor:
        """``activation(norm(x) + residual)``, whatever the module's own activation."""
        weight = self.weight
        if weight is not None:  # noqa: SIM102  where it is None, TorchScript compiles only this line
            if weight.dtype != x.dtype:
                weight = weight.float()
        if not is_scripting():
            return rms_norm(
                x,
                self.normalized_shape,
                weight,
                self.eps,
                residual=residual,
                activation=activation,
                negative_slope=negative_slope,
                channels=self.channels,
            )
        else:  # noqa: RET505  TorchScript compiles what follows
            eps = self.eps
            if eps is None:  # TorchScript has no torch.finfo
                eps = 2.0**-52 if x.dtype == torch.float64 else 2.0**-23
            return torch.ops.myvision.rms_norm(
                x,
                self.normalized_shape,
                weight,
                residual,
                self.channels == "first",
                eps,
                activation,
                negative_slope,
            )


class RMSNorm(RMSNormForward, nn.RMSNorm):
    """RMS normalisation, see :func:`myvision.ops.rms_norm`: ``norm(x) + residual`` in one pass.

    A ``torch.nn.RMSNorm`` in every other respect. With an activation it is :class:`RMSNormAct`, over the channels of
    images :class:`RMSNorm2d`.

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype: as in ``torch.nn.RMSNorm``.

    Shape:
        - x: ``[..., *normalized_shape]``.
        - residual: as x, or None. Default: None.
        - output: as x.

    Raises:
        RuntimeError: in the call, where shapes, dtypes or devices do not fit together.

    Example::

        >>> import torch
        >>> from myvision.nn import RMSNorm
        >>> RMSNorm(768)(torch.rand(2, 197, 768)).shape
        torch.Size([2, 197, 768])

    Paper: `Root Mean Square Layer Normalization <https://arxiv.org/abs/1910.07467>`_.
    """


class RMSNormAct(NormAct, RMSNormForward, nn.Module):
    """RMS normalisation with an activation: ``activation(norm(x) + residual)`` in one pass.

    Parameters and ``state_dict`` are those of ``torch.nn.RMSNorm``, of which it is no subclass.

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype: as in ``torch.nn.RMSNorm``.
        activation: ``"relu"``, ``"leaky_relu"``, ``"silu"``, ``"gelu"``, ``"gelu_tanh"``, ``"hardswish"`` or None.
            Default: ``"relu"``.
        negative_slope: of ``"leaky_relu"``. Default: 0.01.

    Shape:
        - x: ``[..., *normalized_shape]``.
        - residual: as x, or None. Default: None.
        - output: as x.

    Raises:
        ValueError: no such activation.
        RuntimeError: in the call, where shapes, dtypes or devices do not fit together.

    Example::

        >>> import torch
        >>> from myvision.nn import RMSNormAct
        >>> RMSNormAct(768, activation="silu")(torch.rand(2, 197, 768)).shape
        torch.Size([2, 197, 768])
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        activation: str | None = "relu",
        negative_slope: float = 0.01,
    ) -> None:
        super().__init__()
        self.normalized_shape = tuple(as_shape(normalized_shape))
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        make_affine(self, self.normalized_shape, elementwise_affine, False, device, dtype)
        self.reset_parameters()
        self._set_activation(activation, negative_slope)

    def reset_parameters(self) -> None:
        nn.RMSNorm.reset_parameters(self)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        return nn.RMSNorm.extra_repr(self) + self._activation_repr()  # type: ignore[arg-type]


class RMSNorm2d(RMSNormAct):
    """RMS normalisation of images over their channels, for each pixel, in whatever layout they lie in memory.

    It computes ``activation(norm(x) + residual)`` in one pass. Parameters and ``state_dict`` are those of
    ``torch.nn.RMSNorm``, of which it is no subclass.

    Args:
        num_channels: how many channels there are.
        eps, elementwise_affine, device, dtype: as in ``torch.nn.RMSNorm``.
        activation: ``"relu"``, ``"leaky_relu"``, ``"silu"``, ``"gelu"``, ``"gelu_tanh"``, ``"hardswish"`` or None.
            Default: None.
        negative_slope: of ``"leaky_relu"``. Default: 0.01.

    Shape:
        - x: ``[batch, num_channels, height, width]``, or any other number of dimensions after the channels.
        - residual: as x, or None. Default: None.
        - output: as x.

    Raises:
        ValueError: no such activation.
        RuntimeError: in the call, where shapes, dtypes or devices do not fit together.

    Example::

        >>> import torch
        >>> from myvision.nn import RMSNorm2d
        >>> RMSNorm2d(8)(torch.rand(2, 8, 16, 16)).shape
        torch.Size([2, 8, 16, 16])
    """

    channels = "first"
    activation = None

    def __init__(
        self,
        num_channels: int,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        activation: str | None = None,
        negative_slope: float = 0.01,
    ) -> None:
        options: dict[str, Any] = {"activation": activation, "negative_slope": negative_slope}
        super().__init__((num_channels,), eps, elementwise_affine, device, dtype, **options)
