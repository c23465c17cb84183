"""Autocast for operators: their floating-point tensors take autocast's dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from myvision._dispatch.arguments import arguments_of

_libraries: list[torch.library.Library] = []  # a registration lives as long as its Library


Cast = Callable[[Any, str], Iterable[Any]]


def register_autocast(op: torch._ops.OpOverload, cast: Cast | None = None) -> None:
    """Under ``torch.autocast`` the operator runs in autocast's dtype.

    Floating-point tensors of another dtype are cast, so mixed inputs agree; float64 and integer tensors are left alone.

    Args:
        op: the operator, for example ``torch.ops.myvision.deform_conv2d.default``.
        cast: ``cast(arguments, device_type)`` gets the arguments by name, a tuple of ``arguments_of(op)``, and returns
            those to run with instead.
    """
    library = torch.library.Library(op.namespace, "IMPL")
    for device_type in ("cpu", "cuda"):
        library.impl(
            op, _autocast_kernel(op, device_type, cast or _to_autocast_dtype), f"Autocast{device_type.upper()}"
        )
    _libraries.append(library)


def _autocast_kernel(op: torch._ops.OpOverload, device_type: str, cast: Cast) -> Callable[..., Any]:
    arguments = arguments_of(op)

    def kernel(*args: Any) -> Any:
        args = tuple(cast(arguments._make(args), device_type))
        torch.set_autocast_enabled(device_type, False)
        try:
            return op(*args)
        finally:
            torch.set_autocast_enabled(device_type, True)

    return kernel


def _to_autocast_dtype(args: Any, device_type: str) -> Iterable[Any]:
    dtype = torch.get_autocast_dtype(device_type)
    return (cast_to(arg, dtype, device_type) for arg in args)


def cast_to(arg: Any, dtype: torch.dtype, device_type: str) -> Any:
    """A floating-point tensor of this device in another dtype, unless it is float64; anything else as it is."""
    castable = (
        isinstance(arg, torch.Tensor)
        and arg.is_floating_point()
        and arg.dtype not in (torch.float64, dtype)
        and arg.device.type == device_type
    )
    return arg.to(dtype) if castable else arg
