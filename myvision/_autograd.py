"""Autograd formulas for operators: cheap to call, and right under torch.func and forward-mode AD.

Every private name of torch that myvision uses stands in this module. Where a torch lacks one of them, the formula is
registered by torch's own public call instead: slower, and forward-mode AD raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

try:
    from torch._C import (
        _any_requires_grad,
        _are_functorch_transforms_active,
        _AutoDispatchBelowAutograd,
        _is_fwd_grad_enabled,
    )
    from torch._functorch.utils import enable_single_level_autograd_function
    from torch.autograd.forward_ad import _set_fwd_grad_enabled
    from torch.autograd.function import _SingleLevelFunction

    _LEAN = hasattr(forward_ad, "_current_level")
except ImportError:
    _LEAN = False

SetupContext = Callable[[Any, tuple[Any, ...], Any], None]
Formula = Callable[..., Any]

_libraries: list[torch.library.Library] = []  # a registration lives as long as its Library


def register_autograd(
    op: torch._ops.OpOverload, setup_context: SetupContext, backward: Formula, jvp: Formula | None = None
) -> None:
    """Gives an operator its derivatives.

    Args:
        op: the operator, for example ``torch.ops.myvision.my_add.default``. Its arguments have no defaults.
        setup_context: ``setup_context(ctx, inputs, output)`` keeps what the formulas need.
        backward: ``backward(ctx, *grad_outputs)`` returns one gradient, or None, per input. Where its operations are
            differentiable, so is the gradient.
        jvp: ``jvp(ctx, *tangents)`` returns the tangent of the output. Without it forward-mode AD raises.
    """
    if any(argument.has_default_value() for argument in op._schema.arguments):
        raise ValueError(f"register_autograd: {op.name()} has arguments with defaults, which the dispatcher drops")
    if _LEAN:
        _register_lean(op, setup_context, backward, jvp)
    else:
        _register_public(op, setup_context, backward)


def _register_lean(
    op: torch._ops.OpOverload, setup_context: SetupContext, backward: Formula, jvp: Formula | None
) -> None:
    raw = getattr(op, "_op", op)  # the builtin behind the overload: one Python call less
    function = _function(op, raw, setup_context, backward, jvp)
    single_level = _single_level_function(op, raw, setup_context, backward, jvp)

    def autograd(*args: Any) -> Any:
        if (torch.is_grad_enabled() and _any_requires_grad(*args)) or forward_ad._current_level >= 0:
            if not _are_functorch_transforms_active():
                return function.apply(*args)
            with enable_single_level_autograd_function():
                return single_level.apply(*args, (torch.is_grad_enabled(), _is_fwd_grad_enabled()))
        with _AutoDispatchBelowAutograd():
            return raw(*args)

    _implement(op, "Autograd", autograd)


def _function(
    op: torch._ops.OpOverload,
    raw: Callable[..., Any],
    setup_context: SetupContext,
    backward: Formula,
    jvp: Formula | None,
) -> type[torch.autograd.Function]:
    def forward(ctx: Any, *args: Any) -> Any:
        with _AutoDispatchBelowAutograd():
            output = raw(*args)
        setup_context(ctx, args, output)
        return output

    return type(_class_name(op), (torch.autograd.Function,), _formulas(forward, backward, jvp))


def _single_level_function(
    op: torch._ops.OpOverload,
    raw: Callable[..., Any],
    setup_context: SetupContext,
    backward: Formula,
    jvp: Formula | None,
) -> type:
    """The same formula at one level of torch.func: the forward goes on to the level below, in the caller's grad modes,
    which come as an extra last argument."""

    def forward(ctx: Any, *args: Any) -> Any:
        *inputs, (grad_enabled, fwd_grad_enabled) = args
        with (
            torch.set_grad_enabled(grad_enabled),
            _set_fwd_grad_enabled(fwd_grad_enabled),
            _AutoDispatchBelowAutograd(),
        ):
            output = raw(*inputs)
        setup_context(ctx, tuple(inputs), output)
        return output

    def backward_without_modes(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        ctx.needs_input_grad = ctx.needs_input_grad[:-1]
        return (*backward(ctx, *grads), None)

    def jvp_without_modes(ctx: Any, *tangents: Any) -> Any:
        return jvp(ctx, *tangents[:-1])

    formulas = _formulas(forward, backward_without_modes, jvp and jvp_without_modes)
    return type(_class_name(op), (_SingleLevelFunction,), formulas)


def _formulas(forward: Formula, backward: Formula, jvp: Formula | None) -> dict[str, Any]:
    formulas = {"forward": forward, "backward": backward} | ({"jvp": jvp} if jvp else {})
    return {name: staticmethod(formula) for name, formula in formulas.items()}


def _class_name(op: torch._ops.OpOverload) -> str:
    """Named so that ``grad_fn`` reads, for example, ``<MyAddBackward>``."""
    return op.name().split("::")[1].title().replace("_", "")


def _implement(op: torch._ops.OpOverload, dispatch_key: str, kernel: Callable[..., Any], **options: Any) -> None:
    library = torch.library.Library(op.namespace, "IMPL")
    library.impl(op, kernel, dispatch_key, **options)
    _libraries.append(library)


def _register_public(op: torch._ops.OpOverload, setup_context: SetupContext, backward: Formula) -> None:
    """By torch.library.register_autograd, whose kernels drop forward-mode tangents in silence: here they raise."""
    library = torch.library.Library(op.namespace, "IMPL")
    torch.library.register_autograd(op, backward, setup_context=setup_context, lib=library)
    _libraries.append(library)
    kernel = torch.library.get_kernel(op, "AutogradCPU")  # the same one for every device

    def autograd(keyset: Any, *args: Any) -> Any:
        tensors = (arg for arg in args if isinstance(arg, torch.Tensor))
        if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
            raise NotImplementedError(f"{op.name()}: forward-mode AD is not implemented with this version of torch")
        return kernel.call_boxed(keyset, *args)

    _implement(op, "Autograd", autograd, with_keyset=True, allow_override=True)
