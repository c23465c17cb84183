"""What layer_norm, rms_norm, add_layer_norm and add_rms_norm share: fakes, derivatives, autocast and vmap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from myvision._dispatch.autograd import register_autograd, register_second_derivative
from myvision._dispatch.vjp import gradients_of
from myvision._dispatch.vmap import register_vmap
from myvision._formulas._dropout import dropout
from myvision._formulas._normalise import real
from myvision._formulas.layer_norm import layer_norm as layer_norm_reference
from myvision._formulas.rms_norm import rms_norm as rms_norm_reference
from myvision._layout import dense_like
from myvision.ops._dropout import check_dropout
from myvision.ops._norm import (
    argument_positions,
    check,
    check_activation,
    check_floating,
    check_like_input,
    check_mask,
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


def _check_call(
    op: str,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    channels_first: bool,
    activation: str | None,
) -> None:
    check_floating(op, "input", input)
    _check_normalized_shape(op, input, normalized_shape, channels_first)
    check_parameter(op, "weight", weight, normalized_shape, input)
    check_parameter(op, "bias", bias, normalized_shape, input)
    check_like_input(op, "residual", residual, input)
    check_activation(op, activation)


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


def fake_layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    channels_first: bool,
    eps: float,
    activation: str | None,
    negative_slope: float,
) -> tuple[Tensor, Tensor]:
    _check_call("layer_norm", input, normalized_shape, weight, bias, residual, channels_first, activation)
    return _new_image(input, channels_first), _new_statistics(input, normalized_shape, channels_first, True)


def fake_rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    residual: Tensor | None,
    channels_first: bool,
    eps: float,
    activation: str | None,
    negative_slope: float,
) -> tuple[Tensor, Tensor]:
    _check_call("rms_norm", input, normalized_shape, weight, None, residual, channels_first, activation)
    return _new_image(input, channels_first), _new_statistics(input, normalized_shape, channels_first, False)


def fake_add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_add_norm("add_layer_norm", input, residual, normalized_shape, weight, bias, eps, dropout_p, seed)


def fake_add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    eps: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_add_norm("add_rms_norm", input, residual, normalized_shape, weight, None, eps, dropout_p, seed)


def _fake_add_norm(
    op: str,
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_call(op, input, normalized_shape, weight, bias, None, False, None)
    check_like_input(op, "residual", residual, input)
    check_dropout(op, dropout_p, seed, input)
    statistics = _new_statistics(input, normalized_shape, False, op == "add_layer_norm")
    return _new_image(input, False), _new_image(input, False), statistics


def _fake_backward(
    grad_output: Tensor,
    input: Tensor,
    statistics: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    channels_first: bool,
    eps: float,
    activation: str | None,
    negative_slope: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    op = "layer_norm"
    _check_call(op, input, normalized_shape, weight, bias, residual, channels_first, activation)
    check_mask(op, output_mask, 4)
    wanted = _new_statistics(input, normalized_shape, channels_first, statistics.shape[0] == 3)
    check_statistics(op, statistics, wanted.shape, input)
    check_like_input(op, "grad_output", grad_output, input)
    return (
        _new_image(input, channels_first) if output_mask[0] else None,
        parameter_gradient(output_mask[1], weight, normalized_shape, input),
        parameter_gradient(output_mask[2], bias, normalized_shape, input),
        _new_image(input, channels_first) if output_mask[3] else None,
    )


def _fake_add_backward(
    grad_output: Tensor,
    grad_sum: Tensor | None,
    sum: Tensor,
    statistics: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
    seed: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    op = "add_layer_norm"
    _check_call(op, sum, normalized_shape, weight, bias, None, False, None)
    check_dropout(op, dropout_p, seed, sum)
    check_mask(op, output_mask, 4)
    check_statistics(op, statistics, _new_statistics(sum, normalized_shape, False, statistics.shape[0] == 3).shape, sum)
    check_like_input(op, "grad_output", grad_output, sum)
    check_like_input(op, "grad_sum", grad_sum, sum)
    return (
        _new_image(sum, False) if output_mask[0] else None,
        _new_image(sum, False) if output_mask[1] else None,
        parameter_gradient(output_mask[2], weight, normalized_shape, sum),
        parameter_gradient(output_mask[3], bias, normalized_shape, sum),
    )


# ---- derivatives: the first by the fused kernels, the others through the reference -----------------------------------


def register(
    op: torch._ops.OpOverload,
    forward: torch._ops.OpOverload,
    fake: Callable[..., tuple[Tensor, Tensor]],
    reference: Callable[..., Tensor],
) -> None:
    """Gives layer_norm or rms_norm its fake, derivatives, autocast and vmap.

    Args:
        op: the operator.
        forward: the one that returns the statistics too.
        fake: of both.
        reference: the same in plain torch.
    """
    weight, residual, channels_first, activation = argument_positions(
        op, "weight", "residual", "channels_first", "activation"
    )
    bias = weight + 1 if residual > weight + 1 else None

    def setup_context(ctx: Any, inputs: tuple[Any, ...], results: tuple[Tensor, Tensor]) -> None:
        ctx.shape, ctx.constants = inputs[1], inputs[channels_first:]
        needed_residual = None if inputs[activation] is None else inputs[residual]  # what the activation was given
        ctx.save_for_backward(
            inputs[0], results[1], inputs[weight], None if bias is None else inputs[bias], needed_residual
        )

    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, statistics, *parameters = ctx.saved_tensors
        needs = ctx.needs_input_grad
        through_activation = ctx.constants[2] is not None
        wanted = [
            needs[0],
            needs[weight],
            bias is not None and needs[bias],
            needs[residual] and through_activation,
        ]
        grad_input, grad_weight, grad_bias, grad_residual = _backward(
            grad_output, input, statistics, ctx.shape, *parameters, *ctx.constants, wanted
        )
        if needs[residual] and not through_activation:
            grad_residual = grad_output
        affine = (grad_weight,) if bias is None else (grad_weight, grad_bias)
        return (grad_input, None, *affine, grad_residual, *[None] * len(ctx.constants))

    _register_fakes_and_vmap(op, forward, fake)
    register_autograd(op, setup_context, backward, composite=reference, forward=forward)
    register_norm_autocast(op)


def register_add(
    op: torch._ops.OpOverload,
    forward: torch._ops.OpOverload,
    fake: Callable[..., tuple[Tensor, Tensor, Tensor]],
    reference: Callable[..., tuple[Tensor, Tensor]],
) -> None:
    """Gives add_layer_norm or add_rms_norm its fake, derivatives, autocast and vmap; arguments as for `register`."""
    weight, eps = argument_positions(op, "weight", "eps")
    has_bias = eps == weight + 2

    def setup_context(ctx: Any, inputs: tuple[Any, ...], results: tuple[Tensor, Tensor, Tensor]) -> None:
        _output, sum, statistics = results
        *_, ctx.eps, ctx.dropout_p, seed = inputs
        ctx.shape = inputs[2]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(sum, statistics, inputs[weight], inputs[weight + 1] if has_bias else None, seed)

    def backward(ctx: Any, grad_output: Tensor | None, grad_sum: Tensor | None) -> tuple[Tensor | None, ...]:
        sum, statistics, weight_, bias, seed = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if grad_output is None:
            grad_output = torch.zeros_like(sum)
        drops = ctx.dropout_p > 0
        wanted = [
            needs[0] and drops,
            needs[1] or (needs[0] and not drops),
            needs[weight],
            has_bias and needs[weight + 1],
        ]
        constants = ctx.eps, ctx.dropout_p, seed
        grad_input, grad_residual, *affine = _add_backward(
            grad_output, grad_sum, sum, statistics, ctx.shape, weight_, bias, *constants, wanted
        )
        if not drops:
            grad_input = grad_residual
        return (grad_input, grad_residual, None, *affine[: 1 + has_bias], None, None, None)

    _register_fakes_and_vmap(op, forward, fake, returned=2)
    register_autograd(op, setup_context, backward, composite=reference, forward=forward)
    register_norm_autocast(op, promotes=True)


def _register_fakes_and_vmap(
    op: torch._ops.OpOverload, forward: torch._ops.OpOverload, fake: Callable[..., Any], returned: int = 1
) -> None:
    torch.library.register_fake(op, lambda *args: fake(*args)[0] if returned == 1 else fake(*args)[:returned])
    torch.library.register_fake(forward, fake)
    register_vmap(op)
    register_vmap(forward)


def _gradients(
    grad_output: Tensor,
    input: Tensor,
    statistics: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    channels_first: bool,
    eps: float,
    activation: str | None,
    negative_slope: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """What the backward operator returns; the statistics are computed anew, as they depend on the input."""
    constants = channels_first, eps, activation, negative_slope

    def forward(input: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        if statistics.shape[0] == 1:
            return rms_norm_reference(input, normalized_shape, weight, residual, *constants)
        return layer_norm_reference(input, normalized_shape, weight, bias, residual, *constants)

    return gradients_of(forward, (input, weight, bias, residual), output_mask, grad_output)


def _add_gradients(
    grad_output: Tensor,
    grad_sum: Tensor | None,
    sum: Tensor,
    statistics: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
    seed: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """What the backward operator of the add forms returns."""
    of_input, of_sum, of_weight, of_bias = output_mask
    mask = [of_input or of_sum, of_weight, of_bias, False]
    through_norm, grad_weight, grad_bias, _ = _gradients(
        grad_output, sum, statistics, normalized_shape, weight, bias, None, False, eps, None, 0.0, mask
    )
    if through_norm is None:
        return None, None, grad_weight, grad_bias
    total = through_norm if grad_sum is None else (real(through_norm) + real(grad_sum)).to(sum.dtype)
    dropped = dropout(total, dropout_p, seed).to(sum.dtype) if of_input else None
    return dropped, total if of_sum else None, grad_weight, grad_bias


_backward = torch.ops.myvision._layer_norm_backward.default
_add_backward = torch.ops.myvision._add_layer_norm_backward.default
torch.library.register_fake(_backward, _fake_backward)
torch.library.register_fake(_add_backward, _fake_add_backward)
register_second_derivative(_backward, _gradients)
register_second_derivative(_add_backward, _add_gradients)
register_vmap(_backward)
register_vmap(_add_backward)
