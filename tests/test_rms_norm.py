"""rms_norm: what sets it apart from the other norms."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import random_tensor
from norm_cases import Case

from myvision.ops import rms_norm


@pytest.mark.parametrize("normalized_shape", [(7,), (5, 7), (3, 5, 7)], ids=str)
def test_is_torchs_function(normalized_shape: tuple[int, ...], device: str) -> None:
    input = random_tensor(3, 5, 7, device=device)
    weight = random_tensor(*normalized_shape, device=device, seed=1)
    torch.testing.assert_close(rms_norm(input, normalized_shape), F.rms_norm(input, normalized_shape))
    expected = F.rms_norm(input, normalized_shape, weight, 1e-3)
    torch.testing.assert_close(rms_norm(input, list(normalized_shape), weight, 1e-3), expected)


def test_default_eps_is_torchs(floating_dtype: torch.dtype, device: str) -> None:
    """It depends on the type; small values show it."""
    input = random_tensor(3, 64, dtype=torch.float64, device=device).mul(1e-8).to(floating_dtype)
    if floating_dtype == torch.float16:
        input = input * 0 + 2**-24
    torch.testing.assert_close(rms_norm(input, (64,)), F.rms_norm(input, (64,)))


def test_zeros_stay_zeros(floating_dtype: torch.dtype, device: str) -> None:
    assert not rms_norm(torch.zeros(3, 70, dtype=floating_dtype, device=device), (70,)).any()


@pytest.mark.parametrize("shape", [(2, 6), (2, 6, 5), (2, 6, 5, 4), (2, 6, 3, 2, 4)], ids=str)
def test_channels_first_needs_no_permute(shape: tuple[int, ...], layout: str, device: str) -> None:
    Case("rms_norm", shape, channels="first", activation="silu").check(torch.float32, device, layout)
