"""What batch_norm, instance_norm and group_norm share: fakes, derivatives, autocast and vmap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from myvision._dispatch.autograd import register_autograd, register_second_derivative
from myvision._dispatch.vjp import gradients_of
from myvision._dispatch.vmap import register_vmap
from myvision._formulas._normalise import finish, per_channel, real
from myvision._formulas.batch_norm import batch_norm as batch_norm_reference
from myvision._formulas.group_norm import group_norm as group_norm_reference
from myvision._layout import dense_like
from myvision.ops._norm import (
    argument_positions,
    check,
    check_activation,
    check_channel_parameter,
    check_floating,
    check_like_input,
    check_mask,
    check_statistics,
    parameter_gradient,
    real_dtype,
    register_norm_autocast,
)

# ---- what the operators return, and what they reject: the same as csrc/ops/batch_norm/batch_norm.cpp -----------------


def check_call(
    op: str,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    num_groups: int | None = None,
) -> None:
    check_floating(op, "input", input)
    check(
        op,
        input.dim() >= 2,
        lambda: f"input must have at least 2 dimensions (batch, channels, ...), but has shape {tuple(input.shape)}",
    )
    channels = input.shape[1]
    if num_groups is not None:
        check(
            op,
            num_groups >= 1 and channels % num_groups == 0,
            lambda: f"num_groups must be a divisor of the number of channels, {channels}, but is {num_groups}",
        )
    check_channel_parameter(op, "weight", weight, input)
    check_channel_parameter(op, "bias", bias, input)
    check_like_input(op, "residual", residual, input)
    check_activation(op, activation)


def _check_running(op: str, mean: Tensor | None, var: Tensor | None, input: Tensor, eps: float) -> None:
    """eps is taken as torch's own functions take it: batch_norm alone refuses what is negative."""
    check(op, op != "batch_norm" or eps >= 0, lambda: f"eps must be at least 0, but is {eps:g}")
    check(
        op,
        (mean is None) == (var is None),
        lambda: (
            f"running_mean and running_var go together, but {'running_mean' if mean is None else 'running_var'} is None"
        ),
    )
    check_channel_parameter(op, "running_mean", mean, input)
    check_channel_parameter(op, "running_var", var, input)


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


