"""What batch_norm, instance_norm and group_norm share: fakes, derivatives, autocast and vmap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from myvision._checks import check, check_activation, check_floating, check_output_mask
from myvision._dispatch.arguments import arguments_of, call_by_name, needs_of
from myvision._dispatch.autograd import past_autograd, register_autograd, register_second_derivative
from myvision._dispatch.fake import register_fake
from myvision._dispatch.vjp import gradients_of
from myvision._dispatch.vmap import register_vmap
from myvision._formulas._normalise import finish, per_channel, real
from myvision._formulas.batch_norm import batch_norm
from myvision._formulas.group_norm import group_norm
from myvision._layout import dense_like, is_dense
from myvision.ops._norm import (
    check_channel_parameter,
    check_like_input,
    check_statistics,
    parameter_gradient,
    real_dtype,
    register_norm_autocast,
)

Fake = Callable[[Any], tuple[Tensor, Tensor]]

# ---- what the operators return, and what they reject: the same as csrc/ops/batch_norm/batch_norm.cpp -----------------


def _check_call(op: str, call: Any, num_groups: int | None = None) -> None:
    input = call.input
    _check_images(op, input)
    channels = input.shape[1]
    if num_groups is not None:
        check(
            op,
            num_groups >= 1 and channels % num_groups == 0,
            lambda: f"num_groups must be a divisor of the number of channels, {channels}, but is {num_groups}",
        )
    check_channel_parameter(op, "weight", call.weight, input)
    check_channel_parameter(op, "bias", call.bias, input)
    check_like_input(op, "residual", call.residual, input)
    check_activation(op, call.activation)


def _check_images(op: str, input: Tensor) -> None:
    check_floating(op, "input", input)
    check(
        op,
        input.dim() >= 2,
        lambda: f"input must have at least 2 dimensions (batch, channels, ...), but has shape {tuple(input.shape)}",
    )


def _check_running(op: str, call: Any) -> None:
    """eps is taken as torch's own functions take it: batch_norm alone refuses what is negative."""
    check(op, op != "batch_norm" or call.eps >= 0, lambda: f"eps must be at least 0, but is {call.eps:g}")
    mean, var = call.running_mean, call.running_var
    check(
        op,
        (mean is None) == (var is None),
        lambda: (
            f"running_mean and running_var go together, but {'running_mean' if mean is None else 'running_var'} is None"
        ),
    )
    check_channel_parameter(op, "running_mean", mean, call.input)
    check_channel_parameter(op, "running_var", var, call.input)


def _check_updated(op: str, name: str, running: Tensor) -> None:
    check(
        op,
        running.shape[0] <= 1 or running.stride(0) != 0,
        lambda: f"{name} must have a place of its own for each channel, as it is updated, but is expanded",
    )


def _check_own_statistics(op: str, input: Tensor, others: int) -> None:
    """`others` is what the number of values that share a mean has to be multiplied with to give all of them."""
    numel = input.numel()
    check(
        op,
        (numel == 0) | (numel != others),
        lambda: f"a mean needs more than 1 value, but input has shape {tuple(input.shape)}",
    )


def _others(op: str, input: Tensor, num_groups: int) -> int:
    """What `_check_own_statistics` wants, as torch's own functions count."""
    if op == "group_norm":
        return num_groups
    return input.shape[1] if op == "batch_norm" else input.shape[0] * input.shape[1]


def _new_statistics(input: Tensor, groups: int) -> Tensor:
    count = input.shape[1] if groups == 0 else input.shape[0] * groups
    return input.new_empty((3, count), dtype=real_dtype(input))


def running_fakes(op: str) -> tuple[Fake, Fake]:
    """The fakes of batch_norm or instance_norm, without update and with it. Each returns the statistics too."""

    def pure(call: Any) -> tuple[Tensor, Tensor]:
        _check_call(op, call)
        _check_running(op, call)
        if call.running_mean is None:
            _check_own_statistics(op, call.input, _others(op, call.input, 0))
        own_instances = op == "instance_norm" and call.running_mean is None
        return dense_like(call.input), _new_statistics(call.input, call.input.shape[1] if own_instances else 0)

    def update(call: Any) -> tuple[Tensor, Tensor]:
        input = call.input
        _check_call(op, call)
        _check_running(op, call)
        _check_updated(op, "running_mean", call.running_mean)
        _check_updated(op, "running_var", call.running_var)
        _check_own_statistics(op, input, _others(op, input, 0))
        return dense_like(input), _new_statistics(input, input.shape[1] if op == "instance_norm" else 0)

    return pure, update


def _fake_in_place(call: Any) -> None:
    op, input = "batch_norm", call.input
    _check_call(op, call)
    _check_running(op, call)
    check(
        op,
        is_dense(input),
        lambda: (
            "input must be contiguous or channels_last to be written to, but has shape "
            f"{tuple(input.shape)} and strides {input.stride()}"
        ),
    )


def fake_group_norm(call: Any) -> tuple[Tensor, Tensor]:
    _check_call("group_norm", call, call.num_groups)
    _check_own_statistics("group_norm", call.input, call.num_groups)
    return dense_like(call.input), _new_statistics(call.input, call.num_groups)


