"""torch.vmap for operators, by one call an element unless the operator knows better."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from myvision._dispatch.arguments import arguments_of

Rule = Callable[[int, Any, Any], Any]


def register_vmap(op: torch._ops.OpOverload, whole: Rule | None = None) -> None:
    """torch.vmap calls the operator once for each element of the batch and stacks what it returns.

    Args:
        op: the operator, for example ``torch.ops.myvision.layer_norm.default``. A tensor that it writes to must be
            batched where another one is, or the call raises a RuntimeError.
        whole: ``whole(batch_size, in_dims, arguments)``, both by name, returns the results of one call for the whole
            batch, and their dimensions, or None where it takes one call an element.
    """
    arguments = arguments_of(op)
    mutated = [i for i, argument in enumerate(op._schema.arguments) if argument.is_write]

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        for i in mutated:
            if in_dims[i] is None:
                name = op._schema.arguments[i].name
                raise RuntimeError(f"{op.name()}: under vmap {name}, which is updated, must have the dimension too")
        if whole and (together := whole(info.batch_size, arguments(*in_dims), arguments(*args))):
            return together
        results = [op(*map(_element, args, in_dims, [i] * len(args))) for i in range(info.batch_size)]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        stacked = tuple(None if parts[0] is None else torch.stack(parts) for parts in zip(*results, strict=True))
        return stacked, tuple(None if part is None else 0 for part in stacked)

    torch.library.register_vmap(op, rule)


def batch_first(arg: Any, dim: int | None, batch_size: int) -> Any:
    """A tensor with the dimension in front, repeated along it where it has none; None as it is."""
    if arg is None:
        return None
    return arg.expand(batch_size, *arg.shape) if dim is None else arg.movedim(dim, 0)


def _element(arg: Any, dim: Any, index: int) -> Any:
    return arg.select(dim, index) if isinstance(dim, int) else arg
