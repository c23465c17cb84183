"""Calls of attention that its tests share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from helpers import assert_as_accurate, random_tensor, with_layout
from torch import Tensor

import myvision  # noqa: F401  loads the operators
from myvision._formulas.attention import attention as reference

NAMES = ["query", "key", "value", "attn_mask"]  # what has gradients
TENSORS = 8  # arguments before the options
SEED = 1234567890123


@dataclass(frozen=True)
class Case:
    """Shapes and options of one call of the operator."""

    batch: int = 2
    heads: int = 4
    key_heads: int = 4
    queries: int = 19
    keys: int = 23
    width: int = 12
    value_width: int = 12
    mask: str | None = None  # "bool", "additive", or "float32": additive of that type whatever that of query
    mask_shape: str = "bhqk"  # which dimensions it has, the others being 1; upper case: they are left out
    alibi: str | None = None  # "heads" or "batch"
    dropout_p: float = 0.0
    is_causal: bool = False
    causal_alignment: str = "top_left"
    window: tuple[int | None, int | None] = (None, None)
    scale: float | None = None
    softcap: float = 0.0
    lengths: tuple[tuple[int, int], ...] | None = None  # of packed sequences: of queries and of keys

    def __str__(self) -> str:
        return (
            " ".join(f"{name}={value}" for name, value in vars(self).items() if value != getattr(Case, name)) or "plain"
        )

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)

    @property
    def sequences(self) -> int:
        return self.batch if self.lengths is None else len(self.lengths)

    def shape_of(self, name: str) -> tuple[int, ...]:
        heads = self.heads if name == "query" else self.key_heads
        width = self.value_width if name == "value" else self.width
        if self.lengths is not None:
            return (sum(length[name != "query"] for length in self.lengths), heads, width)
        return (self.batch, heads, self.queries if name == "query" else self.keys, width)

    def output_shape(self) -> tuple[int, ...]:
        return (*self.shape_of("query")[:-1], self.value_width)

    def mask_tensor(self, dtype: torch.dtype) -> Tensor | None:
        """Its first query sees no key."""
        if self.mask is None:
            return None
        sizes = {"b": self.batch, "h": self.heads, "q": self.queries, "k": self.keys}
        shape = [
            size if dim in self.mask_shape else 1 for dim, size in sizes.items() if dim.upper() not in self.mask_shape
        ]
        numbers = random_tensor(*shape, dtype=torch.float64, seed=3)
        seen = numbers > -0.5
        if seen.shape[-2] > 1:
            seen[..., 0, :] = False
        if self.mask == "bool":
            return seen
        return numbers.masked_fill(~seen, -torch.inf).to(torch.float32 if self.mask == "float32" else dtype)

    def tensors(
        self, dtype: torch.dtype = torch.float32, device: str = "cpu", layout: str = "heads_inside"
    ) -> list[Any]:
        """The operator's arguments that are tensors, or None."""
        rows = [
            laid_out(random_tensor(*self.shape_of(name), dtype=dtype, seed=i), layout)
            for i, name in enumerate(NAMES[:3])
        ]
        slopes = None
        if self.alibi is not None:
            slopes = random_tensor(self.sequences, self.heads, seed=5).abs() * 0.2
            slopes = slopes if self.alibi == "batch" else slopes[0]
        starts = [None, None]
        if self.lengths is not None:
            counts = torch.tensor([(0, 0), *self.lengths]).cumsum(0)
            starts = [counts[:, 0].contiguous(), counts[:, 1].to(torch.int32)]
        seed = torch.tensor(SEED) if self.dropout_p else None
        tensors = [*rows, self.mask_tensor(dtype), slopes, *starts, seed]
        return [tensor if tensor is None else tensor.to(device) for tensor in tensors]

    def options(self) -> tuple[Any, ...]:
        return (self.dropout_p, self.is_causal, self.causal_alignment, *self.window, self.scale, self.softcap)

    def run(self, tensors: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Output and lse."""
        return torch.ops.myvision.attention.with_lse(*tensors, *self.options())

    def run_forward(self, tensors: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Output, lse, and the statistics of backward."""
        return torch.ops.myvision._attention_forward(*tensors, *self.options())

    def run_reference(self, tensors: Sequence[Any]) -> tuple[Tensor, Tensor]:
        return reference(*tensors, *self.options())

    def grad_outputs(self, dtype: torch.dtype, device: str, layout: str = "heads_inside") -> tuple[Tensor, Tensor]:
        """Of output and lse; of rows that see no key too."""
        output = laid_out(random_tensor(*self.output_shape(), dtype=dtype, seed=8), layout)
        shape = self.shape_of("query")[:-1] if self.lengths is None else self.shape_of("query")[1::-1]
        real = torch.promote_types(dtype, torch.float32)
        return output.to(device), random_tensor(*shape, dtype=real, seed=9).to(device)

    def gradients(
        self, tensors: Sequence[Any], grad_outputs: Sequence[Tensor], plain: bool = False
    ) -> dict[str, Tensor]:
        """Of every tensor that has one, by autograd."""
        differentiable = {
            name: tensor.detach().requires_grad_()
            for name, tensor in zip(NAMES, tensors, strict=False)
            if tensor is not None and tensor.dtype.is_floating_point
        }
        leaves = [differentiable.get(name, tensors[i]) for i, name in enumerate(NAMES)]
        output, lse = (self.run_reference if plain else self.run)([*leaves, *tensors[4:]])
        if not output.requires_grad:  # the reference's, of no sequence at all
            return {name: torch.zeros_like(tensor) for name, tensor in differentiable.items()}
        sees = lse.detach() > -torch.inf  # the others' lse has no derivative
        outputs, grads = [output, torch.where(sees, lse, 0)], [grad_outputs[0], grad_outputs[1]]
        found = torch.autograd.grad(outputs, list(differentiable.values()), grads, materialize_grads=True)
        return dict(zip(differentiable, found, strict=True))

    def results(
        self, dtype: torch.dtype, device: str, layout: str, grad_layout: str
    ) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
        """Name, operator's, plain torch's and float64's version of output, lse and each gradient."""
        tensors, grads = self.tensors(dtype, device, layout), self.grad_outputs(dtype, device, grad_layout)
        exact = [t.double() if t is not None and t.dtype.is_floating_point else t for t in tensors]
        outputs = zip(self.run(tensors), self.run_reference(tensors), self.run_reference(exact), strict=True)
        for name, versions in zip(("output", "lse"), outputs, strict=True):
            yield name, *versions
        actual, plain = self.gradients(tensors, grads), self.gradients(tensors, grads, plain=True)
        oracle = self.gradients(exact, [grad.double() for grad in grads], plain=True)
        for name, gradient in actual.items():
            yield f"gradient of {name}", gradient, plain[name], oracle[name]

    def rounding_of_sums(self, name: str, result: Tensor) -> float:
        """What is fair where float32's products cancel in the sums over them."""
        length = -2 if self.lengths is None else 0
        queries, keys = self.shape_of("query")[length], self.shape_of("key")[length]
        terms = max(queries * self.heads // max(self.key_heads, 1), keys)
        if name == "gradient of attn_mask":
            terms = self.batch * self.heads * queries * keys // max(result.numel(), 1)
        return 8 * torch.finfo(torch.float32).eps * math.sqrt(self.value_width * terms)

    def check(
        self,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        layout: str = "heads_inside",
        grad_layout: str = "heads_inside",
    ) -> None:
        """Holds output, lse and gradients against the reference in float64."""
        for name, actual, plain, oracle in self.results(dtype, device, layout, grad_layout):
            if dtype == torch.float64:  # the oracle's own type: the sums are in another order, no more
                torch.testing.assert_close(
                    actual,
                    oracle.to(actual.dtype),
                    rtol=1e-9,
                    atol=1e-9,
                    msg=lambda message, name=name: f"{name}: {message}",
                )
            else:
                # Backward starts from the output as it was rounded, which shows where a result is of a wider type.
                rounding = (
                    torch.finfo(dtype).eps * oracle.abs().max().item()
                    if actual.dtype != dtype and oracle.numel()
                    else 0
                )
                assert_as_accurate(actual, plain, oracle, atol=self.rounding_of_sums(name, oracle) + rounding)


def laid_out(rows: Tensor, layout: str) -> Tensor:
    """The same values, with heads inside of lengths, as a projection leaves them; or as `with_layout` lays them out."""
    if layout == "heads_inside":
        return rows.transpose(1, 2).contiguous().transpose(1, 2) if rows.dim() == 4 else rows.contiguous()
    if layout == "packed_qkv":  # a third of a wider row
        wide = torch.stack([rows.transpose(-2, -3)] * 3, dim=-3).contiguous()
        return wide.select(-3, 1).transpose(-2, -3)
    return with_layout(rows, layout)


PLAIN = Case()
CASES = [
    PLAIN,
    PLAIN.but(is_causal=True),
    PLAIN.but(is_causal=True, causal_alignment="bottom_right"),
    PLAIN.but(queries=23, keys=9, is_causal=True, causal_alignment="bottom_right"),
    PLAIN.but(window=(3, 2)),
    PLAIN.but(window=(None, 1), causal_alignment="bottom_right"),
    PLAIN.but(window=(0, 0), queries=30, keys=20),
    PLAIN.but(window=(4, None), is_causal=True),
    PLAIN.but(key_heads=2),
    PLAIN.but(key_heads=1, is_causal=True),
    PLAIN.but(width=13, value_width=7),
    PLAIN.but(width=5, value_width=12),  # so many panels that differ, with rows as far apart
    PLAIN.but(width=20, value_width=40),
    PLAIN.but(width=40, value_width=20),
    PLAIN.but(mask="bool"),
    PLAIN.but(mask="bool", mask_shape="bk"),
    PLAIN.but(mask="bool", mask_shape="BHqk", is_causal=True, window=(9, None)),
    PLAIN.but(mask="additive"),
    PLAIN.but(mask="additive", mask_shape="Bhqk", key_heads=2),
    PLAIN.but(mask="additive", mask_shape="BHqk"),
    PLAIN.but(mask="additive", mask_shape="bk"),
    PLAIN.but(mask="float32", mask_shape="hk", is_causal=True),
    PLAIN.but(alibi="heads"),
    PLAIN.but(alibi="batch", causal_alignment="bottom_right", is_causal=True),
    PLAIN.but(softcap=1.5),
    PLAIN.but(softcap=0.7, mask="additive", scale=1.3),
    PLAIN.but(dropout_p=0.3),
    PLAIN.but(dropout_p=1.0),
    PLAIN.but(dropout_p=0.5, key_heads=2, is_causal=True, mask="bool", alibi="heads", softcap=2.0),
    PLAIN.but(queries=1),
    PLAIN.but(keys=1),
    PLAIN.but(queries=1, keys=1, width=1, value_width=1, heads=1, key_heads=1),
    PLAIN.but(queries=1, keys=333, batch=1, is_causal=True, causal_alignment="bottom_right", key_heads=1),
    PLAIN.but(queries=3, keys=700, batch=1, heads=2, key_heads=2, mask="additive", mask_shape="bk"),
    PLAIN.but(lengths=((5, 5), (0, 3), (17, 30), (4, 0), (1, 1))),
    PLAIN.but(lengths=((9, 9), (33, 20)), is_causal=True, key_heads=2, alibi="batch"),
    PLAIN.but(lengths=((9, 12), (33, 50)), is_causal=True, causal_alignment="bottom_right", window=(6, None)),
    PLAIN.but(lengths=((9, 12), (33, 50)), dropout_p=0.4, softcap=1.0, value_width=5),
]
LONG = [  # across the borders of tiles
    PLAIN.but(batch=1, heads=2, key_heads=2, queries=300, keys=300, width=64, value_width=64),
    PLAIN.but(batch=1, heads=2, key_heads=2, queries=257, keys=391, width=33, value_width=64, is_causal=True),
    PLAIN.but(batch=1, heads=2, key_heads=1, queries=391, keys=257, width=80, value_width=20, window=(70, 30)),
    PLAIN.but(
        batch=1,
        heads=2,
        key_heads=1,
        queries=200,
        keys=521,
        width=16,
        value_width=16,
        mask="additive",
        mask_shape="Bhqk",
    ),
    PLAIN.but(
        batch=1,
        heads=2,
        key_heads=2,
        queries=200,
        keys=321,
        width=16,
        value_width=16,
        dropout_p=0.2,
        mask="bool",
        mask_shape="bk",
    ),
    PLAIN.but(heads=2, key_heads=2, width=32, value_width=32, lengths=((150, 150), (1, 220), (260, 7)), is_causal=True),
]
LONG_MASK = PLAIN.but(batch=1, heads=2, key_heads=2, queries=2500, keys=3400, mask="additive", mask_shape="BHqk")
EMPTY = [
    PLAIN.but(batch=0),
    PLAIN.but(heads=0, key_heads=0),
    PLAIN.but(queries=0),
    PLAIN.but(keys=0),
    PLAIN.but(width=0),
    PLAIN.but(value_width=0),
    PLAIN.but(lengths=()),
    PLAIN.but(lengths=((0, 0), (0, 0))),
    PLAIN.but(keys=0, mask="additive"),
]
