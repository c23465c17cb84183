"""layer_norm and its family: what a transformer's block spends on them, beside eager and compiled torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from myvision.ops import add_layer_norm, layer_norm

from .harness import COMPILED, EAGER, Bar, Case, Function, Settings, TimeCase, beside_torch

FORWARD = "layer_norm forward"
BACKWARD = "layer_norm forward + backward"
ADD_FORWARD = "add + layer_norm forward"
ADD_BACKWARD = "add + layer_norm forward + backward"
HALF = "bfloat16, "

HEADLINES = {BACKWARD: (EAGER, COMPILED), ADD_BACKWARD: (EAGER, COMPILED)}

# Of each group: how many times the speed of eager and of compiled torch.
SPEEDUPS = {
    FORWARD: (1.0, 1.0),
    BACKWARD: (1.3, 1.0),
    ADD_FORWARD: (1.5, 1.2),
    ADD_BACKWARD: (1.6, 1.2),
    **{HALF + group: (2.0, 1.2) for group in (FORWARD, BACKWARD, ADD_FORWARD, ADD_BACKWARD)},
}
BARS = tuple(
    Bar(group, peer, 1 / speedup)
    for group, speedups in SPEEDUPS.items()
    for peer, speedup in zip((EAGER, COMPILED), speedups, strict=True)
)

SHAPES = ((8, 128, 768), (32, 197, 768), (4096, 4096))
QUICK_SHAPE = (2, 16, 64)


def cases(settings: Settings) -> Iterator[Case]:
    """Every shape, in float32 and in bfloat16."""
    for dtype, prefix in ((torch.float32, ""), (torch.bfloat16, HALF)):
        for adds in (False, True):
            problems = [
                Problem(shape, dtype, adds, settings.device) for shape in ((QUICK_SHAPE,) if settings.quick else SHAPES)
            ]
            for problem in problems:
                group = prefix + (ADD_FORWARD if adds else FORWARD)
                yield TimeCase(group, str(problem), problem.forward, moved_bytes=problem.forward_bytes)
            for problem in problems:
                group = prefix + (ADD_BACKWARD if adds else BACKWARD)
                yield TimeCase(
                    group, str(problem), problem.forward_backward, moved_bytes=problem.backward_bytes, mode=nullcontext
                )


@dataclass(frozen=True)
class Problem:
    """One normalisation over the last dimension, of a tensor or of a sum that is wanted too."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    adds: bool
    device: torch.device

    def __str__(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def tensor_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def forward_bytes(self) -> int:
        """Input and output; residual and sum."""
        return (4 if self.adds else 2) * self.tensor_bytes

    @property
    def backward_bytes(self) -> int:
        """Those of forward, then input or sum, the gradient of the output and that of the input; that of the sum."""
        return self.forward_bytes + (4 if self.adds else 3) * self.tensor_bytes

    def tensors(self) -> list[Tensor]:
        """Weight, bias, input and, to add, residual."""
        torch.manual_seed(0)
        shapes = [self.shape[-1:]] * 2 + [self.shape] * (2 if self.adds else 1)
        return [torch.randn(shape, device=self.device, dtype=self.dtype) for shape in shapes]

    def functions(self) -> dict[str, Callable[..., Any]]:
        ours, plain = (_add_layer_norm, _add_plain) if self.adds else (_layer_norm, _plain)
        return beside_torch(ours, plain)

    def forward(self) -> Mapping[str, Function]:
        tensors = self.tensors()
        return {name: partial(function, *tensors) for name, function in self.functions().items()}

    def forward_backward(self) -> Mapping[str, Function]:
        tensors = [tensor.requires_grad_() for tensor in self.tensors()]
        grads = tuple(torch.randn_like(tensors[-1]) for _ in range(2 if self.adds else 1))
        return {name: partial(_run_backward, function, tensors, grads) for name, function in self.functions().items()}


def _layer_norm(weight: Tensor, bias: Tensor, input: Tensor) -> Tensor:
    return layer_norm(input, input.shape[-1:], weight, bias)


def _plain(weight: Tensor, bias: Tensor, input: Tensor) -> Tensor:
    return F.layer_norm(input, input.shape[-1:], weight, bias)


def _add_layer_norm(weight: Tensor, bias: Tensor, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    return add_layer_norm(input, residual, input.shape[-1:], weight, bias)


def _add_plain(weight: Tensor, bias: Tensor, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    sum = input + residual
    return F.layer_norm(sum, input.shape[-1:], weight, bias), sum


def _run_backward(
    function: Callable[..., Tensor | tuple[Tensor, Tensor]], tensors: list[Tensor], grads: tuple[Tensor, ...]
) -> Tensor:
    results = function(*tensors)
    return torch.autograd.grad(results, tensors, grads if isinstance(results, tuple) else grads[0])[0]
