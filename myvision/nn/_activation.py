"""What modules with an activation behind them share.

Such a module stands outside torch's classes: whatever replaces or folds the modules it knows, such as
``torch.nn.SyncBatchNorm.convert_sync_batchnorm``, would lose the activation without a word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from myvision._checks import ACTIVATIONS
from myvision.nn._leaf import Leaf


class Activated(Leaf):
    """A base to stand before torch's module: one that can activate, and by default does not.

    All it needs of an instance are the attributes that torch's constructor sets, so that a module of torch becomes one
    of ours by its ``__class__`` alone.
    """

    activation: str | None = None
    negative_slope: float = 0.01

    if TYPE_CHECKING:  # the attributes of torch's module

        def __getattr__(self, name: str) -> Any: ...


class Act(Activated):
    """One that does."""

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
    """Names of what TorchScript takes for constants: those of torch's class, and what :class:`Activated` adds."""
    return [*module.__constants__, "activation", "negative_slope"]
