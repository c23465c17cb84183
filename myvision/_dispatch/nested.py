"""Nested tensors for operators that work on rows of the last dimensions: on those of all components at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Rows = Callable[[Tensor, Tensor | None], Tensor]


def is_nested(value: Any) -> bool:
    return getattr(value, "is_nested", False) is True  # of a torch.fx.Proxy it is another proxy


def on_nested_rows(
    op: str, function: Rows, input: Tensor, residual: Tensor | None, row_dims: int, rows: str = "normalized_shape"
) -> Tensor:
    """Calls ``function(input, residual)`` on the components of nested tensors and returns the same kind of nested one.

    Args:
        op: the operator's name, for messages.
        function: of dense tensors; it treats each row by itself and keeps the dimensions before those of a row.
        input: a nested tensor, jagged or strided.
        residual: one of the same components, or None.
        row_dims: so many last dimensions are a row.
        rows: what says so, for messages.

    Raises:
        RuntimeError: the residual is not nested in the same way, or a row's length differs between components.
    """
    if residual is not None and not (is_nested(residual) and residual.layout == input.layout):
        raise RuntimeError(f"{op}: residual must be a nested tensor as input is, with the layout {input.layout}")
    if input.layout == torch.strided:
        return _on_strided(op, function, input, residual)
    return _on_jagged(op, function, input, residual, row_dims, rows)


def _on_jagged(op: str, function: Rows, input: Any, residual: Any, row_dims: int, rows: str) -> Tensor:
    ragged = input._ragged_idx
    if ragged >= input.dim() - row_dims:
        raise RuntimeError(f"{op}: {rows} must be dimensions of one size, but dimension {ragged} is ragged")
    if residual is not None and residual.shape[:-row_dims] != input.shape[:-row_dims]:
        raise RuntimeError(
            f"{op}: residual must have the components of input, {input.shape}, but has shape {residual.shape}"
        )
    values = function(input.values(), None if residual is None else residual.values())
    return torch.nested.nested_tensor_from_jagged(values, input.offsets(), input.lengths(), jagged_dim=ragged)


def _on_strided(op: str, function: Rows, input: Tensor, residual: Tensor | None) -> Tensor:
    components = input.unbind()
    residuals = [None] * len(components) if residual is None else residual.unbind()
    if len(residuals) != len(components):
        raise RuntimeError(
            f"{op}: residual must have as many components as input, {len(components)}, but has {len(residuals)}"
        )
    outputs = [function(*pair) for pair in zip(components, residuals, strict=True)]
    return torch.nested.as_nested_tensor(outputs, layout=torch.strided)
