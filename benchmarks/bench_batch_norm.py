"""batch_norm and instance_norm: what a residual block spends on them, beside eager and compiled torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from myvision.ops import batch_norm, instance_norm

from .harness import COMPILED, EAGER, Bar, Case, Function, Settings, TimeCase, beside_torch

EVAL = "batch_norm + add + relu, evaluation"
TRAINING = "batch_norm + add + relu, training, forward + backward"
INSTANCE = "instance_norm + relu, forward + backward"
HALF = "bfloat16, "

HEADLINES = {EVAL: (EAGER, COMPILED), TRAINING: (EAGER, COMPILED)}

# Of each group: how many times the speed of eager and of compiled torch.
SPEEDUPS = {
    EVAL: (2.0, 1.0),
    TRAINING: (2.0, 1.5),
    INSTANCE: (4.0, 2.0),
    **{HALF + group: (2.0, 1.2) for group in (EVAL, TRAINING, INSTANCE)},
}
BARS = tuple(
    Bar(group, peer, 1 / speedup)
    for group, speedups in SPEEDUPS.items()
    for peer, speedup in zip((EAGER, COMPILED), speedups, strict=True)
)

BATCH_SHAPES = ((8, 64, 56, 56), (16, 256, 28, 28), (32, 512, 7, 7), (2, 64, 224, 224))
INSTANCE_SHAPES = ((2, 64, 64, 64), (1, 32, 256, 256))
QUICK_SHAPE = (2, 16, 14, 14)
FORMATS = (torch.contiguous_format, torch.channels_last)


def cases(settings: Settings) -> Iterator[Case]:
    """Every shape in both memory formats, in float32 and in bfloat16."""
    for dtype, prefix in ((torch.float32, ""), (torch.bfloat16, HALF)):
        for group in (EVAL, TRAINING, INSTANCE):
            shapes = INSTANCE_SHAPES if group == INSTANCE else BATCH_SHAPES
            for memory_format in FORMATS:
                for shape in (QUICK_SHAPE,) if settings.quick else shapes:
                    yield Problem(shape, dtype, memory_format, settings.device).case(prefix, group)


@dataclass(frozen=True)
class Problem:
    """One normalisation with relu; that of a batch adds a residual before."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    memory_format: torch.memory_format
    device: torch.device

    def __str__(self) -> str:
        return "x".join(map(str, self.shape)) + (", channels_last" if self.memory_format == torch.channels_last else "")

    def case(self, prefix: str, group: str) -> Case:
        # Forward reads input and residual and writes the output. Backward reads the gradient too, and writes those of
        # input and residual.
        tensors = {EVAL: 3, TRAINING: 3 + 5, INSTANCE: 2 + 3}[group]
        moved_bytes = tensors * torch.Size(self.shape).numel() * self.dtype.itemsize
        if group == EVAL:
            return TimeCase(prefix + group, str(self), self.evaluation, moved_bytes=moved_bytes)
        prepare = partial(self.forward_backward, group)
        return TimeCase(prefix + group, str(self), prepare, moved_bytes=moved_bytes, mode=nullcontext)

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Input, weight, bias, residual; running mean and variance."""
        torch.manual_seed(0)
        channels = self.shape[1]
        input, residual = (self._randn() for _ in range(2))
        weight, bias, mean = (torch.randn(channels, device=self.device) for _ in range(3))
        return [input, weight, bias, residual], [mean, torch.ones_like(mean)]

    def _randn(self) -> Tensor:
        values = torch.randn(self.shape, device=self.device, dtype=self.dtype)
        return values.contiguous(memory_format=self.memory_format)

    def evaluation(self) -> Mapping[str, Function]:
        tensors, running = self.tensors()
        return {
            name: partial(function, *tensors, *running, False)
            for name, function in beside_torch(_batch_norm, _plain_batch_norm).items()
        }

    def forward_backward(self, group: str) -> Mapping[str, Function]:
        tensors, running = self.tensors()
        functions = beside_torch(_batch_norm, _plain_batch_norm)
        rest: tuple[Tensor | bool, ...] = (*running, True)
        if group == INSTANCE:
            functions, rest = beside_torch(_instance_norm, _plain_instance_norm), ()
            tensors.pop()
        for tensor in tensors:
            tensor.requires_grad_()
        grad = self._randn()
        return {name: partial(_run_backward, function, tensors, rest, grad) for name, function in functions.items()}


def _batch_norm(
    input: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, mean: Tensor, var: Tensor, training: bool
) -> Tensor:
    return batch_norm(input, mean, var, weight, bias, training, residual=residual, activation="relu")


def _plain_batch_norm(
    input: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, mean: Tensor, var: Tensor, training: bool
) -> Tensor:
    return F.relu(F.batch_norm(input, mean, var, weight, bias, training) + residual)


def _instance_norm(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return instance_norm(input, weight=weight, bias=bias, activation="relu")


def _plain_instance_norm(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.relu(F.instance_norm(input, weight=weight, bias=bias))


def _run_backward(
    function: Callable[..., Tensor], tensors: list[Tensor], rest: tuple[Tensor | bool, ...], grad: Tensor
) -> Tensor:
    return torch.autograd.grad(function(*tensors, *rest), tensors, grad)[0]
