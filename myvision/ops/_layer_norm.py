"""What layer_norm, rms_norm, add_layer_norm and add_rms_norm share: fakes, derivatives, autocast and vmap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from myvision._checks import check, check_activation, check_floating, check_output_mask
from myvision._dispatch.arguments import arguments_of, call_by_name, needs_of
from myvision._dispatch.autograd import past_autograd, register_autograd, register_second_derivative
from myvision._dispatch.fake import register_fake
from myvision._dispatch.vjp import gradients_of
from myvision._dispatch.vmap import register_vmap
from myvision._formulas._dropout import dropout
from myvision._formulas._normalise import real
from myvision._formulas.layer_norm import layer_norm
from myvision._formulas.rms_norm import rms_norm
from myvision._layout import dense_like
from myvision.ops._dropout import check_dropout
from myvision.ops._norm import (
    check_like_input,
    check_parameter,
    check_statistics,
    parameter_gradient,
    real_dtype,
    register_norm_autocast,
)


def as_shape(normalized_shape: int | Sequence[int]) -> Sequence[int]:
    return (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape


def is_first(op: str, channels: Literal["first", "last"]) -> bool:
    if channels not in ("first", "last"):
        raise ValueError(f"{op}: channels must be 'first' or 'last', but is {channels!r}")
    return channels == "first"


# ---- what the operators return, and what they reject: the same as csrc/ops/layer_norm/layer_norm.cpp -----------------


def _check_normalized_shape(op: str, input: Tensor, shape: Sequence[int], channels_first: bool) -> None:
    if channels_first:
        fits = input.dim() >= 2 and len(shape) == 1 and shape[0] == input.shape[1]
        check(
            op,
            fits,
            lambda: (
                "with channels='first', normalized_shape must be the size of dimension 1 of input, but is "
                f"{tuple(shape)}, and input has shape {tuple(input.shape)}"
            ),
        )
        return
    fits = 1 <= len(shape) <= input.dim()
    for size, wanted in zip(input.shape[-len(shape) :], shape, strict=False):
        fits = fits and size == wanted
    check(
        op,
        fits,
        lambda: (
            f"normalized_shape must be the last dimensions of input, at least one, but is {tuple(shape)}, and input "
            f"has shape {tuple(input.shape)}"
        ),
    )


def _check_call(op: str, call: Any, input: Tensor) -> None:
    """`input` is what is normalised. An argument that the operator does not have is as one that is not given."""
    shape, bias = call.normalized_shape, getattr(call, "bias", None)
    check_floating(op, "input", input)
    _check_normalized_shape(op, input, shape, getattr(call, "channels_first", False))
    check_parameter(op, "weight", call.weight, shape, input)
    check_parameter(op, "bias", bias, shape, input)
    check_like_input(op, "residual", getattr(call, "residual", None), input)
    check_activation(op, getattr(call, "activation", None))


def _new_image(input: Tensor, channels_first: bool) -> Tensor:
    """As the input lies in memory where that is images in channels_last, contiguous otherwise."""
    return dense_like(input) if channels_first else torch.empty_like(input, memory_format=torch.contiguous_format)


def _new_statistics(input: Tensor, normalized_shape: Sequence[int], channels_first: bool, centered: bool) -> Tensor:
    others = (
        (*input.shape[:1], *input.shape[2:]) if channels_first else input.shape[: input.dim() - len(normalized_shape)]
    )
    rows = 1
    for size in others:
        rows = rows * size
    return input.new_empty((3 if centered else 1, rows), dtype=real_dtype(input))


def fake_norm(op: str) -> Callable[[Any], tuple[Tensor, ...]]:
    """The fake of layer_norm or rms_norm. It returns the statistics too."""

    def fake(call: Any) -> tuple[Tensor, Tensor]:
        _check_call(op, call, call.input)
        statistics = _new_statistics(call.input, call.normalized_shape, call.channels_first, op == "layer_norm")
        return _new_image(call.input, call.channels_first), statistics

    return fake


def fake_add_norm(op: str) -> Callable[[Any], tuple[Tensor, ...]]:
    """The fake of add_layer_norm or add_rms_norm. It returns the statistics too."""

    def fake(call: Any) -> tuple[Tensor, Tensor, Tensor]:
        _check_call(op, call, call.input)
        check_dropout(op, call.dropout_p, call.seed, call.input)
        statistics = _new_statistics(call.input, call.normalized_shape, False, op == "add_layer_norm")
        return _new_image(call.input, False), _new_image(call.input, False), statistics

    return fake


def _fake_backward(call: Any) -> tuple[Tensor | None, ...]:
    op, input, shape, wanted = "layer_norm", call.input, call.normalized_shape, call.output_mask
    _check_call(op, call, input)
    check_output_mask(op, wanted, 4)
    statistics = _new_statistics(input, shape, call.channels_first, call.statistics.shape[0] == 3)
    check_statistics(op, call.statistics, statistics.shape, input)
    check_like_input(op, "grad_output", call.grad_output, input)
    return (
        _new_image(input, call.channels_first) if wanted[0] else None,
        parameter_gradient(wanted[1], call.weight, shape, input),
        parameter_gradient(wanted[2], call.bias, shape, input),
        _new_image(input, call.channels_first) if wanted[3] else None,
    )


def _fake_add_backward(call: Any) -> tuple[Tensor | None, ...]:
    op, sum, shape, wanted = "add_layer_norm", call.sum, call.normalized_shape, call.output_mask
    _check_call(op, call, sum)
    check_dropout(op, call.dropout_p, call.seed, sum)
    check_output_mask(op, wanted, 4)
    check_statistics(op, call.statistics, _new_statistics(sum, shape, False, call.statistics.shape[0] == 3).shape, sum)
    check_like_input(op, "grad_output", call.grad_output, sum)
    check_like_input(op, "grad_sum", call.grad_sum, sum)
    return (
        _new_image(sum, False) if wanted[0] else None,
        _new_image(sum, False) if wanted[1] else None,
        parameter_gradient(wanted[2], call.weight, shape, sum),
        parameter_gradient(wanted[3], call.bias, shape, sum),
    )


# ---- derivatives: the first by the fused kernels, the others through the formulas ------------------------------------


def register(op: torch._ops.OpOverload, forward: torch._ops.OpOverload, formula: Callable[..., Tensor]) -> None:
    """Gives layer_norm or rms_norm its fake, derivatives, autocast and vmap.

    Args:
        op: the operator.
        forward: the one that returns the statistics too.
        formula: the same in plain torch.
    """
    arguments = arguments_of(op)
    has_bias = "bias" in arguments._fields

    def setup_context(ctx: Any, call: Any, results: tuple[Tensor, Tensor]) -> None:
        ctx.shape, ctx.activated = call.normalized_shape, call.activation is not None
        ctx.options = call.channels_first, call.eps, call.activation, call.negative_slope
        bias, residual = call.bias if has_bias else None, call.residual if ctx.activated else None
        ctx.save_for_backward(call.input, results[1], call.weight, bias, residual)

    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, statistics, *parameters = ctx.saved_tensors
        needs = needs_of(arguments, ctx)
        wanted = [needs.input, needs.weight, has_bias and needs.bias, needs.residual and ctx.activated]
        grad_input, weight, bias, residual = _first_backward(
            grad_output, input, statistics, ctx.shape, *parameters, *ctx.options, wanted
        )
        if needs.residual and not ctx.activated:
            residual = grad_output
        affine = {"weight": weight, "bias": bias} if has_bias else {"weight": weight}
        return arguments(input=grad_input, residual=residual, **affine)

    _register_fakes_and_vmap(op, forward, fake_norm)
    register_autograd(op, setup_context, backward, composite=formula, forward=forward)
    register_norm_autocast(op)


def register_add(
    op: torch._ops.OpOverload, forward: torch._ops.OpOverload, formula: Callable[..., tuple[Tensor, Tensor]]
) -> None:
    """Gives add_layer_norm or add_rms_norm its fake, derivatives, autocast and vmap; arguments as for `register`."""
    arguments = arguments_of(op)
    has_bias = "bias" in arguments._fields

    def setup_context(ctx: Any, call: Any, results: tuple[Tensor, Tensor, Tensor]) -> None:
        _output, sum, statistics = results
        ctx.shape, ctx.eps, ctx.dropout_p = call.normalized_shape, call.eps, call.dropout_p
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(sum, statistics, call.weight, call.bias if has_bias else None, call.seed)

    def backward(ctx: Any, grad_output: Tensor | None, grad_sum: Tensor | None) -> tuple[Tensor | None, ...]:
        sum, statistics, weight, bias, seed = ctx.saved_tensors
        needs = needs_of(arguments, ctx)
        if grad_output is None:
            grad_output = torch.zeros_like(sum)
        drops = ctx.dropout_p > 0
        wanted = [
            needs.input and drops,
            needs.residual or (needs.input and not drops),
            needs.weight,
            has_bias and needs.bias,
        ]
        options = ctx.eps, ctx.dropout_p, seed
        input, residual, grad_weight, grad_bias = _first_add_backward(
            grad_output, grad_sum, sum, statistics, ctx.shape, weight, bias, *options, wanted
        )
        affine = {"weight": grad_weight, "bias": grad_bias} if has_bias else {"weight": grad_weight}
        return arguments(input=input if drops else residual, residual=residual, **affine)

    _register_fakes_and_vmap(op, forward, fake_add_norm)
    register_autograd(op, setup_context, backward, composite=formula, forward=forward)
    register_norm_autocast(op, promotes=True)


def _register_fakes_and_vmap(
    op: torch._ops.OpOverload, forward: torch._ops.OpOverload, fake: Callable[[str], Callable[[Any], Any]]
) -> None:
    register_fake(fake(op._schema.name.partition("::")[2]), op, forward)
    register_vmap(op)
    register_vmap(forward)


def _gradients(call: Any) -> tuple[Tensor | None, ...]:
    """What the backward operator returns; the statistics are computed anew, as they depend on the input."""
    formula = rms_norm if call.statistics.shape[0] == 1 else layer_norm

    def forward(input: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        return call_by_name(formula, call, input=input, weight=weight, bias=bias, residual=residual)

    return gradients_of(
        forward, (call.input, call.weight, call.bias, call.residual), call.output_mask, call.grad_output
    )


def _add_gradients(call: Any) -> tuple[Tensor | None, ...]:
    """What the backward operator of the add forms returns."""
    of_input, of_sum, of_weight, of_bias = call.output_mask
    through_norm, grad_weight, grad_bias, _ = _gradients(
        arguments_of(_backward)(
            grad_output=call.grad_output,
            input=call.sum,
            statistics=call.statistics,
            normalized_shape=call.normalized_shape,
            weight=call.weight,
            bias=call.bias,
            channels_first=False,
            eps=call.eps,
            negative_slope=0.0,
            output_mask=[of_input or of_sum, of_weight, of_bias, False],
        )
    )
    if through_norm is None:
        return None, None, grad_weight, grad_bias
    total = through_norm
    if call.grad_sum is not None:
        total = (real(through_norm) + real(call.grad_sum)).to(call.sum.dtype)
    dropped = dropout(total, call.dropout_p, call.seed).to(call.sum.dtype) if of_input else None
    return dropped, total if of_sum else None, grad_weight, grad_bias


_backward = torch.ops.myvision._layer_norm_backward.default
_add_backward = torch.ops.myvision._add_layer_norm_backward.default
_first_backward, _first_add_backward = past_autograd(_backward), past_autograd(_add_backward)
register_fake(_fake_backward, _backward)
register_fake(_fake_add_backward, _add_backward)
register_second_derivative(_backward, _gradients)
register_second_derivative(_add_backward, _add_gradients)
register_vmap(_backward)
register_vmap(_add_backward)