def _fake_backward(call: Any) -> tuple[Tensor | None, ...]:
    op = "group_norm" if call.groups else "batch_norm"
    input, wanted = call.input, call.output_mask
    _check_call(op, call, call.groups or None)
    check_statistics(op, call.statistics, _new_statistics(input, call.groups).shape, input)
    check_output_mask(op, wanted, 4)
    check_like_input(op, "grad_output", call.grad_output, input)
    channels = (input.shape[1],)
    return (
        dense_like(input) if wanted[0] else None,
        parameter_gradient(wanted[1], call.weight, channels, input),
        parameter_gradient(wanted[2], call.bias, channels, input),
        dense_like(input) if wanted[3] else None,
    )


# ---- derivatives: the first by the fused kernel, the others through the formulas -------------------------------------


def register(
    op: torch._ops.OpOverload,
    forward: torch._ops.OpOverload,
    fake: Fake,
    formula: Callable[..., Tensor],
    *,
    own_statistics: Callable[[Any], bool] = lambda call: True,
    groups: Callable[[Any], int] = lambda call: 0,
) -> None:
    """Gives an operator its fake, derivatives, autocast and vmap.

    Args:
        op: the operator.
        forward: the one that returns the statistics too.
        fake: of both.
        formula: the same in plain torch.
        own_statistics: whether a call, given its arguments by name, normalises the input by its own statistics, and not
            by running ones. Default: it does.
        groups: into how many groups it then divides an image's channels; 0, the default: a channel of the whole batch
            is one.
    """
    arguments = arguments_of(op)
    running = {"running_mean", "running_var"}.intersection(arguments._fields)

    def setup_context(ctx: Any, call: Any, results: tuple[Tensor, Tensor]) -> None:
        needs = needs_of(arguments, ctx)
        if any(getattr(needs, name) for name in running):
            raise RuntimeError(f"{op._schema.name}: running_mean and running_var have no gradient: detach them")
        training = own_statistics(call)
        ctx.options = groups(call) if training else 0, training, call.eps, call.activation, call.negative_slope
        ctx.activated = call.activation is not None
        ctx.save_for_backward(call.input, results[1], call.weight, call.bias, call.residual if ctx.activated else None)

    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        needs = needs_of(arguments, ctx)
        wanted = [needs.input, needs.weight, needs.bias, needs.residual and ctx.activated]
        input, weight, bias, residual = _first_backward(grad_output, *ctx.saved_tensors, *ctx.options, wanted)
        if needs.residual and not ctx.activated:
            residual = grad_output
        return arguments(input=input, weight=weight, bias=bias, residual=residual)

    register_fake(fake, op, forward)
    register_autograd(op, setup_context, backward, composite=formula, forward=forward)
    register_norm_autocast(op)
    register_vmap(op)
    register_vmap(forward)


def _gradients(call: Any) -> tuple[Tensor | None, ...]:
    """What the backward operator returns; statistics of the input's own are computed anew, as they depend on it."""

    def by_given_statistics(
        input: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        mean, rest, rstd = call.statistics.reshape(3, -1, *[1] * (input.dim() - 2)).unbind()
        normalised = (real(input) - mean - rest) * rstd
        weight, bias = per_channel(weight, input), per_channel(bias, input)
        return finish(normalised, weight, bias, residual, call.activation, call.negative_slope, input.dtype)

    def by_own_statistics(input: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        varied = {"input": input, "weight": weight, "bias": bias, "residual": residual}
        if call.groups:
            return call_by_name(group_norm, call, num_groups=call.groups, **varied)
        return call_by_name(batch_norm, call, running_mean=None, running_var=None, **varied)

    forward = by_own_statistics if call.training else by_given_statistics
    return gradients_of(
        forward, (call.input, call.weight, call.bias, call.residual), call.output_mask, call.grad_output
    )


_backward = torch.ops.myvision._batch_norm_backward.default
_first_backward = past_autograd(_backward)
register_fake(_fake_in_place, torch.ops.myvision._batch_norm_in_place.default)
register_fake(_fake_backward, _backward)
register_second_derivative(_backward, _gradients)
register_vmap(_backward)


# ---- the pieces of batch_norm for SyncBatchNorm ----------------------------------------------------------------------


def _fake_statistics(call: Any) -> Tensor:
    _check_images("batch_norm", call.input)
    return _new_statistics(call.input, 0)


def _fake_given(call: Any) -> Tensor:
    _check_call("batch_norm", call)
    check_statistics("batch_norm", call.statistics, _new_statistics(call.input, 0).shape, call.input)
    return dense_like(call.input)


def _fake_sums(call: Any) -> Tensor:
    _fake_given(call)
    check_like_input("batch_norm", "grad_output", call.grad_output, call.input)
    return call.input.new_empty((2, call.input.shape[1]), dtype=real_dtype(call.input))


def _fake_finish(call: Any) -> tuple[Tensor | None, ...]:
    wanted, sums = _fake_sums(call), call.sums
    check(
        "batch_norm",
        sums.shape == wanted.shape and sums.dtype == wanted.dtype and sums.device == wanted.device,
        lambda: (
            f"sums must be contiguous, of shape (2, {call.input.shape[1]}), and of the dtype and device of statistics"
        ),
    )
    check_output_mask("batch_norm", call.output_mask, 2)
    return tuple(dense_like(call.input) if wanted else None for wanted in call.output_mask)


_ops = torch.ops.myvision
register_fake(_fake_statistics, _ops._batch_norm_statistics.default)
register_fake(_fake_given, _ops._batch_norm_given.default)
register_fake(_fake_sums, _ops._batch_norm_sums.default)
register_fake(_fake_finish, _ops._batch_norm_finish.default)
