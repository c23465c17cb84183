"""my_add: 2 * x + y."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from myvision._broadcast import MAX_DIMS, broadcastable, empty_broadcast
from myvision._dispatch.autograd import register_autograd

_DTYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
}
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
        RuntimeError: the shapes do not broadcast, the devices differ, both are bool, or a type is not among float64,
            float32, float16, bfloat16, int64, int32, int16, int8, uint8 and bool.

    Example:
        >>> import torch, myvision
        >>> myvision.ops.my_add(torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0]))
        tensor([12., 24.])
    """
    output: Tensor = _op(x, y)
    return output


def _fake(x: Tensor, y: Tensor) -> Tensor:
    torch._check(
        x.device == y.device,
        lambda: f"my_add: x and y must be on one device, got x on {x.device} and y on {y.device}",
    )
    dtype = torch.result_type(x, y)
    torch._check(
        dtype in _DTYPES and x.dtype in _DTYPES | {torch.bool} and y.dtype in _DTYPES | {torch.bool},
        lambda: f"my_add: x and y must be of floating-point or integer types, got x of {x.dtype} and y of {y.dtype}",
    )
    torch._check(
        max(x.dim(), y.dim()) <= MAX_DIMS,
        lambda: f"my_add: x and y may have at most {MAX_DIMS} dimensions, got {x.dim()} and {y.dim()}",
    )
    torch._check(
        broadcastable(x, y),
        lambda: f"my_add: the shapes of x and y do not broadcast: {tuple(x.shape)} and {tuple(y.shape)}",
    )
    return empty_broadcast(x.to(dtype), y.to(dtype))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, y = inputs
    ctx.x_shape, ctx.x_dtype, ctx.y_shape, ctx.y_dtype = x.shape, x.dtype, y.shape, y.dtype
    ctx.device = x.device


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


def _vmap(info: Any, in_dims: tuple[int | None, int | None], x: Tensor, y: Tensor) -> tuple[Tensor, int]:
    x_dims, y_dims = (t.dim() - (dim is not None) for t, dim in zip((x, y), in_dims, strict=True))
    dtype = torch.result_type(_like(x, x_dims), _like(y, y_dims))
    dims = max(x_dims, y_dims)
    return my_add(_batch_first(x, in_dims[0], dims).to(dtype), _batch_first(y, in_dims[1], dims).to(dtype)), 0


def _like(tensor: Tensor, dims: int) -> Tensor:
    """What torch.result_type sees of a tensor of so many dimensions."""
    return torch.empty([1] * dims, dtype=tensor.dtype, device="meta")


def _batch_first(tensor: Tensor, batch_dim: int | None, dims: int) -> Tensor:
    if batch_dim is None:
        return tensor
    tensor = tensor.movedim(batch_dim, 0)
    missing = dims + 1 - tensor.dim()
    return tensor.reshape(tensor.shape[0], *[1] * missing, *tensor.shape[1:])


torch.library.register_fake("myvision::my_add", _fake)
torch.library.register_vmap("myvision::my_add", _vmap)
register_autograd(_op, _setup_context, _backward, _jvp)
