"""The checks of arguments that several operators make, each telling the argument, what it got and what it wants.

First those of the functions, which tell arguments of a wrong type before anything is asked of them, then those of the
fakes, which csrc/common/checks.h makes in the same words for the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
ACTIVATIONS = ("relu", "leaky_relu", "silu", "gelu", "gelu_tanh", "hardswish")


def check_tensor(name: str, value: object) -> None:
    """What stands in for a tensor, with ``__torch_function__``, is one too."""
    if not (isinstance(value, Tensor) or hasattr(value, "__torch_function__")):
        raise TypeError(f"{name} must be a tensor, but got {type(value).__name__}")


def check_tensors(op: str, required: Mapping[str, object], **optional: object) -> None:
    """Of an operator's arguments: the required ones are tensors, the others tensors or None, and none is nested."""
    given = {name: value for name, value in optional.items() if value is not None}
    for name, value in {**required, **given}.items():
        check_tensor(f"{op}: {name}", value)
        if getattr(value, "is_nested", False) is True:  # of a torch.fx.Proxy it is another proxy
            raise RuntimeError(f"{op}: {name} must be a dense tensor, but is a nested one")


def check_number(name: str, value: object) -> None:
    if not isinstance(value, (Real, torch.SymInt, torch.SymFloat, Tensor)):
        raise TypeError(f"{name} must be a number, but got {type(value).__name__}")


def is_integer(value: object) -> bool:
    """In graphs symbolic, or a tensor as under torch.jit.trace; of what the operators' int64 holds."""
    if isinstance(value, Integral):
        return -(2**63) <= value < 2**63  # type: ignore[operator]
    return isinstance(value, (torch.SymInt, Tensor))


def pair(value: int | Iterable[int]) -> Any:
    """One number for both dimensions, or what is given for each; whether these are two is for the operator to say."""
    return tuple(value) if isinstance(value, Iterable) else (value, value)


# ---- the checks of the fakes -----------------------------------------------------------------------------------------


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check(op: str, holds: Any, message: Callable[[], str]) -> None:
    torch._check(holds, lambda: f"{op}: {message()}")


def check_floating(op: str, name: str, tensor: Tensor) -> None:
    check(
        op,
        tensor.dtype in FLOATING,
        lambda: f"{name} must have dtype float64, float32, float16 or bfloat16, but has {name_of(tensor.dtype)}",
    )


def check_shape(op: str, name: str, tensor: Tensor, shape: Sequence[int], layout: str = "") -> None:
    """`layout` names the dimensions."""
    wanted = f"shape {{}} ({layout})" if layout else "shape {}"
    _check_sizes(op, name, tensor, shape, wanted)


def check_same_shape(op: str, name: str, tensor: Tensor, like: Tensor, like_name: str = "input") -> None:
    _check_sizes(op, name, tensor, like.shape, f"the shape of {like_name}, {{}}")


def _check_sizes(op: str, name: str, tensor: Tensor, shape: Sequence[int], wanted: str) -> None:
    def message() -> str:
        return f"{name} must have {wanted.format(tuple(shape))}, but has shape {tuple(tensor.shape)}"

    check(op, tensor.dim() == len(shape), message)
    for size, wanted_size in zip(tensor.shape, shape, strict=True):
        check(op, size == wanted_size, message)


def check_same_dtype(op: str, name: str, tensor: Tensor, like: Tensor, like_name: str = "input") -> None:
    check(
        op,
        tensor.dtype == like.dtype,
        lambda: f"{name} must have the dtype of {like_name}, {name_of(like.dtype)}, but has {name_of(tensor.dtype)}",
    )


def check_same_device(op: str, name: str, tensor: Tensor, like: Tensor, like_name: str = "input") -> None:
    check(
        op,
        tensor.device == like.device,
        lambda: f"{name} must be on the device of {like_name}, {like.device}, but is on {tensor.device}",
    )


def check_like(op: str, name: str, tensor: Tensor, like: Tensor, like_name: str = "input") -> None:
    check_same_dtype(op, name, tensor, like, like_name)
    check_same_device(op, name, tensor, like, like_name)


def check_output_mask(op: str, output_mask: Sequence[bool], gradients: int) -> None:
    """The output mask of a backward operator says of each gradient whether it is wanted."""
    check(
        op,
        len(output_mask) == gradients,
        lambda: f"output_mask must have {gradients} elements, but has {len(output_mask)}",
    )


def check_activation(op: str, activation: str | None) -> None:
    check(
        op,
        activation is None or activation in ACTIVATIONS,
        lambda: f"activation must be one of None, {', '.join(map(repr, ACTIVATIONS))}, but is {activation!r}",
    )
