"""Calls of the norms that their tests share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from helpers import assert_as_accurate, random_tensor, with_layout
from torch import Tensor

import myvision

NAMES = ["input", "weight", "bias", "residual"]  # what has gradients
ACTIVATIONS = ["relu", "leaky_relu", "silu", "gelu", "gelu_tanh", "hardswish"]
SLOPE = 0.2

Tensors = Sequence[Tensor | None]


@dataclass(frozen=True)
class Case:
    """One of the functions, the shape of its input, and its options."""

    op: str
    shape: tuple[int, ...] = (3, 6, 5, 4)
    training: bool = True  # of batch_norm and instance_norm; False: by running statistics
    groups: int = 3
    normalized_dims: int = 1
    channels: str = "last"
    affine: bool = True
    residual: bool = True
    activation: str | None = None
    eps: float = 1e-5
    parameter_dtype: torch.dtype | None = None  # None: as the input's

    def __str__(self) -> str:
        changed = (f"{name}={value}" for name, value in vars(self).items() if value != getattr(Case, name, self.op))
        return " ".join([self.op, *changed])

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)

    @property
    def adds(self) -> bool:
        return self.op.startswith("add_")

    @property
    def has_activation(self) -> bool:
        return not self.adds

    @property
    def has_bias(self) -> bool:
        return not self.op.endswith("rms_norm")

    @property
    def normalises_rows(self) -> bool:
        return self.op.endswith(("layer_norm", "rms_norm"))

    @property
    def parameter_shape(self) -> tuple[int, ...]:
        if self.normalises_rows and self.channels == "last":
            return self.shape[len(self.shape) - self.normalized_dims :]
        return self.shape[1:2]

    def tensors(
        self, dtype: torch.dtype = torch.float32, device: str = "cpu", layout: str = "contiguous"
    ) -> list[Tensor | None]:
        """input, weight, bias, residual, running_mean and running_var: None, where there is none."""
        by_running = self.op in ("batch_norm", "instance_norm") and not self.training
        present = [True, self.affine, self.affine and self.has_bias, self.residual or self.adds, by_running, by_running]
        images = [True, False, False, True, False, False]
        parameter_dtype = self.parameter_dtype or dtype
        tensors: list[Tensor | None] = []
        for i, (is_present, is_image) in enumerate(zip(present, images, strict=True)):
            shape = self.shape if is_image else self.parameter_shape
            tensor = random_tensor(*shape, dtype=torch.float64, seed=i)
            if i == 5:
                tensor = tensor.square() + 0.1
            tensor = with_layout(tensor.to(dtype), layout) if is_image else tensor.to(parameter_dtype)
            tensors.append(tensor.to(device) if is_present else None)
        return tensors

    def arguments(self, tensors: Tensors) -> tuple[Any, ...]:
        """Those of the operator ``torch.ops.myvision.<op>``, and of the reference."""
        input, weight, bias, residual, mean, var = tensors
        activation = (self.activation, SLOPE)
        if self.op in ("batch_norm", "instance_norm"):
            return input, mean, var, weight, bias, residual, self.eps, *activation
        if self.op == "group_norm":
            return input, self.groups, weight, bias, residual, self.eps, *activation
        affine = (weight, bias) if self.has_bias else (weight,)
        if self.adds:
            return input, residual, self.parameter_shape, *affine, self.eps, 0.0, None
        first = self.channels == "first"
        return input, self.parameter_shape, *affine, residual, first, self.eps, *activation

    def run(self, tensors: Tensors) -> tuple[Tensor, ...]:
        """The outputs of the function of myvision.ops."""
        input, weight, bias, residual, mean, var = tensors
        function = getattr(myvision.ops, self.op)
        affine = (weight, bias) if self.has_bias else (weight,)
        if self.adds:
            return function(input, residual, self.parameter_shape, *affine, self.eps)
        options = {"residual": residual, "activation": self.activation, "negative_slope": SLOPE}
        if self.op in ("batch_norm", "instance_norm"):
            return (function(input, mean, var, weight, bias, self.training, eps=self.eps, **options),)
        if self.op == "group_norm":
            return (function(input, self.groups, weight, bias, self.eps, **options),)
        return (function(input, self.parameter_shape, *affine, self.eps, channels=self.channels, **options),)

    def run_reference(self, tensors: Tensors) -> tuple[Tensor, ...]:
        outputs = getattr(import_module(f"myvision._formulas.{self.op}"), self.op)(*self.arguments(tensors))
        return outputs if self.adds else (outputs,)

    def grad_outputs(
        self, dtype: torch.dtype = torch.float32, device: str = "cpu", layout: str = "contiguous"
    ) -> list[Tensor]:
        seeds = (8, 9) if self.adds else (8,)
        return [with_layout(random_tensor(*self.shape, dtype=dtype, seed=seed), layout).to(device) for seed in seeds]

    def gradients(self, tensors: Tensors, grad_outputs: Sequence[Tensor], reference: bool = False) -> list[Tensor]:
        """By autograd, for every tensor there is, in the order of NAMES."""
        leaves = [None if t is None else t.detach().requires_grad_() for t in tensors[:4]]
        outputs = (self.run_reference if reference else self.run)([*leaves, *tensors[4:]])
        return list(torch.autograd.grad(outputs, [leaf for leaf in leaves if leaf is not None], grad_outputs))

    def results(
        self, dtype: torch.dtype, device: str = "cpu", layout: str = "contiguous", grad_layout: str = "contiguous"
    ) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
        """Name, operator's, plain torch's and float64's version of the outputs and of each gradient there is."""
        tensors, grad_outputs = self.tensors(dtype, device, layout), self.grad_outputs(dtype, device, grad_layout)
        exact = [None if t is None else t.double() for t in tensors]
        outputs = zip(self.run(tensors), self.run_reference(tensors), self.run_reference(exact), strict=True)
        for name, versions in zip(("output", "sum"), outputs, strict=False):
            yield name, *versions
        gradients = zip(
            self.gradients(tensors, grad_outputs),
            self.gradients(tensors, grad_outputs, reference=True),
            self.gradients(exact, [g.double() for g in grad_outputs], reference=True),
            strict=True,
        )
        names = [name for name, tensor in zip(NAMES, tensors, strict=False) if tensor is not None]
        for name, versions in zip(names, gradients, strict=True):
            yield f"gradient of {name}", *versions

    def check(
        self, dtype: torch.dtype, device: str = "cpu", layout: str = "contiguous", grad_layout: str = "contiguous"
    ) -> None:
        """Holds the outputs and the gradients against the reference in float64.

        The gate is that of helpers, and a float's rounding of the terms of what is a sum that may cancel.
        """
        terms = max((g.abs().max().item() for g in self.grad_outputs() if g.numel()), default=0)
        for name, actual, plain, oracle in self.results(dtype, device, layout, grad_layout):
            if dtype == torch.float64:  # the oracle's own type: the sums are in another order, no more
                torch.testing.assert_close(actual, oracle.to(actual.dtype), rtol=1e-9, atol=1e-9)
            elif name in ("gradient of weight", "gradient of bias"):
                summed = math.prod(self.shape) / max(oracle.numel(), 1)
                assert_as_accurate(actual, plain, oracle, atol=torch.finfo(torch.float32).eps * summed * terms)
            else:
                assert_as_accurate(actual, plain, oracle, atol=torch.finfo(torch.float32).eps * terms)


CASES = [
    Case("batch_norm"),
    Case("batch_norm", training=False),
    Case("instance_norm"),
    Case("instance_norm", training=False),
    Case("group_norm"),
    Case("layer_norm"),
    Case("layer_norm", normalized_dims=3),
    Case("layer_norm", channels="first"),
    Case("rms_norm"),
    Case("rms_norm", channels="first"),
    Case("add_layer_norm"),
    Case("add_rms_norm"),
]
WITH_ACTIVATION = [case for case in CASES if case.has_activation]
