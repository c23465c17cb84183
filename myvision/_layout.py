"""Memory layouts of images, as the operators choose them: the same as csrc/common."""

from __future__ import annotations

import torch
from torch import Tensor


def is_channels_last(tensor: Tensor) -> bool:
    """Whether the strides of 4 or 5 dimensions say channels_last, by the rule of torch's own operators.

    Slices count; what is contiguous as well does not.
    """
    if tensor.dim() not in (4, 5) or tensor.stride(1) == 0:
        return False
    least = 0  # stride of the next dimension outwards
    for dim in (1, *range(tensor.dim() - 1, 1, -1), 0):
        size, stride = tensor.shape[dim], tensor.stride(dim)
        if size == 0 or stride < least or (dim == 0 and least == tensor.stride(1)):
            return False
        least = stride * size
    return True


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is contiguous or channels_last, with nothing between its numbers."""
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.is_contiguous() or (is_channels_last(tensor) and span == tensor.numel())


def dense_like(tensor: Tensor) -> Tensor:
    """An uninitialised tensor of the shape and type: channels_last where that one is, contiguous otherwise."""
    if not is_channels_last(tensor):
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)
    return torch.empty_like(tensor, memory_format=torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d)
