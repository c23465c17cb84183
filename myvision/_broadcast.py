"""The output of a pointwise operator of two tensors, for fakes: csrc/common/broadcast.h in Python."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MAX_DIMS = 64


def broadcastable(x: Tensor, y: Tensor) -> bool:
    sizes = zip(reversed(x.shape), reversed(y.shape), strict=False)
    return all(x_size == y_size or x_size == 1 or y_size == 1 for x_size, y_size in sizes)


def empty_broadcast(x: Tensor, y: Tensor) -> Tensor:
    """An uninitialised tensor of the type of ``x``, with the shape and strides of ``torch.add(y, x)``."""
    shape = torch.broadcast_shapes(x.shape, y.shape)
    if x.dim() == y.dim() and x.shape == y.shape:
        for memory_format in (torch.contiguous_format, torch.channels_last):
            if all(operand.is_contiguous(memory_format=memory_format) for operand in (x, y)):
                return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_format)
        if x.stride() == y.stride() and _is_dense(x):
            return x.new_empty_strided(shape, x.stride())
    order = _sort_by_stride(shape, [_broadcast_strides(operand, shape) for operand in (y, x)])
    if order == list(reversed(range(len(shape)))):
        return x.new_empty(shape)
    return x.new_empty_strided(shape, _packed_strides(shape, order))


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(
        (stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def _broadcast_strides(operand: Tensor, shape: Sequence[int]) -> list[int]:
    missing = len(shape) - operand.dim()
    own = zip(operand.shape, operand.stride(), shape[missing:], strict=True)
    return [0] * missing + [stride if size == broadcast_size else 0 for size, stride, broadcast_size in own]


def _sort_by_stride(shape: Sequence[int], strides: list[list[int]]) -> list[int]:
    """The dimensions, innermost first. Pairs that the strides do not decide stay as they are and are passed over."""
    order = list(reversed(range(len(shape))))
    for start in range(1, len(order)):
        at = start
        for below in reversed(range(start)):
            comparison = _compare(shape, strides, order[below], order[at])
            if comparison < 0:
                break
            if comparison > 0:
                order[below], order[at] = order[at], order[below]
                at = below
    return order


def _compare(shape: Sequence[int], strides: list[list[int]], inner: int, outer: int) -> int:
    for stride in strides:
        if stride[inner] == 0 or stride[outer] == 0:
            continue
        if stride[inner] != stride[outer]:
            return -1 if stride[inner] < stride[outer] else 1
        if shape[inner] > shape[outer]:
            return 1
    return 0


def _packed_strides(shape: Sequence[int], order: list[int]) -> list[int]:
    strides = [0] * len(shape)
    stride = 1
    for dim in order:
        strides[dim] = stride
        stride *= shape[dim]
    return strides
