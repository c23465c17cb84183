"""A linear layer, what often follows it, and a residual in plain torch."""

from __future__ import annotations

from torch import Tensor

from myvision._formulas._activation import activate
from myvision._formulas._dropout import dropout
from myvision._formulas._normalise import real


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    negative_slope: float,
    dropout_p: float,
    seed: Tensor | None,
    residual: Tensor | None,
) -> Tensor:
    """What ``torch.ops.myvision.linear`` computes, rounded once."""
    output = real(input) @ real(weight).transpose(0, 1)
    if bias is not None:
        output = output + real(bias)
    output = dropout(activate(output, activation, negative_slope), dropout_p, seed)
    if residual is not None:
        output = output + real(residual)
    return output.to(input.dtype)
