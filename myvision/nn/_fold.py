"""Modules that need not be called, as an operator does what they do: a linear layer, and what follows it."""

from __future__ import annotations

from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.modules.module import _has_any_global_hook

from myvision._dispatch.overrides import is_plain
from myvision._formulas._activation import activate
from myvision.nn._project import takes
from myvision.nn.linear import Linear
from myvision.ops.linear import linear

Activation = tuple[str, float]  # the name that our operators know it by, and the slope of leaky_relu

SLOPE = 0.01  # of leaky_relu, where nothing tells it
MODULES: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.SiLU: "silu", nn.Hardswish: "hardswish"}
FUNCTIONS: dict[Callable[..., Any], str] = {
    **dict.fromkeys([F.relu, F.relu_, torch.relu, torch.relu_], "relu"),
    **{F.leaky_relu: "leaky_relu", F.silu: "silu", F.gelu: "gelu", F.hardswish: "hardswish"},
}
LINEARS = (nn.Linear, NonDynamicallyQuantizableLinear, Linear)


def is_replaced(module: nn.Module) -> bool:
    """Whether only a call of the module does all it does: it has hooks, or a ``forward`` of its own on the instance."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return "forward" in module.__dict__ or any(map(len, hooks)) or bool(_has_any_global_hook())


def known_activation(activation: Any) -> Activation | None:
    """What a module, or a function that gets one argument, computes, if our operators know it."""
    if isinstance(activation, nn.Module):
        return None if is_replaced(activation) else activation_of_module(activation)
    is_function = isinstance(activation, (FunctionType, BuiltinFunctionType))  # other callables may have no hash
    name = FUNCTIONS.get(activation) if is_function else None
    return (name, SLOPE) if name else None


def activation_of_module(module: nn.Module | None) -> Activation | None:
    if type(module) is nn.LeakyReLU:
        return "leaky_relu", module.negative_slope
    if type(module) is nn.GELU:
        return ("gelu" if module.approximate == "none" else "gelu_tanh"), SLOPE
    name = MODULES.get(type(module))  # type: ignore[arg-type]
    return (name, SLOPE) if name else None


def linear_step(
    module: nn.Module,
    x: Tensor,
    activation: Activation | None = None,
    dropout: nn.Module | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """``residual + dropout(activation(module(x)))``: one operator as far as the modules are the usual ones.

    A linear layer of another class, such as one with adapters or with quantised weights, is called, and so is one that
    has hooks, or whose weight is a tensor of another class.
    """
    name, slope = activation or (None, SLOPE)
    if folded := _folded(module, x):
        options: dict[str, Any] = {"activation": name, "negative_slope": slope}
        if type(dropout) is nn.Dropout and not is_replaced(dropout):
            options["dropout_p"] = dropout.p if dropout.training else 0.0
            dropout = None
        if dropout is None and residual is not None and _is_like_output(residual, *folded):
            options["residual"] = residual
            residual = None
        y = linear(*folded, **options)
    else:
        y = activate(module(x), name, slope)
    if dropout is not None:
        y = dropout(y)
    return y if residual is None else residual + y


def _folded(module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """What the operator gets in place of a call of the module; None where the module must be called."""
    if type(module) not in LINEARS or is_replaced(module) or isinstance(x, fx.Proxy):
        return None
    weight, bias = module.weight, module.bias
    return (x, weight, bias) if takes(x, weight, bias) else None


def _is_like_output(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the sum is of the product's dtype and shape; autocast would round the residual to a narrower one."""
    if not (is_plain(residual) and is_plain(x)) or x.is_nested or torch.is_autocast_enabled(x.device.type):
        return False
    return residual.dtype == x.dtype and residual.shape == (*x.shape[:-1], weight.shape[0])
