"""What the layers of a transformer share: myvision's modules inside, and the steps between their blocks."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from myvision.nn.attention import MultiheadAttention
from myvision.nn.layer_norm import LayerNorm
from myvision.ops.add_layer_norm import add_layer_norm


def use_fused_modules(layer: nn.Module) -> None:
    """Puts myvision's modules where torch's constructor put its own, with the parameters that it drew."""
    for name, module in list(layer.named_children()):
        if type(module) is nn.MultiheadAttention:
            module.__class__ = MultiheadAttention
        elif type(module) is nn.LayerNorm:
            place: dict[str, Any] = {"device": module.weight.device, "dtype": module.weight.dtype}
            setattr(layer, name, LayerNorm(module.normalized_shape, module.eps, bias=module.bias is not None, **place))


def add_norm(branch: Tensor, residual: Tensor, dropout: nn.Module, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """``(norm(sum), sum)`` of ``sum = residual + dropout(branch)``: one pass where both modules are the usual ones."""
    if type(dropout) is nn.Dropout and type(norm) is LayerNorm and _is_plain(norm) and not _has_hooks(dropout):
        affine = norm.normalized_shape, norm.weight, norm.bias, norm.eps
        return add_layer_norm(branch, residual, *affine, dropout.p, dropout.training)
    sum = residual + dropout(branch)
    return norm(sum), sum


def feed_forward(layer: Any, x: Tensor) -> Tensor:
    """The network behind the attention of an encoder or decoder layer."""
    hidden = layer.linear1(x)
    if layer.activation is F.relu and type(layer.linear1) is nn.Linear and not _has_hooks(layer.linear1):
        hidden = hidden.relu_()  # new memory of this size costs more than the arithmetic, and no one else has it
    else:
        hidden = layer.activation(hidden)
    return layer.linear2(layer.dropout(hidden))


def _is_plain(norm: LayerNorm) -> bool:
    return norm.activation is None and norm.channels == "last" and not _has_hooks(norm)


def _has_hooks(module: nn.Module) -> bool:
    """Only a call of the module itself would run them."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(len(registered) > 0 for registered in hooks) or bool(_has_any_global_hook())
