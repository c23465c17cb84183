"""A Transformer's encoder layer beside torch.nn's, in evaluation and in training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import myvision.nn

from .harness import EAGER, OURS, Bar, Case, Function, Settings, TimeCase

EVALUATION = "encoder layer, evaluation"
TRAINING = "encoder layer, training forward + backward"
HEADLINES = {TRAINING: (EAGER,)}
HALF = ", bfloat16"  # of the names of groups
BARS = tuple(Bar(group + dtype, EAGER, 1 / 1.2) for group in (EVALUATION, TRAINING) for dtype in ("", HALF))

SHAPE = (16, 197, 768)
QUICK_SHAPE = (2, 16, 64)
HEADS = 12
QUICK_HEADS = 4


def cases(settings: Settings) -> Iterator[Case]:
    """Norms last and first; training with torch's default dropout and, in float32, without."""
    for dtype, suffix, dropouts in ((torch.float32, "", (0.1, 0.0)), (torch.bfloat16, HALF, (0.1,))):
        shape, heads = (QUICK_SHAPE, QUICK_HEADS) if settings.quick else (SHAPE, HEADS)
        layers = [Layer(shape, heads, norm_first, 0.1, settings.device, dtype) for norm_first in (False, True)]
        for layer in layers:
            yield TimeCase(EVALUATION + suffix, layer.name, layer.evaluation, layer.flops)
        for dropout in dropouts:
            for layer in layers:
                trained = replace(layer, dropout=dropout)
                name = f"{layer.name}, dropout {dropout}"
                yield TimeCase(TRAINING + suffix, name, trained.training, 3 * layer.flops, mode=nullcontext)


@dataclass(frozen=True)
class Layer:
    """One encoder layer of each package, with the same parameters and input."""

    shape: tuple[int, int, int]
    heads: int
    norm_first: bool
    dropout: float
    device: torch.device
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"{'x'.join(map(str, self.shape))}, norms {'first' if self.norm_first else 'last'}"

    @property
    def flops(self) -> float:
        """Of the linear layers, most of all, and of the two products of attention."""
        batch, length, width = self.shape
        return 2 * batch * length * width * (4 * width + 2 * self.feedforward + 2 * length)

    @property
    def feedforward(self) -> int:
        return 2048 if self.shape == SHAPE else 2 * self.shape[-1]  # 2048: torch's default

    def evaluation(self) -> Mapping[str, Function]:
        layers = {name: layer.eval() for name, layer in self._layers().items()}
        x = torch.randn(self.shape, device=self.device, dtype=self.dtype)
        return {name: partial(layer, x) for name, layer in layers.items()}

    def training(self) -> Mapping[str, Function]:
        x = torch.randn(self.shape, device=self.device, dtype=self.dtype, requires_grad=True)
        grad_output = torch.randn_like(x)

        def step(layer: nn.Module) -> Tensor:
            leaves = [x, *layer.parameters()]
            return torch.autograd.grad(layer(x), leaves, grad_output)[0]

        return {name: partial(step, layer) for name, layer in self._layers().items()}

    def _layers(self) -> dict[str, nn.Module]:
        torch.manual_seed(0)
        arguments = self.shape[-1], self.heads, self.feedforward, self.dropout
        options: dict[str, Any] = {"batch_first": True, "norm_first": self.norm_first}
        options |= {"device": self.device, "dtype": self.dtype}
        theirs = nn.TransformerEncoderLayer(*arguments, **options)
        ours = myvision.nn.TransformerEncoderLayer(*arguments, **options)
        ours.load_state_dict(theirs.state_dict())
        return {OURS: ours, EAGER: theirs}
