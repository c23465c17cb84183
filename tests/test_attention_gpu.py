"""Attention's GPU kernels: their tiles, tensor cores, split keys, and what they do with numbers that are not finite."""

from __future__ import annotations

import math

import pytest
import torch
from attention_cases import PLAIN, Case
from emulation import EMULATORS
from helpers import HALF_DTYPES, assert_as_accurate, random_tensor
from torch import Tensor

from myvision.ops import scaled_dot_product_attention

GPUS = pytest.mark.parametrize("device", [*EMULATORS, "cuda"], indirect=True)
WITH_MMA = pytest.mark.parametrize("device", ["emulated", "cuda"], indirect=True)

ONE = PLAIN.but(batch=1, heads=2, key_heads=2, width=16, value_width=16)
TILES = [  # around a tile of 64 rows, and of 64, 32 or 16 columns
    ONE.but(queries=64, keys=64),
    ONE.but(queries=63, keys=65, width=64, value_width=64, is_causal=True),
    ONE.but(queries=130, keys=131, is_causal=True, causal_alignment="bottom_right"),
    ONE.but(queries=65, keys=200, window=(40, 20), causal_alignment="bottom_right"),
    ONE.but(queries=130, keys=130, window=(1, 1)),  # a tile's last key is seen by the first query of another tile
    ONE.but(queries=70, keys=33, width=72, value_width=128),
    ONE.but(queries=33, keys=70, width=128, value_width=8, is_causal=True),
    ONE.but(queries=20, keys=40, width=256, value_width=256),
    ONE.but(queries=65, keys=34, width=136, value_width=24, key_heads=1, is_causal=True),
]
OPTIONS = [
    ONE.but(queries=70, keys=70, mask="bool", key_heads=1),
    ONE.but(queries=70, keys=70, mask="additive", mask_shape="bk", softcap=1.5),
    ONE.but(queries=70, keys=70, mask="float32", mask_shape="bk", is_causal=True),
    ONE.but(queries=66, keys=80, alibi="batch", softcap=0.9, is_causal=True),
    ONE.but(queries=70, keys=69, dropout_p=0.4, is_causal=True, key_heads=1),
    ONE.but(queries=70, keys=69, dropout_p=0.2, mask="additive", window=(30, None), scale=0.1),
    ONE.but(lengths=((70, 66), (0, 9), (3, 0), (1, 65), (64, 64)), key_heads=1, is_causal=True),
    ONE.but(lengths=((5, 70), (66, 20)), dropout_p=0.3, window=(20, 10), causal_alignment="bottom_right"),
]


@pytest.mark.parametrize("case", [*TILES, *OPTIONS], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@WITH_MMA
def test_tensor_cores(case: Case, dtype: torch.dtype, device: str) -> None:
    check_without_mask_of_float32(case, dtype, device)


@pytest.mark.parametrize("case", [*TILES[:4], TILES[7], *OPTIONS], ids=str)
@GPUS
def test_single_threads(case: Case, device: str) -> None:
    case.check(torch.float32, device)


def check_without_mask_of_float32(case: Case, dtype: torch.dtype, device: str) -> None:
    """The gradient of a mask of float32 is as exact as query's type allows, which the common gate cannot know."""
    for name, actual, plain, oracle in case.results(dtype, device, "heads_inside", "heads_inside"):
        atol = 2 * torch.finfo(dtype).eps * oracle.abs().max() if actual.dtype != dtype and oracle.numel() else 0
        assert_as_accurate(actual, plain, oracle, atol=float(atol) + 4 * torch.finfo(torch.float32).eps), name


def unaligned(tensor: Tensor) -> Tensor:
    """The same rows where they cannot be copied 16 bytes at a time."""
    return torch.nn.functional.pad(tensor, (1, 0))[..., 1:]


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 128, 256])
@GPUS
def test_aligned_rows_of_half_types_go_to_the_tensor_cores(
    width: int, dtype: torch.dtype, device: str, request: pytest.FixtureRequest
) -> None:
    """Where there are any: weights are rounded for them, so other bits come out than where rows are not aligned."""
    tensors = [random_tensor(1, 1, 64, width, dtype=dtype, device=device, seed=i) for i in range(3)]
    grad = random_tensor(1, 1, 64, width, dtype=dtype, device=device, seed=3)

    def run(tensors: list[Tensor]) -> list[Tensor]:
        leaves = [tensor.requires_grad_() for tensor in tensors]
        output = scaled_dot_product_attention(*leaves)
        return [output.detach(), *torch.autograd.grad(output, leaves, grad)]

    has_mma = request.node.callspec.params["device"] != "emulated_64"
    for fast, plain in zip(run(tensors), run([unaligned(tensor) for tensor in tensors]), strict=True):
        assert torch.equal(fast, plain) != has_mma
        torch.testing.assert_close(fast, plain, rtol=2e-2, atol=2e-2)


