"""Attention: forward, backward, every option that costs its peer the fused kernel, decoding and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from myvision.ops import scaled_dot_product_attention

from .harness import (
    EAGER,
    FMA_PEAK,
    OURS,
    Bar,
    Case,
    Function,
    LimitCase,
    MemoryCase,
    Settings,
    TimeCase,
    can_measure_memory,
    output_and_gradients,
)

FORWARD = "attention forward"
BACKWARD = "attention forward + backward"
PEAK = "attention forward, full, L >= 512, beside the FMA peak"
CAUSAL = "attention causal beside full, L >= 512"
HALF_FORWARD = "attention forward, half types"
HALF_BACKWARD = "attention forward + backward, half types"
OPTIONS = "attention forward + backward, options"
DECODING = "attention, decoding"
MEMORY = "attention forward + backward, extra memory"
FULL = "myvision full"

HEADLINES = {FORWARD: (EAGER,), BACKWARD: (EAGER,)}

BARS = (
    Bar(FORWARD, EAGER, 1 / 1.8),
    Bar(PEAK, FMA_PEAK, 1 / 0.75, summary=max),
    Bar(BACKWARD, EAGER, 1 / 1.8),
    Bar(CAUSAL, FULL, 0.6),
    Bar(HALF_FORWARD, EAGER, 1 / 1.8),
    Bar(HALF_BACKWARD, EAGER, 1 / 9),
    Bar(OPTIONS, EAGER, 1 / 4),
    Bar(DECODING, EAGER, 1 / 2),
    Bar(MEMORY, None, 64),
)


@dataclass(frozen=True)
class Problem:
    """One call: makes the tensors, and the functions that ours and the peer run on them."""

    batch: int
    heads: int
    queries: int
    width: int
    device: torch.device
    keys: int | None = None  # None: as many as queries
    value_width: int | None = None  # None: width
    is_causal: bool = False
    dropout_p: float = 0.0
    mask_gradient: bool = False
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        keys = "" if self.keys is None else f" of {self.keys}"
        text = f"{self.batch}x{self.heads}x{self.queries}{keys}x{self.width}"
        text += ", causal" if self.is_causal else ""
        text += f", value width {self.value_width}" if self.value_width else ""
        text += ", dropout" if self.dropout_p else ""
        text += ", gradient of a mask" if self.mask_gradient else ""
        return text + ("" if self.dtype == torch.float32 else f", {str(self.dtype).removeprefix('torch.')}")

    @property
    def lengths(self) -> tuple[int, int]:
        return self.queries, self.keys or self.queries

    @property
    def flops(self) -> float:
        """Of the two products of forward; causal ones are half."""
        queries, keys = self.lengths
        full = 2 * self.batch * self.heads * queries * keys * (self.width + (self.value_width or self.width))
        return full / (2 if self.is_causal else 1)

    @property
    def moved_bytes(self) -> int:
        """Query, key, value and output, each once."""
        queries, keys = self.lengths
        numel = (queries + keys) * (self.width + (self.value_width or self.width))
        return self.batch * self.heads * numel * self.dtype.itemsize

    def tensors(self) -> list[Tensor]:
        """Query, key, value and, if its gradient is wanted, a mask."""
        torch.manual_seed(0)
        queries, keys = self.lengths
        shapes = [(queries, self.width), (keys, self.width), (keys, self.value_width or self.width)]
        tensors = [self._randn(self.batch, self.heads, *shape) for shape in shapes]
        return [*tensors, self._randn(queries, keys)] if self.mask_gradient else tensors

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def _functions(self, tensors: list[Tensor]) -> dict[str, Function]:
        options = {"dropout_p": self.dropout_p, "is_causal": self.is_causal}
        peers: dict[str, Callable[..., Tensor]] = {
            OURS: scaled_dot_product_attention,
            EAGER: F.scaled_dot_product_attention,
        }
        return {name: partial(function, *tensors, **options) for name, function in peers.items()}

    def forward(self) -> dict[str, Function]:
        return self._functions(self.tensors())

    def forward_backward(self) -> dict[str, Function]:
        return self._run_backward(_gradient)

    def output_and_gradients(self) -> dict[str, Any]:
        """For memory: what a call returns is not extra."""
        return self._run_backward(output_and_gradients)

    def _run_backward(self, run: Any) -> dict[str, Function]:
        tensors = [tensor.requires_grad_() for tensor in self.tensors()]
        grad_output = self._randn(self.batch, self.heads, self.queries, self.value_width or self.width)
        return {name: partial(run, call, tensors, grad_output) for name, call in self._functions(tensors).items()}

    def causal_beside_full(self) -> Mapping[str, Function]:
        return {OURS: replace(self, is_causal=True).forward()[OURS], FULL: self.forward()[OURS]}


def _gradient(function: Callable[[], Tensor], tensors: list[Tensor], grad_output: Tensor) -> Tensor:
    return torch.autograd.grad(function(), tensors, grad_output)[0]


SHAPES = ((8, 12, 197, 64), (1, 8, 1024, 64), (1, 8, 4096, 64), (2, 16, 512, 128), (1, 32, 256, 80))
QUICK_SHAPES = ((1, 2, 512, 16),)
DECODING_SHAPES = ((1, 32, 4096, 128), (8, 32, 1024, 128))
QUICK_DECODING_SHAPES = ((1, 2, 64, 16),)
LONG = 512  # from here on what a causal call skips counts
LONGEST_WITH_SCORES = 2048  # the peer keeps the scores of these calls: a gigabyte each beyond it
MEMORY_LENGTH, QUICK_MEMORY_LENGTH = 16384, 64


def cases(settings: Settings) -> Iterator[Case]:
    shapes = QUICK_SHAPES if settings.quick else SHAPES
    full = [Problem(*shape, settings.device) for shape in shapes]
    both = [replace(problem, is_causal=is_causal) for problem in full for is_causal in (False, True)]
    yield from map(_forward, both)
    for problem in full:
        if problem.queries >= LONG:
            yield LimitCase(_forward(problem, PEAK), FMA_PEAK)
    for problem in full:
        if problem.queries >= LONG:
            yield TimeCase(CAUSAL, str(problem), problem.causal_beside_full, problem.flops / 2)
    yield from map(_backward, both)
    halves = [replace(problem, dtype=dtype) for dtype in (torch.bfloat16, torch.float16) for problem in both]
    for problem in halves:
        yield _forward(problem, HALF_FORWARD)
    for problem in halves:
        yield _backward(problem, HALF_BACKWARD)
    options: tuple[dict[str, Any], ...] = ({"dropout_p": 0.1}, {"mask_gradient": True}, {"value_width": 32})
    for option in options:
        for problem in full:
            if problem.queries <= LONGEST_WITH_SCORES:
                yield _backward(replace(problem, **option), OPTIONS)
    for batch, heads, keys, width in QUICK_DECODING_SHAPES if settings.quick else DECODING_SHAPES:
        yield _forward(Problem(batch, heads, 1, width, settings.device, keys=keys), DECODING)
    if can_measure_memory(settings.device):
        length = QUICK_MEMORY_LENGTH if settings.quick else MEMORY_LENGTH
        large, small = (Problem(1, 1, n, 64, settings.device) for n in (length, QUICK_MEMORY_LENGTH))
        yield MemoryCase(MEMORY, str(large), large.output_and_gradients, small.output_and_gradients)


def _forward(problem: Problem, group: str = FORWARD) -> TimeCase:
    return TimeCase(group, str(problem), problem.forward, problem.flops, problem.moved_bytes)


def _backward(problem: Problem, group: str = BACKWARD) -> TimeCase:
    """Five products more, and every tensor and gradient once more."""
    flops, moved_bytes = 3.5 * problem.flops, 3 * problem.moved_bytes
    return TimeCase(group, str(problem), problem.forward_backward, flops, moved_bytes, mode=nullcontext)
