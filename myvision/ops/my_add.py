"""my_add: 2 * x + y."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from myvision._checks import check_tensors
from myvision._dispatch.autograd import register_autograd
from myvision._elementwise import Elementwise

_op = torch.ops.myvision.my_add.default


def my_add(x: Tensor, y: Tensor) -> Tensor:
    """Computes ``2 * x + y`` in one pass over memory.

    Shapes are broadcast, types promoted and memory formats kept as in ``torch.add(y, x, alpha=2)``, under autocast too.
    float16 and bfloat16 are computed in float32 and rounded once; integers wrap around.

    Args:
        x: a tensor of any shape, of a floating-point or integer type; bool becomes the type of ``y``.
        y: a tensor whose shape broadcasts with that of ``x``, on the same device; types as for ``x``.

    Returns:
        A tensor of the broadcast shape and of the type ``torch.result_type(x, y)``.

    Raises:
        TypeError: ``x`` or ``y`` is no tensor.
        RuntimeError: the shapes do not broadcast, the devices differ, both are bool, or a type is not among float64,
            float32, float16, bfloat16, int64, int32, int16, int8, uint8 and bool.

    Example:
        >>> import torch, myvision
        >>> myvision.ops.my_add(torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0]))
        tensor([12., 24.])
    """
    try:
        output: Tensor = _op(x, y)
    except RuntimeError:
        check_tensors("my_add", {"x": x, "y": y})
        raise
    return output


def _setup_context(ctx: Any, call: Any, output: Tensor) -> None:
    ctx.x_shape, ctx.x_dtype = call.x.shape, call.x.dtype
    ctx.y_shape, ctx.y_dtype = call.y.shape, call.y.dtype
    ctx.device = call.x.device


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    needs_x, needs_y = ctx.needs_input_grad
    grad_x = 2 * grad.sum_to_size(ctx.x_shape).to(ctx.x_dtype) if needs_x else None
    grad_y = grad.sum_to_size(ctx.y_shape).to(ctx.y_dtype) if needs_y else None
    return grad_x, grad_y


def _jvp(ctx: Any, x: Tensor | None, y: Tensor | None) -> Tensor:
    if x is None:  # an integer tensor has no tangent
        x = torch.zeros(ctx.x_shape, dtype=ctx.x_dtype, device=ctx.device)
    if y is None:
        y = torch.zeros(ctx.y_shape, dtype=ctx.y_dtype, device=ctx.device)
    return my_add(x, y)


_DTYPES = Elementwise(_op, integers=True, leader="y").dtypes
register_autograd(_op, _setup_context, _backward, _jvp)
