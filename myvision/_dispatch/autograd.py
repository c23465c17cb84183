"""Autograd formulas for operators: cheap to call, and right under torch.func and forward-mode AD.

Every private name of torch that the formulas need stands in this module. Where a torch lacks one of them, a formula is
registered by torch's own public call instead: slower, and forward-mode AD and torch.func raise.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from myvision._dispatch.arguments import arguments_of, call_by_name, needs_of
from myvision._dispatch.vjp import gradients_of

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
    _AutoDispatchBelowAutograd = contextlib.nullcontext  # type: ignore[assignment,misc]

SetupContext = Callable[[Any, Any, Any], None]
Formula = Callable[..., Any]

_libraries: list[torch.library.Library] = []  # a registration lives as long as its Library
_forwards: set[torch._ops.OpOverload] = set()  # those that have their derivative


@dataclass(frozen=True)
class _Derivative:
    op: torch._ops.OpOverload
    setup_context: SetupContext
    backward: Formula
    jvp: Formula | None
    composite: Formula | None
    forward: torch._ops.OpOverload | None

    @functools.cached_property
    def arguments(self) -> Any:
        return arguments_of(self.op)

    def keep(self, ctx: Any, inputs: Any, output: Any) -> None:
        self.setup_context(ctx, self.arguments._make(inputs), output)

    def compose(self, *inputs: Any) -> Any:
        assert self.composite
        return self.composite(self.arguments._make(inputs))

    def returned(self, results: Any) -> Any:
        """What the operator returns, of what ran in its place."""
        if self.forward is None:
            return results
        count = len(self.op._schema.returns)
        return results[0] if count == 1 else results[:count]


def register_autograd(
    op: torch._ops.OpOverload,
    setup_context: SetupContext,
    backward: Formula,
    jvp: Formula | None = None,
    composite: Formula | None = None,
    forward: torch._ops.OpOverload | None = None,
) -> None:
    """Gives an operator its derivatives.

    Args:
        op: the operator, for example ``torch.ops.myvision.my_add.default``. Its arguments have no defaults.
        setup_context: ``setup_context(ctx, inputs, output)`` keeps what the formulas need; inputs are the arguments by
            name, a tuple of ``arguments_of(op)``.
        backward: ``backward(ctx, *grad_outputs)`` returns a tuple: one gradient, or None, per input. Where its
            operations are differentiable, so is the gradient.
        jvp: ``jvp(ctx, *tangents)`` returns the tangent of the output.
        composite: called with the arguments that it names, it returns the output by differentiable operations, for an
            operator without jvp: it takes over in forward-mode AD, which raises where there is neither.
        forward: an operator of the same arguments that returns, after what ``op`` returns, what backward needs besides.
            It runs where gradients are needed, and ``setup_context`` gets all of its results as ``output``. Where
            several operators share it, the one that returns the most registers first: its derivative is forward's.

    Raises:
        ValueError: an argument of the operator has a default, which the dispatcher would not pass on.
    """
    if any(argument.has_default_value() for argument in op._schema.arguments):
        raise ValueError(f"register_autograd: an argument of {op.name()} has a default value")
    by_name = functools.partial(call_by_name, composite) if composite else None
    _register(_Derivative(op, setup_context, backward, jvp, by_name, forward))


def register_second_derivative(op: torch._ops.OpOverload, gradients: Formula) -> None:
    """Gives an operator that computes gradients its own derivatives.

    Args:
        op: the operator. Where a gradient is not wanted, it returns None.
        gradients: ``gradients(inputs)`` gets the arguments by name and returns the same by differentiable operations.
    """
    arguments = arguments_of(op)

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.is_tensor = [isinstance(value, torch.Tensor) for value in inputs]
        ctx.save_for_backward(
            *(value if is_tensor else None for value, is_tensor in zip(inputs, ctx.is_tensor, strict=True))
        )
        ctx.constants = [None if is_tensor else value for value, is_tensor in zip(inputs, ctx.is_tensor, strict=True)]

    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        inputs = [
            tensor if is_tensor else constant
            for tensor, constant, is_tensor in zip(ctx.saved_tensors, ctx.constants, ctx.is_tensor, strict=True)
        ]

        def present(*inputs: Any) -> list[torch.Tensor]:
            return [gradient for gradient in gradients(arguments(*inputs)) if gradient is not None]

        return gradients_of(present, inputs, ctx.needs_input_grad, [grad for grad in grads if grad is not None])

    _register(_Derivative(op, setup_context, backward, jvp=None, composite=gradients, forward=None))


def past_autograd(op: torch._ops.OpOverload) -> Formula:
    """The operator as formulas call it: past its own derivative where nobody asks for that, which is what it would do.

    In most backward passes this saves a way through the dispatcher and back into Python.
    """
    if not _LEAN:
        return op
    raw = getattr(op, "_op", op)

    def call(*args: Any) -> Any:
        if torch.is_grad_enabled() or forward_ad._current_level >= 0 or torch.compiler.is_compiling():
            return op(*args)
        with _AutoDispatchBelowAutograd():
            return raw(*args)

    return call


def _register(derivative: _Derivative) -> None:
    (_register_lean if _LEAN else _register_public)(derivative)


def _register_lean(derivative: _Derivative) -> None:
    raw = getattr(derivative.op, "_op", derivative.op)  # the builtin behind the overload: one Python call less
    raw_forward = getattr(derivative.forward, "_op", raw)
    apply = _function(derivative, raw_forward).apply
    apply_single_level = _single_level_function(derivative, raw_forward).apply

    def differentiable(*args: Any) -> Any:
        if forward_ad._current_level >= 0 and derivative.composite:
            return derivative.compose(*args)
        if (torch.is_grad_enabled() and _any_requires_grad(*args)) or forward_ad._current_level >= 0:
            if not _are_functorch_transforms_active():
                return apply(*args)
            with enable_single_level_autograd_function():
                return apply_single_level(*args, (torch.is_grad_enabled(), _is_fwd_grad_enabled()))
        with _AutoDispatchBelowAutograd():
            return raw(*args)

    _implement(derivative.op, "Autograd", _counting_writes(derivative.op, differentiable))
    if derivative.forward and derivative.forward not in _forwards:
        _forwards.add(derivative.forward)
        _register_lean(_of_forward(derivative, derivative.forward))


def _of_forward(derivative: _Derivative, forward: torch._ops.OpOverload) -> _Derivative:
    """The derivative of the operator that runs in op's place, which an outer level of torch.func differentiates."""
    count = len(derivative.op._schema.returns)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], results: tuple[Any, ...]) -> None:
        derivative.keep(ctx, inputs, results)
        ctx.mark_non_differentiable(*results[count:])

    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return derivative.backward(ctx, *grads[:count])

    return _Derivative(forward, setup_context, backward, jvp=None, composite=None, forward=None)


