"""deform_conv2d: forward, forward and backward, half types and memory, beside conv2d and torchvision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F

from myvision.ops import deform_conv2d

from .harness import OURS, Bar, Case, Function, MemoryCase, Settings, TimeCase, can_measure_memory

try:
    from torchvision.ops import deform_conv2d as torchvision_deform_conv2d
except ImportError:  # an optional peer
    torchvision_deform_conv2d = None

FORWARD = "deform_conv2d forward"
BACKWARD = "deform_conv2d forward + backward"
HALF = "deform_conv2d forward, half types"
MEMORY = "deform_conv2d forward, extra memory"
CONV2D = "conv2d"
TORCHVISION = "torchvision"
OURS_FLOAT32 = "myvision float32"

HEADLINES = {FORWARD: (TORCHVISION,), BACKWARD: (TORCHVISION,)}

BARS = (
    Bar(FORWARD, CONV2D, 0.95),
    Bar(FORWARD, TORCHVISION, 1 / 10),
    Bar(BACKWARD, CONV2D, 0.9),
    Bar(BACKWARD, TORCHVISION, 1 / 20),
    Bar(HALF, OURS_FLOAT32, 1.15),
    Bar(MEMORY, None, 32),
)


@dataclass(frozen=True)
class Shape:
    """A square convolution with padding kernel // 2."""

    batch: int
    in_channels: int
    size: int
    out_channels: int
    kernel: int
    stride: int = 1
    offset_groups: int = 1

    @property
    def out_size(self) -> int:
        return (self.size + 2 * (self.kernel // 2) - self.kernel) // self.stride + 1

    @property
    def flops(self) -> int:
        """Of the product alone; sampling comes on top."""
        return 2 * self.batch * self.out_channels * self.in_channels * self.kernel**2 * self.out_size**2

    def __str__(self) -> str:
        text = f"{self.batch}x{self.in_channels}x{self.size}x{self.size} to {self.out_channels}"
        text += f", {self.kernel}x{self.kernel}"
        text += f", stride {self.stride}" if self.stride > 1 else ""
        return text + (f", {self.offset_groups} offset groups" if self.offset_groups > 1 else "")


SHAPES = (
    Shape(1, 64, 56, 64, 3),
    Shape(8, 128, 28, 128, 3),
    Shape(1, 256, 32, 256, 3),
    Shape(2, 256, 64, 256, 3),
    Shape(1, 512, 14, 512, 3),
    Shape(1, 64, 128, 64, 3, offset_groups=8),
    Shape(4, 32, 64, 32, 5),
    Shape(2, 128, 40, 128, 3, stride=2),
)
MEMORY_SHAPE = Shape(32, 256, 64, 256, 3)
QUICK_SHAPE = Shape(1, 32, 14, 32, 3)


def cases(settings: Settings) -> Iterator[Case]:
    """Every shape in both memory formats for speed, one large shape for memory."""
    shapes = (QUICK_SHAPE,) if settings.quick else SHAPES
    formats = {"": torch.contiguous_format, ", channels_last": torch.channels_last}
    problems = [
        (f"{shape}{suffix}", Problem(shape, settings.device, memory_format=memory_format))
        for suffix, memory_format in formats.items()
        for shape in shapes
    ]
    for name, problem in problems:
        yield TimeCase(FORWARD, name, problem.forward, problem.shape.flops, problem.moved_bytes)
    for name, problem in problems:
        yield TimeCase(
            BACKWARD, name, problem.forward_backward, 3 * problem.shape.flops, 3 * problem.moved_bytes, mode=nullcontext
        )
    for dtype in (torch.bfloat16, torch.float16):
        for name, problem in problems:
            half = replace(problem, dtype=dtype)
            short = str(dtype).removeprefix("torch.")
            yield TimeCase(HALF, f"{name}, {short}", half.beside_float32, half.shape.flops, half.moved_bytes)
    if can_measure_memory(settings.device):
        large, small = (
            Problem(shape, settings.device) for shape in (QUICK_SHAPE if settings.quick else MEMORY_SHAPE, QUICK_SHAPE)
        )
        yield MemoryCase(MEMORY, str(large.shape), large.forward_without_gradients, small.forward_without_gradients)


@dataclass(frozen=True)
class Problem:
    """One convolution: makes the tensors, and the functions that ours and the peers run on them."""

    shape: Shape
    device: torch.device
    dtype: torch.dtype = torch.float32
    memory_format: torch.memory_format = torch.contiguous_format

    @property
    def moved_bytes(self) -> int:
        """Each tensor once."""
        shape, taps = self.shape, self.shape.offset_groups * self.shape.kernel**2
        pixels = shape.batch * shape.out_size**2
        numel = shape.batch * shape.in_channels * shape.size**2 + pixels * (3 * taps + shape.out_channels)
        return (numel + shape.out_channels * shape.in_channels * shape.kernel**2) * self.dtype.itemsize

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Input, offset, weight, bias, mask."""
        shape, taps = self.shape, self.shape.offset_groups * self.shape.kernel**2
        out = (shape.out_size, shape.out_size)
        torch.manual_seed(0)
        return (
            self._rand(shape.batch, shape.in_channels, shape.size, shape.size),
            self._rand(shape.batch, 2 * taps, *out),
            self._rand(shape.out_channels, shape.in_channels, shape.kernel, shape.kernel),
            torch.randn(shape.out_channels, device=self.device, dtype=self.dtype),
            self._rand(shape.batch, taps, *out).sigmoid(),
        )

    def _rand(self, *size: int) -> torch.Tensor:
        return torch.randn(size, device=self.device, dtype=self.dtype).contiguous(memory_format=self.memory_format)

    def forward(self) -> dict[str, Function]:
        return self._forward(self.tensors())

    def _forward(self, tensors: tuple[torch.Tensor, ...]) -> dict[str, Function]:
        input, offset, weight, bias, mask = tensors
        stride, padding = self.shape.stride, self.shape.kernel // 2
        arguments = (input, offset, weight, bias, stride, padding, 1, mask)
        functions: dict[str, Function] = {
            OURS: partial(deform_conv2d, *arguments),
            CONV2D: partial(F.conv2d, input, weight, bias, stride, padding),
        }
        if torchvision_deform_conv2d is not None:
            functions[TORCHVISION] = partial(torchvision_deform_conv2d, *arguments)
        return functions

    def forward_without_gradients(self) -> dict[str, Function]:
        return {name: torch.no_grad()(function) for name, function in self.forward().items()}

    def forward_backward(self) -> dict[str, Function]:
        tensors = tuple(tensor.requires_grad_() for tensor in self.tensors())
        input, _, weight, bias, _ = tensors
        functions = self._forward(tensors)
        grad_output = torch.randn_like(F.conv2d(input, weight, bias, self.shape.stride, self.shape.kernel // 2))
        leaves = {CONV2D: (input, weight, bias)}
        return {
            name: partial(_run_backward, function, leaves.get(name, tensors), grad_output)
            for name, function in functions.items()
        }

    def beside_float32(self) -> Mapping[str, Function]:
        return {OURS: self.forward()[OURS], OURS_FLOAT32: replace(self, dtype=torch.float32).forward()[OURS]}


def _run_backward(function: Function, leaves: tuple[torch.Tensor, ...], grad_output: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(function(), leaves, grad_output)[0]
