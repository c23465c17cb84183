"""torch.vmap for operators, by one call an element."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def register_vmap(op: torch._ops.OpOverload) -> None:
    """torch.vmap calls the operator once for each element of the batch and stacks what it returns.

    Args:
        op: the operator, for example ``torch.ops.myvision.layer_norm.default``. A tensor that it writes to must be
            batched where another one is, or the call raises a RuntimeError.
    """
    mutated = [i for i, argument in enumerate(op._schema.arguments) if argument.is_write]

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        for i in mutated:
            if in_dims[i] is None:
                name = op._schema.arguments[i].name
                raise RuntimeError(f"{op.name()}: under vmap {name}, which is updated, must have the dimension too")
        results = [op(*map(_element, args, in_dims, [i] * len(args))) for i in range(info.batch_size)]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        stacked = tuple(None if parts[0] is None else torch.stack(parts) for parts in zip(*results, strict=True))
        return stacked, tuple(None if part is None else 0 for part in stacked)

    torch.library.register_vmap(op, rule)


def _element(arg: Any, dim: Any, index: int) -> Any:
    return arg.select(dim, index) if isinstance(dim, int) else arg