SPLIT = [
    ONE.but(queries=1, keys=1100),
    ONE.but(queries=3, keys=1030, key_heads=1, is_causal=True, causal_alignment="bottom_right"),
    ONE.but(queries=2, keys=1025, window=(300, None), causal_alignment="bottom_right", value_width=40),
    ONE.but(queries=4, keys=1024, mask="bool", alibi="heads", dropout_p=0.3),
    ONE.but(lengths=((1, 700), (2, 900), (0, 5), (1, 0)), softcap=2.0),
]


@pytest.mark.parametrize("case", SPLIT, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@GPUS
def test_keys_are_split_where_queries_are_few(case: Case, dtype: torch.dtype, device: str) -> None:
    case.check(dtype, device)


@GPUS
def test_splits_that_see_nothing_count_nothing(device: str) -> None:
    """Splits of which a query sees no key, and a query that sees none at all."""
    case = ONE.but(queries=2, keys=1024)
    query, key, value, *_ = case.tensors(torch.float32, device)
    seen = torch.zeros(2, 1024, dtype=torch.bool, device=device)
    seen[0, 5], key[:, :, 900:], value[:, :, 900:] = True, math.nan, math.nan
    output, lse = scaled_dot_product_attention(query, key, value, seen, return_lse=True)
    torch.testing.assert_close(output[:, :, 0], value[:, :, 5])
    assert (output[:, :, 1] == 0).all()
    assert (lse[:, :, 1] == -torch.inf).all()


@pytest.mark.parametrize("mask_shape", ["bhqk", "hqk", "bqk", "qk", "bk", "k", "bq", "h", ""])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@GPUS
def test_the_gradient_of_any_mask(mask_shape: str, dtype: torch.dtype, device: str) -> None:
    PLAIN.but(heads=2, key_heads=1, queries=67, keys=70, width=8, mask="additive", mask_shape=mask_shape).check(
        dtype, device
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("least", ["min", -1e9])
@GPUS
def test_gradients_of_rows_of_large_numbers(least: str | float, dtype: torch.dtype, device: str) -> None:
    """Beside which the logarithm of the number of keys is lost in lse: probabilities must add up to 1 all the same."""
    key, value = (random_tensor(1, 1, 40, 8, dtype=dtype, device=device, seed=i) for i in range(2))
    query = torch.zeros_like(key)
    mask = torch.zeros(40, 40, dtype=dtype, device=device)
    mask[7] = torch.finfo(dtype).min if least == "min" else least
    grad = random_tensor(1, 1, 40, 8, dtype=dtype, device=device, seed=3)
    grad[:, :, :7], grad[:, :, 8:] = 0, 0
    value.requires_grad_()
    (actual,) = torch.autograd.grad(scaled_dot_product_attention(query, key, value, mask), value, grad)
    torch.testing.assert_close(actual, (grad[:, :, 7:8] / 40).expand_as(value), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [16, 136])
@GPUS
def test_what_is_not_seen_reaches_nothing(poison: float, dtype: torch.dtype, width: int, device: str) -> None:
    """Keys that some queries do not see, and queries that see nothing, within one tile and across."""
    query, key, value, grad = (random_tensor(1, 1, 70, width, dtype=dtype, device=device, seed=i) for i in range(4))
    seen = torch.ones(70, 70, dtype=torch.bool, device=device)
    seen[:66, 30:68] = False  # the last queries see all keys
    seen[11] = False
    grad[:, :, 66:] = 0

    def run(query: Tensor, key: Tensor, value: Tensor, grad: Tensor) -> list[Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        output = scaled_dot_product_attention(*leaves, seen)
        return [output.detach(), *torch.autograd.grad(output, leaves, grad)]

    expected = run(query, key, value, grad)
    hidden_query, hidden_grad = query.clone(), grad.clone()
    hidden_query[:, :, 11], hidden_grad[:, :, 11] = poison, poison
    torch.testing.assert_close(run(hidden_query, key, value, hidden_grad), expected)
    hidden_value = value.clone()
    hidden_value[:, :, 40, 5], hidden_value[:, :, 67] = poison, poison
    output, grad_query, *_ = run(query, key, hidden_value, grad)
    torch.testing.assert_close(output[:, :, :66], expected[0][:, :, :66])
    torch.testing.assert_close(grad_query[:, :, :66], expected[1][:, :, :66])
    assert not output[:, :, 66:].isfinite().any()
    hidden_value[:, :, 67] = value[:, :, 67]
    output = run(query, key, hidden_value, grad)[0]
    torch.testing.assert_close(output[:, :, 66:, 5], torch.full_like(output[:, :, 66:, 5], poison), equal_nan=True)
    assert output[:, :, 66:, 6:].isfinite().all()


@pytest.mark.parametrize("case", [TILES[2], OPTIONS[4], SPLIT[0]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@GPUS
def test_every_run_gives_the_same_bits(case: Case, dtype: torch.dtype, device: str) -> None:
    tensors, grads = case.tensors(dtype, device), case.grad_outputs(dtype, device)
    first, second = ([*case.run(tensors), *case.gradients(tensors, grads).values()] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
