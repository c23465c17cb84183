"""linear: alone and with gelu, forward and with backward, in three types, beside torch and the machine's limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from myvision.ops import linear

from .harness import (
    EAGER,
    FMA_PEAK,
    OURS,
    READ_BANDWIDTH,
    Bar,
    Case,
    Function,
    LimitCase,
    MemoryCase,
    Settings,
    TimeCase,
    can_measure_memory,
    cpu_name,
    output_and_gradients,
)

OURS_FLOAT32 = "myvision float32"
READING = "torch.sum of the weight"
ONE_ROW = "linear forward, one row, beside reading"
MEMORY = "linear, extra memory"
HALF_TYPES = (torch.bfloat16, torch.float16)
BOTH = (False, True)


def group_of(gelu: bool, backward: bool, dtype: torch.dtype = torch.float32) -> str:
    name = f"linear{' + gelu' if gelu else ''} forward{' + backward' if backward else ''}"
    return name if dtype == torch.float32 else f"{name}, {_short(dtype)}"


def peak_of(backward: bool) -> str:
    return f"{group_of(False, backward)}, many rows, beside the FMA peak"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


HEADLINES = {group_of(gelu=True, backward=False, dtype=dtype): (EAGER,) for dtype in (torch.float32, torch.bfloat16)}


def bars() -> Iterator[Bar]:
    """Of every shape, or of their mean; for bfloat16 one for CPUs with instructions for it, one for those without."""
    mkl_is_at_its_best = torch.backends.mkl.is_available() and "Intel" in cpu_name()
    for backward in BOTH:
        slack = 1.1 if backward else 1.0
        alone = group_of(False, backward)
        yield Bar(alone, EAGER, 1.03 * slack, max) if mkl_is_at_its_best else Bar(alone, EAGER, 0.8 * slack)
        yield Bar(group_of(True, backward), EAGER, 0.9 * slack, max)
        yield Bar(peak_of(backward), FMA_PEAK, slack / 0.8)
        for gelu in BOTH:
            yield Bar(group_of(gelu, backward, torch.bfloat16), EAGER, 1.03 * slack, max)
            for dtype in HALF_TYPES:
                yield Bar(group_of(gelu, backward, dtype), OURS_FLOAT32, 1.1 * slack, max)
    yield Bar(ONE_ROW, READ_BANDWIDTH, 1 / 0.9)
    # This module is loaded when the number of threads is set.
    yield Bar(MEMORY, None, 8 * torch.get_num_threads(), max)


BARS = tuple(bars())


@dataclass(frozen=True)
class Shape:
    """Of the product."""

    rows: int
    outputs: int
    features: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.features} to {self.outputs}"


MANY_ROWS = (Shape(3152, 3072, 768), Shape(3152, 768, 3072), Shape(3152, 2304, 768), Shape(256, 1024, 1024))
FEW_ROWS = (Shape(16, 3072, 768), Shape(1, 4096, 4096))
QUICK_MANY_ROWS = (Shape(32, 48, 64),)
QUICK_FEW_ROWS = (Shape(1, 64, 64),)
# With gelu or not, with backward or not.
MEMORY_KINDS = ((True, False, torch.float32), (True, False, torch.bfloat16), (False, True, torch.float32))


@dataclass(frozen=True)
class Problem:
    """One call: makes the tensors, and the functions that ours and the peers run on them."""

    shape: Shape
    device: torch.device
    gelu: bool = False
    backward: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def group(self) -> str:
        return group_of(self.gelu, self.backward, self.dtype)

    @property
    def products(self) -> int:
        return 3 if self.backward else 1

    @property
    def flops(self) -> int:
        shape = self.shape
        return 2 * self.products * shape.rows * shape.outputs * shape.features

    @property
    def moved_bytes(self) -> int:
        """Three matrices a product, each once."""
        rows, outputs, features = self.shape.rows, self.shape.outputs, self.shape.features
        return self.products * (rows * features + outputs * features + rows * outputs) * self.dtype.itemsize

    def case(self, group: str | None = None) -> TimeCase:
        return TimeCase(
            group or self.group,
            str(self.shape),
            self.functions if self.dtype == torch.float32 else self.beside_float32,
            self.flops,
            self.moved_bytes,
            mode=nullcontext if self.backward else torch.no_grad,
        )

    def tensors(self) -> list[Tensor]:
        """Input, weight and bias."""
        torch.manual_seed(0)
        input = self._randn(self.shape.rows, self.shape.features)
        weight = self._randn(self.shape.outputs, self.shape.features) / self.shape.features**0.5
        return [tensor.requires_grad_(self.backward) for tensor in (input, weight, self._randn(self.shape.outputs))]

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def functions(self) -> dict[str, Function]:
        tensors = self.tensors()
        calls: dict[str, Callable[[], Tensor]] = {
            OURS: partial(linear, *tensors, activation="gelu" if self.gelu else None),
            EAGER: partial(_two_steps if self.gelu else F.linear, *tensors),
        }
        if not self.backward:
            return {**calls}
        grad_output = self._randn(self.shape.rows, self.shape.outputs)
        return {name: partial(output_and_gradients, call, tensors, grad_output) for name, call in calls.items()}

    def beside_float32(self) -> dict[str, Function]:
        return {**self.functions(), OURS_FLOAT32: replace(self, dtype=torch.float32).functions()[OURS]}

    def beside_reading(self) -> dict[str, Function]:
        """The weight is nearly all that one row reads."""
        return {OURS: self.functions()[OURS], READING: self.tensors()[1].sum}


def _two_steps(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.linear(input, weight, bias))


def cases(settings: Settings) -> Iterator[Case]:
    """Every shape in each type, alone and with gelu; then what has limits of the machine for peers, and memory."""
    many_rows, few_rows = (QUICK_MANY_ROWS, QUICK_FEW_ROWS) if settings.quick else (MANY_ROWS, FEW_ROWS)
    for dtype, backward, gelu in product((torch.float32, *HALF_TYPES), BOTH, BOTH):
        for shape in many_rows + few_rows:
            yield Problem(shape, settings.device, gelu, backward, dtype).case()
    for backward in BOTH:
        for shape in many_rows:
            yield LimitCase(Problem(shape, settings.device, backward=backward).case(peak_of(backward)), FMA_PEAK)
    one_row = Problem(few_rows[-1], settings.device)
    yield LimitCase(replace(one_row.case(ONE_ROW), prepare=one_row.beside_reading), READ_BANDWIDTH)
    if can_measure_memory(settings.device):
        for gelu, backward, dtype in MEMORY_KINDS:
            shapes = many_rows[0], QUICK_MANY_ROWS[0]
            large, small = (Problem(shape, settings.device, gelu, backward, dtype) for shape in shapes)
            yield MemoryCase(MEMORY, f"{large.shape}, {large.group}", large.functions, small.functions)
