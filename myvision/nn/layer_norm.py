"""Layer normalisation as modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.jit import is_scripting  # type: ignore[attr-defined]

from myvision.nn._activation import constants
from myvision.nn._norm import Norm, NormAct, make_affine
from myvision.ops._layer_norm import as_shape
from myvision.ops.layer_norm import layer_norm


class LayerNormForward(Norm):
    """The call of a layer norm."""

    __constants__: ClassVar = [*constants(nn.LayerNorm), "channels"]

    channels: Literal["first", "last"] = "last"

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.fused(input, residual, self.activation, self.negative_slope)

    def fused(self, input: Tensor, residual: Tensor | None, activation: str | None, negative_slope: float) -> Tensor:
        """``activation(norm(input) + residual)``, whatever the module's own activation."""
        if not is_scripting():
            return layer_norm(
                input,
                self.normalized_shape,
                self.weight,
                self.bias,
                self.eps,
                residual=residual,
                activation=activation,
                negative_slope=negative_slope,
                channels=self.channels,
            )
        else:  # noqa: RET505  TorchScript compiles what follows
            return torch.ops.myvision.layer_norm(
                input,
                self.normalized_shape,
                self.weight,
                self.bias,
                residual,
                self.channels == "first",
                self.eps,
                activation,
                negative_slope,
            )


class LayerNormAct(NormAct, LayerNormForward, nn.Module):
    """Layer normalisation with an activation: ``activation(norm(input) + residual)`` in one pass.

    Parameters and ``state_dict`` are those of ``torch.nn.LayerNorm``, of which it is no subclass.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as in ``torch.nn.LayerNorm``.
        activation: ``"relu"``, ``"leaky_relu"``, ``"silu"``, ``"gelu"``, ``"gelu_tanh"``, ``"hardswish"`` or None.
            Default: ``"relu"``.
        negative_slope: of ``"leaky_relu"``. Default: 0.01.

    Shape:
        - input: ``[..., *normalized_shape]``.
        - residual: as input, or None. Default: None.
        - output: as input.

    Raises:
        ValueError: no such activation.
        RuntimeError: in the call, where shapes, dtypes or devices do not fit together.

    Example::

        >>> import torch
        >>> from myvision.nn import LayerNormAct
        >>> LayerNormAct(768, activation="gelu")(torch.rand(2, 197, 768)).shape
        torch.Size([2, 197, 768])
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
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
        make_affine(self, self.normalized_shape, elementwise_affine, elementwise_affine and bias, device, dtype)
        self.reset_parameters()
        self._set_activation(activation, negative_slope)

    def reset_parameters(self) -> None:
        nn.LayerNorm.reset_parameters(self)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        return nn.LayerNorm.extra_repr(self) + self._activation_repr()  # type: ignore[arg-type]


class LayerNorm(LayerNormForward, nn.LayerNorm):
    """Layer normalisation, see :func:`myvision.ops.layer_norm`: ``norm(input) + residual`` in one pass.

    A ``torch.nn.LayerNorm`` in every other respect. With an activation it is :class:`LayerNormAct`, over the
    channels of images :class:`LayerNorm2d`.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as in ``torch.nn.LayerNorm``.

    Shape:
        - input: ``[..., *normalized_shape]``.
        - residual: as input, or None. Default: None.
        - output: as input.

    Raises:
        RuntimeError: in the call, where shapes, dtypes or devices do not fit together.

    Example::

        >>> import torch
        >>> from myvision.nn import LayerNorm
        >>> LayerNorm(768)(torch.rand(2, 197, 768)).shape
        torch.Size([2, 197, 768])

    Paper: `Layer Normalization <https://arxiv.org/abs/1607.06450>`_.
    """


class LayerNorm2d(LayerNormAct):
    """Layer normalisation of images over their channels, for each pixel, in whatever layout they lie in memory.

    It computes ``activation(norm(input) + residual)`` in one pass. Parameters and ``state_dict`` are those of
    ``torch.nn.LayerNorm``, of which it is no subclass.

    Args:
        num_channels: how many channels there are.
        eps, elementwise_affine, bias, device, dtype: as in ``torch.nn.LayerNorm``.
        activation: ``"relu"``, ``"leaky_relu"``, ``"silu"``, ``"gelu"``, ``"gelu_tanh"``, ``"hardswish"`` or None.
            Default: None.
        negative_slope: of ``"leaky_relu"``. Default: 0.01.

    Shape:
        - input: ``[batch, num_channels, height, width]``, or any other number of dimensions after the channels.
        - residual: as input, or None. Default: None.
        - output: as input.

    Raises:
        ValueError: no such activation.
        RuntimeError: in the call, where shapes, dtypes or devices do not fit together.

    Example::

        >>> import torch
        >>> from myvision.nn import LayerNorm2d
        >>> LayerNorm2d(8)(torch.rand(2, 8, 16, 16)).shape
        torch.Size([2, 8, 16, 16])
    """

    channels = "first"
    activation = None

    def __init__(
        self,
        num_channels: int,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        activation: str | None = None,
        negative_slope: float = 0.01,
    ) -> None:
        options: dict[str, Any] = {"activation": activation, "negative_slope": negative_slope}
        super().__init__((num_channels,), eps, elementwise_affine, bias, device, dtype, **options)
