"""Calls of linear that its tests share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from helpers import assert_as_accurate, random_tensor, with_layout
from norm_cases import ACTIVATIONS, SLOPE
from torch import Tensor

import myvision
from myvision._formulas._activation import activate
from myvision._formulas._dropout import keep_mask
from myvision._formulas.linear import linear as formula

NAMES = ["input", "weight", "bias", "residual"]
LAYOUTS = ["contiguous", "permuted", "sliced", "offset", "expanded", "gaps", "channels_middle"]
SEED = 2**40 + 5

Tensors = Sequence[Tensor | None]


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The layouts of helpers, and three of matrices whose rows lie in several dimensions.

    "expanded" changes the values: there all rows of the first dimension are one.
    """
    if layout == "expanded":
        return tensor[:1].expand(tensor.shape)
    if layout == "gaps":  # leading dimensions that cannot be walked as one
        return (
            tensor.repeat_interleave(2, max(tensor.dim() - 2, 0))
            .unflatten(max(tensor.dim() - 2, 0), (-1, 2))
            .select(max(tensor.dim() - 2, 0) + 1, 0)
        )
    if layout == "channels_middle":  # an image's channels are its features
        return tensor.movedim(-1, min(1, tensor.dim() - 1)).contiguous().movedim(min(1, tensor.dim() - 1), -1)
    return with_layout(tensor, layout)


@dataclass(frozen=True)
class Case:
    """The sizes of a call, and its options."""

    rows: tuple[int, ...] = (2, 3, 5)
    features: int = 11
    outputs: int = 17
    bias: bool = True
    activation: str | None = None
    dropout_p: float = 0.0
    residual: bool = True

    def __str__(self) -> str:
        changed = (f"{name}={value}" for name, value in vars(self).items() if value != getattr(Case, name))
        return " ".join(changed) or "plain"

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)

    @property
    def output_shape(self) -> tuple[int, ...]:
        return (*self.rows, self.outputs)

    def tensors(
        self, dtype: torch.dtype = torch.float32, device: str = "cpu", layout: str = "contiguous"
    ) -> list[Tensor | None]:
        """input, weight, bias and residual: None, where there is none."""
        present = [True, True, self.bias, self.residual]
        shapes = [(*self.rows, self.features), (self.outputs, self.features), (self.outputs,), self.output_shape]
        return [
            laid_out(random_tensor(*shape, dtype=dtype, seed=i), layout).to(device) if is_present else None
            for i, (shape, is_present) in enumerate(zip(shapes, present, strict=True))
        ]

    def arguments(self, tensors: Tensors) -> tuple[Any, ...]:
        """Those of the operator ``torch.ops.myvision.linear``, and of the formula."""
        input, weight, bias, residual = tensors
        seed = torch.full((), SEED, device=input.device) if self.dropout_p else None
        return input, weight, bias, self.activation, SLOPE, self.dropout_p, seed, residual

    def run(self, tensors: Tensors) -> Tensor:
        """The function, or the operator where the seed must be known."""
        if self.dropout_p:
            return torch.ops.myvision.linear(*self.arguments(tensors))
        input, weight, bias, residual = tensors
        options: dict[str, Any] = {"activation": self.activation, "negative_slope": SLOPE}
        return myvision.ops.linear(input, weight, bias, **options, residual=residual)

    def run_formula(self, tensors: Tensors) -> Tensor:
        return formula(*self.arguments(tensors))

    def run_torch(self, tensors: Tensors) -> Tensor:
        """By torch's own functions at the tensors' type, one after the other."""
        input, weight, bias, residual = tensors
        output = activate(F.linear(input, weight, bias), self.activation, SLOPE)
        if self.dropout_p:
            keep = keep_mask(output, self.dropout_p, torch.tensor(SEED, device=output.device))
            output = output * keep * (0.0 if self.dropout_p == 1 else 1 / (1 - self.dropout_p))
        return output if residual is None else output + residual

    def grad_output(
        self, dtype: torch.dtype = torch.float32, device: str = "cpu", layout: str = "contiguous"
    ) -> Tensor:
        return laid_out(random_tensor(*self.output_shape, dtype=dtype, seed=8), layout).to(device)

    def results(self, run: Any, tensors: Tensors, grad_output: Tensor) -> list[Tensor]:
        """The output, and by autograd the gradient of every tensor there is."""
        leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
        output = run(leaves)
        return [output, *torch.autograd.grad(output, [leaf for leaf in leaves if leaf is not None], grad_output)]

    def check(
        self, dtype: torch.dtype, device: str = "cpu", layout: str = "contiguous", grad_layout: str = "contiguous"
    ) -> None:
        """Holds the output and the gradients against the formula in float64.

        The gate is that of helpers, and a float's rounding of sums that do not cancel, as those tested may.
        """
        tensors, grad_output = self.tensors(dtype, device, layout), self.grad_output(dtype, device, grad_layout)
        exact = [t if t is None else t.double() for t in tensors]
        names = ["output", *(f"gradient of {name}" for name, t in zip(NAMES, tensors, strict=True) if t is not None)]
        magnitudes = [t if t is None else t.abs() for t in exact]
        versions = zip(
            names,
            self.results(self.run, tensors, grad_output),
            self.results(self.run_torch, tensors, grad_output),
            self.results(self.run_formula, exact, grad_output.double()),
            self.results(self.but(activation=None, dropout_p=0.0).run_formula, magnitudes, grad_output.double().abs()),
            strict=True,
        )
        for name, actual, plain, oracle, sums in versions:
            if dtype == torch.float64:  # the oracle's own type: the sums are in another order, no more
                torch.testing.assert_close(actual, oracle, rtol=1e-9, atol=1e-9, msg=name)
            else:
                largest = sums.max().item() if sums.numel() else 0.0
                assert_as_accurate(actual, plain, oracle, atol=torch.finfo(torch.float32).eps * largest)


PLAIN = Case()
LARGE = Case((3, 67), 130, 257, activation="gelu", dropout_p=0.2)
CASES = [
    PLAIN,
    *(PLAIN.but(activation=activation) for activation in ACTIVATIONS),
    Case(bias=False),
    Case(residual=False),
    Case(bias=False, residual=False),
    Case(bias=False, residual=False, activation="silu"),
    Case(dropout_p=0.3),
    Case(dropout_p=0.3, activation="gelu"),
    Case(dropout_p=0.3, activation="relu", bias=False, residual=False),
]
