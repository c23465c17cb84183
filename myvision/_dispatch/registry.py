"""What torch's dispatcher knows of operators."""

from __future__ import annotations

import torch


def operator_names(namespace: str) -> list[str]:
    """The names without namespace, with that of an overload if it has one (batch_norm.update), sorted."""
    qualified: list[str] = torch._C._dispatch_get_all_op_names()
    return sorted(name.partition("::")[2] for name in qualified if name.startswith(f"{namespace}::"))


def has_kernel(name: str, dispatch_key: str) -> bool:
    """Whether an operator, such as "myvision::my_add", is implemented for a dispatch key, such as "CPU"."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, dispatch_key)
