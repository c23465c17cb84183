"""Sizes at which the GPU kernels of the norms take other ways: more than a block holds, and more than one part."""

from __future__ import annotations

import pytest
import torch
from helpers import with_layout
from norm_cases import Case
from test_norm import CHANNELS, FIRST, ROWS

import myvision
from myvision._formulas._dropout import keep_mask

# The longest rows that forward keeps in shared memory: what 48 KB hold beside 3 * 256 numbers of sums.
KEPT = {torch.float64: 5376, torch.float32: 11_520}
TOO_LONG = 12_100  # numbers of a row, in float32, for the shared memory of a block and the registers of backward


@pytest.mark.parametrize("case", ROWS, ids=str)
@pytest.mark.parametrize("length", [4096, 4100, TOO_LONG, TOO_LONG + 1])
def test_rows_around_what_a_block_holds(case: Case, length: int, device: str) -> None:
    case.but(shape=(3, length)).check(torch.float32, device)


@pytest.mark.parametrize("dtype", KEPT, ids=str)
@pytest.mark.parametrize("more", [0, 8])
def test_rows_around_what_forward_keeps(dtype: torch.dtype, more: int, device: str) -> None:
    Case("layer_norm", (1, KEPT[dtype] + more)).check(dtype, device)


@pytest.mark.parametrize("case", FIRST, ids=str)
@pytest.mark.parametrize("channels", [300, 600, 2900])
@pytest.mark.parametrize("width", [7, 8])
def test_channels_around_what_a_block_holds(case: Case, channels: int, width: int, device: str) -> None:
    """With fewer rows of a block the more channels there are."""
    case.but(shape=(1, channels, 3, width), activation="silu").check(torch.float32, device)


@pytest.mark.parametrize("case", CHANNELS, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "offset"])
def test_sets_that_are_cut_into_parts(case: Case, layout: str, device: str) -> None:
    case.but(shape=(2, 6, 72, 72), activation="relu").check(torch.float32, device, layout)


@pytest.mark.parametrize("op", ["add_layer_norm", "add_rms_norm"])
@pytest.mark.parametrize("layout", ["contiguous", "permuted"])
def test_dropout_of_long_rows(op: str, layout: str, device: str) -> None:
    """The sum is written once and read again; backward draws the same numbers."""
    p, seed = 0.4, torch.tensor(2**40 + 5, device=device)
    tensors = Case(op, (2, TOO_LONG)).tensors(torch.float32, device)
    input, residual = (with_layout(tensors[i], layout).requires_grad_() for i in (0, 3))
    affine = tensors[1:3] if op == "add_layer_norm" else tensors[1:2]
    output, sum = getattr(torch.ops.myvision, op)(input, residual, [TOO_LONG], *affine, 1e-5, p, seed)
    scale = keep_mask(input, p, seed) / (1 - p)
    torch.testing.assert_close(sum, input * scale + residual)
    norm = myvision.ops.layer_norm if op == "add_layer_norm" else myvision.ops.rms_norm
    torch.testing.assert_close(output, norm(sum, TOO_LONG, *affine))
    gradients = torch.autograd.grad([output, sum], [input, residual], [torch.ones_like(sum), residual])
    torch.testing.assert_close(gradients[0], gradients[1] * scale)
