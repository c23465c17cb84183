"""The activations that may follow a normalisation."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

_FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardswish": F.hardswish,
}


def activate(x: Tensor, activation: str | None, negative_slope: float) -> Tensor:
    if activation is None:
        return x
    if activation == "leaky_relu":
        return F.leaky_relu(x, negative_slope)
    return _FORMULAS[activation](x)