def _counting_writes(op: torch._ops.OpOverload, kernel: Formula, first: int = 0) -> Formula:
    """The kernel, after which autograd knows that the operator has written to some of its arguments.

    What autograd would refuse is refused before the kernel runs, so that a call that fails changes nothing. Inference
    tensors, which count no changes, are written to anywhere, as torch's own functions do.

    Args:
        first: the position of the operator's first argument among those of the kernel.
    """
    written = {first + i: argument.name for i, argument in enumerate(op._schema.arguments) if argument.is_write}
    if not written:
        return kernel

    def counting(*args: Any) -> Any:
        for i, name in written.items():
            if args[i].requires_grad and torch.is_grad_enabled():
                raise RuntimeError(
                    f"{op._schema.name.partition('::')[2]}: {name} is updated, and so cannot require a gradient: "
                    "detach it"
                )
        results = kernel(*args)
        torch.autograd.graph.increment_version([args[i] for i in written if not args[i].is_inference()])
        return results

    return counting


def _function(derivative: _Derivative, raw: Formula) -> Any:
    def forward(ctx: Any, *args: Any) -> Any:
        with _AutoDispatchBelowAutograd():
            results = raw(*args)
        derivative.keep(ctx, args, results)
        return derivative.returned(results)

    return _function_type(torch.autograd.Function, derivative, forward, derivative.backward, derivative.jvp)


