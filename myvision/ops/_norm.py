"""What the norms share: what they reject, the same as csrc/common/norm.h, and how autocast meets them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from myvision._checks import (
    check,
    check_floating,
    check_like,
    check_same_device,
    check_same_shape,
    check_shape,
    name_of,
)
from myvision._dispatch.autocast import register_autocast
from myvision._dispatch.tracing import is_tracing


def real_dtype(input: Tensor) -> torch.dtype:
    """The type that is computed in, and that statistics are kept in."""
    return torch.promote_types(input.dtype, torch.float32)


def default_rms_eps(input: Tensor) -> float:
    return torch.finfo(real_dtype(input)).eps


def check_parameter(op: str, name: str, tensor: Tensor | None, shape: Sequence[int], input: Tensor) -> None:
    """A weight or a bias, of any floating-point type: it is cast to the type computed in."""
    if tensor is None:
        return
    check_shape(op, name, tensor, shape)
    check_floating(op, name, tensor)
    check_same_device(op, name, tensor, input)


def check_channel_parameter(op: str, name: str, tensor: Tensor | None, input: Tensor) -> None:
    """The same of one number a channel of input.

    Where the numbers of channels differ it is the input that is told of, as the parameters belong to a model and so are
    seldom what is wrong.
    """
    if tensor is None:
        return
    if tensor.dim() == 1:
        check(
            op,
            tensor.shape[0] == input.shape[1],
            lambda: f"input must have {tensor.shape[0]} channels, as {name} has, but has shape {tuple(input.shape)}",
        )
    check_parameter(op, name, tensor, (input.shape[1],), input)


def check_like_input(op: str, name: str, tensor: Tensor | None, input: Tensor) -> None:
    """A residual or a gradient of the output must be like input."""
    if tensor is None:
        return
    check_same_shape(op, name, tensor, input)
    check_like(op, name, tensor, input)


def check_statistics(op: str, statistics: Tensor, shape: Sequence[int], input: Tensor) -> None:
    dtype = real_dtype(input)
    fits = statistics.dtype == dtype and statistics.dim() == len(shape) and statistics.is_contiguous()
    for size, wanted in zip(statistics.shape, shape, strict=False):
        fits = fits and size == wanted
    check(
        op,
        fits,
        lambda: (
            f"statistics must be contiguous {name_of(dtype)} of shape {tuple(shape)}, "
            f"but are {name_of(statistics.dtype)} of shape {tuple(statistics.shape)}"
        ),
    )
    check_same_device(op, "statistics", statistics, input)


def check_more_than_one(what: str, input: Tensor, sizes: Sequence[int]) -> None:
    """torch's own error where a mean would be taken of one value. A trace does not record it."""
    if input.dim() >= 2 and not is_tracing() and math.prod(sizes) == 1:
        raise ValueError(f"Expected more than 1 {what} when training, got input size {input.shape}")


def parameter_gradient(wanted: bool, parameter: Tensor | None, shape: Sequence[int], input: Tensor) -> Tensor | None:
    """An uninitialised gradient, of the parameter's dtype where there is one."""
    if not wanted:
        return None
    return input.new_empty(shape, dtype=real_dtype(input) if parameter is None else parameter.dtype)


def register_norm_autocast(op: torch._ops.OpOverload, promotes: bool = False) -> None:
    """Under autocast a norm runs in its input's dtype, to which the residual is cast.

    Args:
        op: the operator.
        promotes: input and residual are added first, and so take the wider of their dtypes.
    """

    def cast(call: Any, device_type: str) -> Iterable[Any]:
        if call.residual is None:
            return call
        dtype = torch.promote_types(call.input.dtype, call.residual.dtype) if promotes else call.input.dtype
        return call._replace(input=call.input.to(dtype), residual=call.residual.to(dtype))

    register_autocast(op, cast)
