"""Arguments of a wrong type are told by name, before anything is asked of them."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor


def check_tensor(name: str, value: object) -> None:
    """What stands in for a tensor, with ``__torch_function__``, is one too."""
    if not (isinstance(value, Tensor) or hasattr(value, "__torch_function__")):
        raise TypeError(f"{name} must be a tensor, but got {type(value).__name__}")


def check_tensors(op: str, required: dict[str, object], **optional: object) -> None:
    """Of an operator's arguments: the required ones are tensors, the others tensors or None, and none is nested."""
    given = {name: value for name, value in optional.items() if value is not None}
    for name, value in (required | given).items():
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
