"""my_add: 2 * x + y."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from myvision._autograd import register_autograd

_op = torch.ops.myvision.my_add.default


def my_add(x: Tensor, y: Tensor) -> Tensor:
    """Computes ``2 * x + y`` in one pass over memory.

    Everything is as in ``torch.add(y, x, alpha=2)``: shapes are broadcast, types promoted, memory formats kept.
    float16 and bfloat16 are computed in float32 and rounded once; integers wrap around.

    Args:
        x: a tensor of any shape, of a floating-point or integer type. bool is promoted to the type of ``y``.
        y: a tensor on the same device, whose shape broadcasts with that of ``x``.

    Returns:
        A tensor of the broadcast shape and of the type ``torch.result_type(x, y)``.

    Raises:
        RuntimeError: the shapes do not broadcast, the devices differ, a type is complex or quantised, or both are bool.

    Example:
        >>> my_add(torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0]))
        tensor([12., 24.])
    """
    return _op(x, y)


@torch.library.register_fake("myvision::my_add")
def _fake(x: Tensor, y: Tensor) -> Tensor:
    return torch.add(y, x, alpha=2)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.x_shape, ctx.y_shape = (tensor.shape for tensor in inputs)
    ctx.x_dtype, ctx.y_dtype = (tensor.dtype for tensor in inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    needs_x, needs_y = ctx.needs_input_grad
    grad_x = (2 * grad).sum_to_size(ctx.x_shape).to(ctx.x_dtype) if needs_x else None
    grad_y = grad.sum_to_size(ctx.y_shape).to(ctx.y_dtype) if needs_y else None
    return grad_x, grad_y


def _jvp(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
    return my_add(x, y)


register_autograd(_op, _setup_context, _backward, _jvp)
