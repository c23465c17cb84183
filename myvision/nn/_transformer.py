"""What the layers of a transformer share: myvision's modules inside, and the steps between their blocks."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx, nn

from myvision.nn._fold import is_replaced, known_activation, linear_step
from myvision.nn._leaf import Leaf
from myvision.nn.attention import MultiheadAttention
from myvision.nn.layer_norm import LayerNorm
from myvision.ops.add_layer_norm import add_layer_norm


class TransformerLayer(Leaf):
    """A base to stand before torch's encoder or decoder layer."""

    def _use_fused_modules(self) -> None:
        """Makes myvision's modules of those that torch's constructor put in, with the parameters that it drew."""
        for module in self.children():  # type: ignore[attr-defined]
            if type(module) is nn.MultiheadAttention:
                module.__class__ = MultiheadAttention
            elif type(module) is nn.LayerNorm:
                module.__class__ = LayerNorm

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a copied or an unpickled layer.

        torch's own puts ReLU before an activation that is a module, as modules do not stand in the state itself.
        """
        nn.Module.__setstate__(self, state)  # type: ignore[arg-type]
        if not hasattr(self, "activation"):
            self.activation = F.relu

    def _overrides(self, name: str) -> bool:
        """Whether a block of torch's layer was replaced, by a subclass or on the instance: then it must be called."""
        torchs = next(base for base in type(self).__mro__ if base.__module__.startswith("torch.nn."))
        return name in self.__dict__ or getattr(type(self), name) is not getattr(torchs, name)

    def _fed_forward(self, x: Tensor, dropout: nn.Module) -> tuple[Tensor, nn.Module | None]:
        """The network behind the attention, and the dropout that is still to come."""
        layer: Any = self
        if self._overrides("_ff_block"):
            return layer._ff_block(x), None
        return linear_step(layer.linear2, self._hidden(x)), dropout

    def _fed_forward_and_added(self, x: Tensor, dropout: nn.Module, residual: Tensor) -> Tensor:
        """``residual + dropout(network(x))``, where no norm follows that would take in dropout and addition."""
        layer: Any = self
        if self._overrides("_ff_block"):
            return residual + layer._ff_block(x)
        return linear_step(layer.linear2, self._hidden(x), dropout=dropout, residual=residual)

    def _hidden(self, x: Tensor) -> Tensor:
        """What the network's second linear layer gets."""
        layer: Any = self
        activation = known_activation(layer.activation)
        if activation is None:
            return layer.dropout(layer.activation(linear_step(layer.linear1, x)))
        return linear_step(layer.linear1, x, activation, layer.dropout)


def add_norm(branch: Tensor, dropout: nn.Module | None, residual: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """``(norm(sum), sum)`` of ``sum = residual + dropout(branch)``: one pass where both modules are the usual ones."""
    if type(norm) is LayerNorm and type(dropout) is nn.Dropout and _may_fuse(branch, dropout, norm):
        affine = norm.normalized_shape, norm.weight, norm.bias, norm.eps
        return add_layer_norm(branch, residual, *affine, dropout.p, dropout.training)
    sum = residual + (branch if dropout is None else dropout(branch))
    return norm(sum), sum


def _may_fuse(branch: Tensor, *modules: nn.Module) -> bool:
    return not isinstance(branch, fx.Proxy) and not any(map(is_replaced, modules))