def _single_level_function(derivative: _Derivative, raw: Formula) -> Any:
    """The formula at one level of torch.func: forward goes on to the level below in the caller's gradient modes.

    These modes come as an extra last argument, because apply switches both off before it calls forward.
    """

    def forward(ctx: Any, *args: Any) -> Any:
        *inputs, (grad_enabled, fwd_grad_enabled) = args
        with (
            torch.set_grad_enabled(grad_enabled),
            _set_fwd_grad_enabled(fwd_grad_enabled),
            _AutoDispatchBelowAutograd(),
        ):
            results = raw(*inputs)
        ctx.fwd_grad_enabled = fwd_grad_enabled
        derivative.keep(ctx, inputs, results)
        return derivative.returned(results)

    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        ctx.needs_input_grad = needs_of(derivative.arguments, ctx)
        return (*derivative.backward(ctx, *grads), None)

    def jvp(ctx: Any, *tangents: Any) -> Any:
        assert derivative.jvp
        with _set_fwd_grad_enabled(ctx.fwd_grad_enabled):  # switched off by apply; the levels below need it
            return derivative.jvp(_PrimalContext(ctx), *tangents[:-1])

    return _function_type(_SingleLevelFunction, derivative, forward, backward, jvp if derivative.jvp else None)


class _PrimalContext:
    """A context whose saved tensors are without their tangents, as forward-mode AD is on while the formula runs."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return tuple(
            None if tensor is None else forward_ad.unpack_dual(tensor).primal for tensor in self._ctx.saved_tensors
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def _function_type(
    base: type, derivative: _Derivative, forward: Formula, backward: Formula, jvp: Formula | None
) -> Any:
    name = derivative.op.name().split("::")[1].title().replace("_", "")  # grad_fn then reads <MyAddBackward>
    formulas = {"forward": forward, "backward": backward} | ({"jvp": jvp} if jvp else {})
    return type(name, (base,), {key: staticmethod(formula) for key, formula in formulas.items()})


def _register_public(derivative: _Derivative) -> None:
    """By public calls of torch, whose kernels drop forward-mode tangents in silence: here they raise."""
    op = derivative.op
    kernel = _public_function(derivative, derivative.forward) if derivative.forward else _public_kernel(derivative)

    def autograd(keyset: Any, *args: Any) -> Any:
        tensors = (arg for arg in args if isinstance(arg, torch.Tensor))
        if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
            if derivative.composite:
                return derivative.compose(*args)
            raise NotImplementedError(f"{op.name()}: forward-mode AD is not implemented with this version of torch")
        return kernel(keyset, *args)

    _implement(op, "Autograd", autograd, with_keyset=True, allow_override=True)


def _public_kernel(derivative: _Derivative) -> Formula:
    op = derivative.op
    library = torch.library.Library(op.namespace, "IMPL")
    torch.library.register_autograd(op, derivative.backward, setup_context=derivative.keep, lib=library)
    _libraries.append(library)
    return torch.library.get_kernel(op, "AutogradCPU").call_boxed  # one kernel for every device


def _public_function(derivative: _Derivative, forward: torch._ops.OpOverload) -> Formula:
    """For an operator with another that keeps what backward needs: that one has no derivative, and is called always."""
    apply = _function(derivative, forward).apply

    def kernel(_: Any, *args: Any) -> Any:
        tensors = (arg for arg in args if isinstance(arg, torch.Tensor))
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return apply(*args)
        return derivative.returned(forward(*args))

    return _counting_writes(derivative.op, kernel, first=1)


def _implement(op: torch._ops.OpOverload, dispatch_key: str, kernel: Formula, **options: bool) -> None:
    library = torch.library.Library(op.namespace, "IMPL")
    library.impl(op, kernel, dispatch_key, **options)
    _libraries.append(library)
