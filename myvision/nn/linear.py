"""A linear layer as modules."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.jit import is_scripting  # type: ignore[attr-defined]

from myvision.nn._activation import Act, Activated, constants
from myvision.nn._dropout import checked_probability
from myvision.nn._project import project


class LinearForward(Activated):
    """The call of a linear layer."""

    __constants__: ClassVar = [*constants(nn.Linear), "dropout_p"]

    dropout_p: float = 0.0

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        dropout_p = self.dropout_p if self.training else 0.0
        if not is_scripting():
            return project(
                input,
                self.weight,
                self.bias,
                activation=self.activation,
                negative_slope=self.negative_slope,
                dropout_p=dropout_p,
                residual=residual,
            )
        else:  # noqa: RET505  TorchScript compiles what follows
            seed: Tensor | None = None
            if dropout_p > 0:
                seed = torch.randint(9223372036854775807, [], device=input.device)  # 2**63 - 1, as new_seed does
            return torch.ops.myvision.linear(
                input, self.weight, self.bias, self.activation, self.negative_slope, dropout_p, seed, residual
            )


class LinearAct(Act, LinearForward, nn.Module):
    """A linear layer with an activation and dropout: ``residual + dropout(activation(linear(input)))`` in one pass.

    Parameters and ``state_dict`` are those of ``torch.nn.Linear``, of which it is no subclass.

    Args:
        in_features, out_features, bias, device, dtype: as in ``torch.nn.Linear``.
        activation: ``"relu"``, ``"leaky_relu"``, ``"silu"``, ``"gelu"``, ``"gelu_tanh"``, ``"hardswish"`` or None.
            Default: ``"relu"``.
        negative_slope: of ``"leaky_relu"``. Default: 0.01.
        dropout_p: probability to drop an element of the activation in training. Default: 0.

    Shape:
        - input: ``[..., in_features]``.
        - residual: as output, or None. Default: None.
        - output: ``[..., out_features]``.

    Raises:
        ValueError: no such activation, or ``dropout_p`` is not between 0 and 1.
        RuntimeError: in the call, where shapes, dtypes or devices do not fit together.

    Example::

        >>> import torch
        >>> from myvision.nn import LinearAct
        >>> LinearAct(768, 3072, activation="gelu", dropout_p=0.1)(torch.rand(2, 197, 768)).shape
        torch.Size([2, 197, 3072])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        activation: str | None = "relu",
        negative_slope: float = 0.01,
        dropout_p: float = 0.0,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty((out_features, in_features), device=device, dtype=dtype))
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        )
        self.reset_parameters()
        self._set_activation(activation, negative_slope)
        self.dropout_p = checked_probability(dropout_p)

    def reset_parameters(self) -> None:
        nn.Linear.reset_parameters(self)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        dropout = f", dropout_p={self.dropout_p}" if self.dropout_p else ""
        return nn.Linear.extra_repr(self) + self._activation_repr() + dropout  # type: ignore[arg-type]


class Linear(LinearForward, nn.Linear):
    """A linear layer, see :func:`myvision.ops.linear`: ``linear(input) + residual`` in one pass.

    A ``torch.nn.Linear`` in every other respect. With an activation and dropout it is :class:`LinearAct`.

    Args:
        in_features, out_features, bias, device, dtype: as in ``torch.nn.Linear``.

    Shape:
        - input: ``[..., in_features]``.
        - residual: as output, or None. Default: None.
        - output: ``[..., out_features]``.

    Raises:
        RuntimeError: in the call, where shapes, dtypes or devices do not fit together.

    Example::

        >>> import torch
        >>> from myvision.nn import Linear
        >>> stream = torch.rand(2, 197, 768)
        >>> Linear(3072, 768)(torch.rand(2, 197, 3072), residual=stream).shape
        torch.Size([2, 197, 768])
    """
