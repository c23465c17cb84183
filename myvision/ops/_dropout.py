"""What operators with dropout share: its seed, and what they reject."""

from __future__ import annotations

import torch
from torch import Tensor

from myvision._checks import check, check_number, check_same_device, name_of


def new_seed(input: Tensor, dropout_p: float) -> Tensor | None:
    """A number of torch's default generator; None where nothing is dropped."""
    return torch.randint(2**63 - 1, (), device=input.device) if dropout_p > 0 else None


def check_probability(op: str, dropout_p: float) -> None:
    """In plain Python, as the functions call it: a compiled graph takes no check of a number that it does not know."""
    check_number(f"{op}: dropout_p", dropout_p)
    if not 0 <= dropout_p <= 1:
        raise RuntimeError(f"{op}: dropout_p must be between 0 and 1, but is {dropout_p:g}")


def check_dropout(op: str, dropout_p: float, seed: Tensor | None, input: Tensor, input_name: str = "input") -> None:
    check_probability(op, dropout_p)
    if dropout_p == 0:
        return
    check(op, seed is not None, lambda: "dropout needs a seed, but seed is None")
    assert seed is not None
    check(
        op,
        seed.dtype == torch.int64 and seed.dim() == 0,
        lambda: f"seed must be one int64 without dimensions, but is {name_of(seed.dtype)} of shape {tuple(seed.shape)}",
    )
    check_same_device(op, "seed", seed, input, input_name)
