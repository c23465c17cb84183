"""What the modules of all norms share: an activation that may follow, and parameters of those that torch has not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from myvision.nn._activation import Act, Activated


class Norm(Activated):
    """A base to stand before torch's module: a norm, by default without activation."""


class NormAct(Act, Norm):
    """A norm with an activation: ``activation(norm(input) + residual)`` in one pass."""


def make_affine(
    module: nn.Module, shape: int | Sequence[int], weight: bool, bias: bool, device: Any, dtype: Any
) -> None:
    """Registers ``weight`` and ``bias``, uninitialised or None."""
    for name, wanted in (("weight", weight), ("bias", bias)):
        parameter = nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if wanted else None
        module.register_parameter(name, parameter)


def promoted(tensors: list[Tensor]) -> torch.dtype:
    """The dtype that torch's arithmetic makes of tensors with dimensions."""
    dtype = tensors[0].dtype
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype
