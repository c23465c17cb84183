"""my_add: the memory's limit on large tensors, the cost of a call on small ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial

import torch

from myvision.ops import my_add

from .harness import OURS, Bar, Case, Function, Settings, TimeCase

LARGE = "my_add, large"
INFERENCE = "my_add, one small call in inference mode"
WITH_GRAD = "my_add, one small call with grad"
TORCH_ADD = "torch.add(alpha=2)"
TWO_OPS = "2*x + y"

BARS = (
    Bar(LARGE, TORCH_ADD, 1.05, summary=max),
    Bar(LARGE, TWO_OPS, 0.6, summary=max),
    Bar(INFERENCE, TORCH_ADD, 2),
    Bar(WITH_GRAD, TORCH_ADD, 4.5),
)


def cases(settings: Settings) -> Iterator[Case]:
    """1M to 64M floats, then 64 floats with and without autograd."""
    for millions in (1,) if settings.quick else (1, 4, 16, 64):
        size = millions << 20
        yield TimeCase(
            LARGE,
            f"{millions}M floats",
            partial(_functions, size, settings.device),
            flops=2 * size,
            moved_bytes=12 * size,
        )
    calls = 100 if settings.quick else 2000
    small = partial(_functions, 64, settings.device)
    yield TimeCase(INFERENCE, "64 floats", small, calls=calls, mode=torch.inference_mode)
    small_with_grad = partial(_functions, 64, settings.device, requires_grad=True)
    yield TimeCase(WITH_GRAD, "64 floats", small_with_grad, calls=calls, mode=nullcontext)


def _functions(size: int, device: torch.device, requires_grad: bool = False) -> Mapping[str, Function]:
    x, y = (torch.randn(size, device=device, requires_grad=requires_grad) for _ in range(2))
    return {
        OURS: partial(my_add, x, y),
        TORCH_ADD: partial(torch.add, y, x, alpha=2),
        TWO_OPS: lambda: 2 * x + y,
    }
