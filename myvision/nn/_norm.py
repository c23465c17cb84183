"""What the modules of all norms share: an activation that follows, and parameters of those that have no class in torch.

A norm with an activation stands outside torch's classes: whatever replaces or folds the norms it knows, such as
``torch.nn.SyncBatchNorm.convert_sync_batchnorm``, would lose the activation without a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from myvision.nn._leaf import Leaf
from myvision.ops._norm import ACTIVATIONS


class Norm(Leaf):
    """A base to stand before torch's module: a norm, by default without activation.

    All it needs of an instance are the attributes that torch's constructor sets, so that a module of torch becomes one
    of ours by its ``__class__`` alone.
    """

    activation: str | None = None
    negative_slope: float = 0.01

    if TYPE_CHECKING:  # the attributes of torch's module

        def __getattr__(self, name: str) -> Any: ...


class NormAct(Norm):
    """A norm with an activation: ``activation(norm(input) + residual)`` in one pass."""

    activation: str | None = "relu"

    def _set_activation(self, activation: str | None, negative_slope: float) -> None:
        if activation is not None and activation not in ACTIVATIONS:
            known = ", ".join(map(repr, ACTIVATIONS))
            raise ValueError(f"activation must be one of None, {known}, but is {activation!r}")
        self.activation = activation
        self.negative_slope = negative_slope

    def extra_repr(self) -> str:
        text: str = super().extra_repr()  # type: ignore[misc]
        return text + self._activation_repr()

    def _activation_repr(self) -> str:
        if self.activation is None:
            return ""
        slope = f", negative_slope={self.negative_slope}" if self.activation == "leaky_relu" else ""
        return f", activation={self.activation!r}{slope}"


def constants(module: Any) -> list[str]:
    """Names of what TorchScript takes for constants: those of torch's class, and what :class:`Norm` adds."""
    return [*module.__constants__, "activation", "negative_slope"]


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
