"""Calls of deform_conv2d that its tests share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from helpers import HALF_DTYPES, assert_as_accurate, random_tensor, with_layout
from torch import Tensor

import myvision
from myvision._formulas import deform_conv2d as reference

NAMES = ["input", "weight", "offset", "mask", "bias"]


@dataclass(frozen=True)
class Case:
    """Sizes and geometry of a call, how many pixels its offsets reach, and whether they are float beside half types."""

    batch: int = 2
    in_channels: int = 4
    image: tuple[int, int] = (7, 9)
    out_channels: int = 6
    kernel: tuple[int, int] = (3, 3)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    offset_groups: int = 1
    mask: bool = True
    bias: bool = True
    reach: float = 2.0
    float_offset: bool = False

    def __str__(self) -> str:
        changed = (f"{name}={value}" for name, value in vars(self).items() if value != getattr(Case, name))
        return " ".join(changed) or "default"

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)

    @property
    def output_size(self) -> list[int]:
        return [
            (self.image[i] + 2 * self.padding[i] - self.dilation[i] * (self.kernel[i] - 1) - 1) // self.stride[i] + 1
            for i in (0, 1)
        ]

    @property
    def geometry(self) -> tuple[Any, ...]:
        """What follows the tensors in a call of the operator."""
        return self.stride, self.padding, self.dilation, self.groups, self.offset_groups

    def tensors(
        self, dtype: torch.dtype = torch.float32, device: str = "cpu", layout: str = "contiguous"
    ) -> list[Tensor | None]:
        """input, weight, offset, mask and bias, as the operator takes them."""
        taps = self.offset_groups * self.kernel[0] * self.kernel[1]
        shapes = [
            (self.batch, self.in_channels, *self.image),
            (self.out_channels, self.in_channels // self.groups, *self.kernel),
            (self.batch, 2 * taps, *self.output_size),
            (self.batch, taps, *self.output_size),
            (self.out_channels,),
        ]
        made = [random_tensor(*shape, dtype=torch.float64, seed=i) for i, shape in enumerate(shapes)]
        made[2] = made[2] * self.reach
        made[3] = made[3].sigmoid()
        dtypes = [dtype] * 5
        if self.float_offset and dtype in HALF_DTYPES:
            dtypes[2] = torch.float32
        laid_out = [with_layout(tensor.to(device, of), layout) for tensor, of in zip(made, dtypes, strict=True)]
        return [*laid_out[:3], laid_out[3] if self.mask else None, laid_out[4] if self.bias else None]

    def run(self, tensors: Sequence[Tensor | None]) -> Tensor:
        input, weight, offset, mask, bias = tensors
        return myvision.ops.deform_conv2d(input, offset, weight, bias, self.stride, self.padding, self.dilation, mask)

    def run_reference(self, tensors: Sequence[Tensor | None]) -> Tensor:
        return reference.deform_conv2d(*tensors, *self.geometry)

    def grad_output(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
        return random_tensor(self.batch, self.out_channels, *self.output_size, dtype=dtype, device=device, seed=9)

    def gradients(self, tensors: Sequence[Tensor | None], grad_output: Tensor) -> list[Tensor | None]:
        """By autograd, for every tensor there is."""
        leaves = [None if tensor is None else tensor.detach().requires_grad_() for tensor in tensors]
        found = iter(torch.autograd.grad(self.run(leaves), [leaf for leaf in leaves if leaf is not None], grad_output))
        return [None if leaf is None else next(found) for leaf in leaves]

    def reference_gradients(self, tensors: Sequence[Tensor | None], grad_output: Tensor) -> list[Tensor | None]:
        *gradients, bias = reference.deform_conv2d_backward(grad_output, *tensors[:4], *self.geometry)
        return [*gradients, bias if self.bias else None]

    def results(self, dtype: torch.dtype, device: str = "cpu", layout: str = "contiguous") -> Iterator[tuple[Any, ...]]:
        """Name, operator's, plain torch's and float64's version of the output and of each gradient there is."""
        tensors, grad_output = self.tensors(dtype, device, layout), self.grad_output(dtype, device)
        exact = [None if tensor is None else tensor.double() for tensor in tensors]
        yield "output", self.run(tensors), self.run_reference(tensors), self.run_reference(exact)
        for name, actual, plain, oracle in zip(
            NAMES,
            self.gradients(tensors, grad_output),
            self.reference_gradients(tensors, grad_output),
            self.reference_gradients(exact, grad_output.double()),
            strict=True,
        ):
            assert (actual is None) == (oracle is None), name
            if actual is not None:
                yield name, actual, plain, oracle

    def check(self, dtype: torch.dtype, device: str = "cpu", layout: str = "contiguous") -> None:
        """Holds the output and the gradients against the reference in float64, at the gate of helpers."""
        for name, actual, plain, oracle in self.results(dtype, device, layout):
            if dtype == torch.float64:  # the oracle's own type: the sums are in another order, no more
                torch.testing.assert_close(actual, oracle, rtol=1e-12, atol=1e-12)
            elif name == "bias":  # a sum that cancels: its terms set the scale
                scale = self.grad_output().abs().sum((0, 2, 3)).max()
                assert (actual.cpu().double() - oracle.cpu()).abs().max() <= torch.finfo(dtype).eps * scale
            else:
                assert_as_accurate(actual, plain, oracle)


CASES = [
    Case(),
    Case(mask=False),
    Case(bias=False),
    Case(mask=False, bias=False, kernel=(1, 1), padding=(0, 0)),
    Case(in_channels=6, kernel=(3, 2), stride=(2, 1), padding=(1, 0), dilation=(2, 1), groups=2, offset_groups=3),
    Case(in_channels=6, out_channels=9, groups=3, offset_groups=2, kernel=(2, 3)),
    Case(in_channels=8, out_channels=8, groups=8, offset_groups=8),
    Case(in_channels=5, out_channels=1, offset_groups=5, groups=1),
    Case(batch=33, in_channels=3, image=(4, 3), out_channels=2),
    Case(batch=1, in_channels=1, image=(1, 1), out_channels=1),
    Case(in_channels=2, image=(1, 6), kernel=(3, 3), padding=(2, 2), dilation=(2, 2)),
    Case(in_channels=3, image=(6, 5), kernel=(5, 5), padding=(4, 4), stride=(3, 2)),
    Case(batch=1, in_channels=17, out_channels=33, image=(9, 20)),
    Case(batch=1, in_channels=70, out_channels=70, image=(11, 13), groups=2, offset_groups=2),
    Case(batch=1, in_channels=32, out_channels=16, image=(20, 37), reach=20),
    Case(batch=1, in_channels=70, out_channels=3, kernel=(2, 1), image=(5, 6)),  # more channels than a tile has rows
    Case(batch=1, in_channels=3, out_channels=300, kernel=(1, 2), image=(3, 5)),  # more outputs than are summed at once
]