def running_fakes(op: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The fakes of batch_norm or instance_norm, without update and with it. Each returns the statistics too."""

    def pure(
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        eps: float,
        activation: str | None,
        negative_slope: float,
    ) -> tuple[Tensor, Tensor]:
        check_call(op, input, weight, bias, residual, activation)
        _check_running(op, running_mean, running_var, input, eps)
        if running_mean is None:
            _check_own_statistics(op, input, _others(op, input, 0))
        own_instances = op == "instance_norm" and running_mean is None
        return dense_like(input), _new_statistics(input, input.shape[1] if own_instances else 0)

    def update(
        input: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        momentum: float,
        eps: float,
        activation: str | None,
        negative_slope: float,
    ) -> tuple[Tensor, Tensor]:
        check_call(op, input, weight, bias, residual, activation)
        _check_running(op, running_mean, running_var, input, eps)
        _check_updated(op, "running_mean", running_mean)
        _check_updated(op, "running_var", running_var)
        _check_own_statistics(op, input, _others(op, input, 0))
        return dense_like(input), _new_statistics(input, input.shape[1] if op == "instance_norm" else 0)

    return pure, update


def fake_group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    activation: str | None,
    negative_slope: float,
) -> tuple[Tensor, Tensor]:
    check_call("group_norm", input, weight, bias, residual, activation, num_groups)
    _check_own_statistics("group_norm", input, num_groups)
    return dense_like(input), _new_statistics(input, num_groups)


def _fake_backward(
    grad_output: Tensor,
    input: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    groups: int,
    training: bool,
    eps: float,
    activation: str | None,
    negative_slope: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    op = "group_norm" if groups else "batch_norm"
    check_call(op, input, weight, bias, residual, activation, groups or None)
    check_statistics(op, statistics, _new_statistics(input, groups).shape, input)
    check_mask(op, output_mask, 4)
    check_like_input(op, "grad_output", grad_output, input)
    channels = (input.shape[1],)
    return (
        dense_like(input) if output_mask[0] else None,
        parameter_gradient(output_mask[1], weight, channels, input),
        parameter_gradient(output_mask[2], bias, channels, input),
        dense_like(input) if output_mask[3] else None,
    )


# ---- derivatives: the first by the fused kernel, the others through the reference ------------------------------------


def register(
    op: torch._ops.OpOverload,
    forward: torch._ops.OpOverload,
    fake: Callable[..., tuple[Tensor, Tensor]],
    reference: Callable[..., Tensor],
    groups: Callable[[tuple[Any, ...]], int],
) -> None:
    """Gives an operator its fake, derivatives, autocast and vmap.

    Args:
        op: the operator.
        forward: the one that returns the statistics too.
        fake: of both.
        reference: the same in plain torch.
        groups: into how many groups the arguments divide an image's channels; 0: a channel of the whole batch is one.
    """
    weight, bias, residual, eps, activation, negative_slope = argument_positions(
        op, "weight", "bias", "residual", "eps", "activation", "negative_slope"
    )
    may_run = op._schema.arguments[1].name == "running_mean" and not op._schema.arguments[1].is_write

    def setup_context(ctx: Any, inputs: tuple[Any, ...], results: tuple[Tensor, Tensor]) -> None:
        if any(ctx.needs_input_grad[1:weight]):
            raise RuntimeError(f"{op._schema.name}: running_mean and running_var have no gradient: detach them")
        ctx.training = not (may_run and inputs[1] is not None)
        ctx.groups = groups(inputs) if ctx.training else 0
        ctx.constants = inputs[eps], inputs[activation], inputs[negative_slope]
        needed_residual = None if inputs[activation] is None else inputs[residual]  # what the activation was given
        ctx.save_for_backward(inputs[0], results[1], inputs[weight], inputs[bias], needed_residual)

    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad
        through_activation = ctx.constants[1] is not None
        wanted = [needs[0], needs[weight], needs[bias], needs[residual] and through_activation]
        gradients: list[Tensor | None] = [None] * len(needs)
        gradients[0], gradients[weight], gradients[bias], gradients[residual] = _backward(
            grad_output, *ctx.saved_tensors, ctx.groups, ctx.training, *ctx.constants, wanted
        )
        if needs[residual] and not through_activation:
            gradients[residual] = grad_output
        return tuple(gradients)

    torch.library.register_fake(op, lambda *args: fake(*args)[0])
    torch.library.register_fake(forward, fake)
    register_autograd(op, setup_context, backward, composite=reference, forward=forward)
    register_norm_autocast(op)
    register_vmap(op)
    register_vmap(forward)


def _gradients(
    grad_output: Tensor,
    input: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    groups: int,
    training: bool,
    eps: float,
    activation: str | None,
    negative_slope: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """What the backward operator returns; statistics of the input's own are computed anew, as they depend on it."""

    def forward(input: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        if not training:
            mean, rest, rstd = statistics.reshape(3, -1, *[1] * (input.dim() - 2)).unbind()
            normalised = (real(input) - mean - rest) * rstd
            weight, bias = per_channel(weight, input), per_channel(bias, input)
            return finish(normalised, weight, bias, residual, activation, negative_slope, input.dtype)
        affine = weight, bias, residual, eps, activation, negative_slope
        if groups:
            return group_norm_reference(input, groups, *affine)
        return batch_norm_reference(input, None, None, *affine)

    return gradients_of(forward, (input, weight, bias, residual), output_mask, grad_output)


_backward = torch.ops.myvision._batch_norm_backward.default
torch.library.register_fake(_backward, _fake_backward)
register_second_derivative(_backward, _gradients)
register_vmap(_backward)


# ---- the pieces of batch_norm for SyncBatchNorm ----------------------------------------------------------------------


def _fake_statistics(input: Tensor) -> Tensor:
    check_call("batch_norm", input, None, None, None, None)
    return _new_statistics(input, 0)


def _fake_given(
    input: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    negative_slope: float,
) -> Tensor:
    check_call("batch_norm", input, weight, bias, residual, activation)
    check_statistics("batch_norm", statistics, _new_statistics(input, 0).shape, input)
    return dense_like(input)


def _fake_sums(
    grad_output: Tensor,
    input: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    negative_slope: float,
) -> Tensor:
    _fake_given(input, statistics, weight, bias, residual, activation, negative_slope)
    check_like_input("batch_norm", "grad_output", grad_output, input)
    return input.new_empty((2, input.shape[1]), dtype=real_dtype(input))


def _fake_finish(
    grad_output: Tensor,
    input: Tensor,
    statistics: Tensor,
    sums: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    negative_slope: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    wanted_sums = _fake_sums(grad_output, input, statistics, weight, bias, residual, activation, negative_slope)
    check(
        "batch_norm",
        sums.shape == wanted_sums.shape and sums.dtype == wanted_sums.dtype and sums.device == input.device,
        lambda: f"sums must be contiguous, of shape (2, {input.shape[1]}), and of the dtype and device of statistics",
    )
    check_mask("batch_norm", output_mask, 2)
    return tuple(dense_like(input) if wanted else None for wanted in output_mask)


torch.library.register_fake("myvision::_batch_norm_statistics", _fake_statistics)
torch.library.register_fake("myvision::_batch_norm_given", _fake_given)
torch.library.register_fake("myvision::_batch_norm_sums", _fake_sums)
torch.library.register_fake("myvision::_batch_norm_finish", _fake_finish)
