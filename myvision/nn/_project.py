"""Where a linear layer runs on torch's own operators after all."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from myvision._checks import FLOATING
from myvision._dispatch.overrides import is_plain
from myvision._formulas._activation import activate
from myvision.ops.linear import linear


def project(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str | None = None,
    negative_slope: float = 0.01,
    dropout_p: float = 0.0,
    residual: Tensor | None = None,
) -> Tensor:
    """:func:`myvision.ops.linear`, or the same step by step where only torch's operators know the tensors' kind."""
    if takes(input, weight, bias):
        return linear(
            input,
            weight,
            bias,
            activation=activation,
            negative_slope=negative_slope,
            dropout_p=dropout_p,
            residual=residual,
        )
    output = F.dropout(activate(F.linear(input, weight, bias), activation, negative_slope), dropout_p)
    return output if residual is None else residual + output


def takes(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether our operator knows them: weights are no sharded, quantised or sparse ones, nor complex."""
    is_strided = type(input) is not Tensor or input.layout == torch.strided
    return is_strided and is_plain(weight) and weight.dtype in FLOATING and (bias is None or is_plain(bias))
