"""Attention of scores up to 1e10: both passes make the same probabilities, whatever the way through the kernels.

With the identity as the gradient of the output, the gradient of value is the probabilities of backward.
"""

from __future__ import annotations

import math

import pytest
import torch
from attention_cases import PLAIN, Case
from helpers import HALF_DTYPES, random_tensor
from torch import Tensor

from myvision.ops import scaled_dot_product_attention

ONE = PLAIN.but(batch=1, heads=2, key_heads=2, width=16)
WAYS = [
    ONE.but(queries=1, keys=40, width=64),
    ONE.but(queries=4, keys=37, width=13, is_causal=True, causal_alignment="bottom_right", softcap=1e6),
    ONE.but(queries=3, keys=30, mask="float32", mask_shape="bk", alibi="heads", window=(20, None)),
    ONE.but(queries=2, keys=1100, key_heads=1),  # keys in pieces
    ONE.but(queries=4, keys=70, dropout_p=0.3),
    ONE.but(queries=70, keys=100, width=64),
    ONE.but(queries=70, keys=40, mask="additive", key_heads=1),
    ONE.but(queries=19, keys=40, width=13, mask="bool", alibi="heads", softcap=1e6, is_causal=True),
    ONE.but(queries=40, keys=70, window=(9, 7), dropout_p=0.3),
    ONE.but(lengths=((2, 30), (4, 3), (1, 9))),
    ONE.but(lengths=((5, 5), (17, 30), (0, 3)), is_causal=True, causal_alignment="bottom_right"),
]
MAGNITUDES = [1, 1e5, 1e10]


def probabilities(case: Case, tensors: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Of a call whose value is as wide as there are queries: output, lse, and the gradient of value, which are those of
    backward, as [key][query], summed over the heads that share one of key.
    """
    query, key, value, *others = tensors
    value = value.detach().requires_grad_()
    output, lse = case.run([query, key, value, *others])
    eye = torch.eye(output.shape[-3 if case.lengths else -2], case.value_width, dtype=output.dtype)
    grad = eye[:, None] if case.lengths else eye
    (gradient,) = torch.autograd.grad(output, value, grad.to(output.device).expand_as(output))
    return output.detach(), lse.detach(), gradient


def rows_last(case: Case, tensor: Tensor) -> Tensor:
    """[heads, length, width], in float64; those of query summed over what shares a head of key."""
    tensor = tensor.double().transpose(0, 1) if case.lengths else tensor.double()[0]
    return tensor.unflatten(0, (case.key_heads, -1)).sum(1)


@pytest.mark.parametrize("case", WAYS, ids=str)
def test_both_passes_make_the_same_probabilities(case: Case, floating_dtype: torch.dtype, device: str) -> None:
    rows = case.shape_of("query")[0 if case.lengths else 2]
    case = case.but(value_width=(rows + 7) // 8 * 8)
    rtol = 4 * torch.finfo(floating_dtype).eps if floating_dtype in HALF_DTYPES else 1e-5
    for magnitude in MAGNITUDES:
        case = case.but(scale=magnitude / math.sqrt(case.width))
        tensors = case.tensors(floating_dtype, device)
        output, lse, gradient = probabilities(case, tensors)
        output, backward, value = (rows_last(case, tensor) for tensor in (output, gradient, tensors[2]))
        again = backward[..., :rows].transpose(-1, -2) @ value
        torch.testing.assert_close(again, output, rtol=rtol, atol=8 * rtol, msg=lambda m, s=magnitude: f"{s:g}: {m}")
        if case.dropout_p == 0:
            sees = rows_last(case, (lse.transpose(0, 1) if case.lengths else lse)[..., None] > -torch.inf)
            sums = backward[..., :rows].sum(-2)
            torch.testing.assert_close(
                sums, sees[..., 0], rtol=2 * rtol, atol=0, msg=lambda m, s=magnitude: f"{s:g}: {m}"
            )


EXACT = [
    ONE.but(queries=3, keys=50),
    ONE.but(queries=2, keys=1100, key_heads=1),
    ONE.but(queries=70, keys=100, mask="additive", mask_shape="q"),
    ONE.but(queries=70, keys=50, key_heads=1, is_causal=True, softcap=0.0),
    ONE.but(lengths=((3, 30), (40, 21))),
]


@pytest.mark.parametrize("case", EXACT, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_equal_scores_share_a_row_however_large(case: Case, dtype: torch.dtype, device: str) -> None:
    """Products of small integers, which no order of summation rounds, by a power of 2: float64 has the same scores."""
    for exponent in (0, 12, 33):
        case = case.but(scale=2.0**exponent)
        tensors = case.tensors(dtype, device)
        tensors[0], tensors[1] = tensors[0].sign(), tensors[1].sign()
        if tensors[3] is not None:
            tensors[3] = tensors[3].sign() * 2**exponent  # -inf stays
        grads = case.grad_outputs(dtype, device)
        exact = [t.double() if t is not None and t.dtype.is_floating_point else t for t in tensors]
        actual = [*case.run(tensors), *case.gradients(tensors, grads).values()]
        oracle = [*case.run_reference(exact)]
        oracle += case.gradients(exact, [grad.double() for grad in grads], plain=True).values()
        for one, other in zip(actual, oracle, strict=True):
            seen = other.isfinite()
            size = float(other[seen].abs().max())
            eps = max(torch.finfo(dtype).eps, 1e-7)
            torch.testing.assert_close(one[~seen].double(), other[~seen])
            error = (one.double() - other)[seen].abs().max()
            assert error <= 16 * eps * size + 1e-12, f"scale {case.scale:g}: {error:.3g} of {size:.3g}"


@pytest.mark.parametrize("keys", [5, 600])
@pytest.mark.parametrize("queries", [1, 5])
def test_the_logarithm_of_the_number_of_keys_is_not_lost(queries: int, keys: int, device: str) -> None:
    query, key = torch.full((1, 1, queries, 4), 1e5, device=device), torch.full((1, 1, keys, 4), 1e5, device=device)
    value = random_tensor(1, 1, keys, 3, device=device).requires_grad_()
    output = scaled_dot_product_attention(query, key, value, scale=0.25)
    torch.testing.assert_close(output[0, 0, 0], value[0, 0].mean(0))
    (gradient,) = torch.autograd.grad(output.sum(), value)
    torch.testing.assert_close(gradient, torch.full_like(gradient, queries / keys))


def test_one_query_of_large_scores(device: str) -> None:
    torch.manual_seed(14)
    query, key = torch.randn(1, 1, 1, 64) * 1e4, torch.randn(1, 1, 40, 64) * 1e4
    value = torch.randn(1, 1, 40, 8).to(device).requires_grad_()
    output = scaled_dot_product_attention(query.to(device), key.to(device), value)
    (gradient,) = torch.autograd.grad(output.sum(), value)
    torch.testing.assert_close(gradient.sum(-2), torch.ones_like(gradient[..., 0, :]))


def test_a_mask_of_zeros_changes_no_gradient(device: str) -> None:
    query, key = (random_tensor(1, 2, n, 64, seed=i).to(device) * 1000 for i, n in enumerate((70, 129)))
    value = random_tensor(1, 2, 129, 8, seed=2).to(device).requires_grad_()
    grad = random_tensor(1, 2, 70, 8, seed=3).to(device)
    plain, masked = (
        torch.autograd.grad(scaled_dot_product_attention(query, key, value, mask), value, grad)[0]
        for mask in (None, torch.zeros(70, 129, device=device))
    )
    torch.testing.assert_close(masked, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [16, 13])
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("queries", [3, 70])
def test_the_gradient_of_a_mask_that_is_constant_along_keys(
    queries: int, dtype: torch.dtype, width: int, device: str
) -> None:
    """Softmax does not see such a mask, and lse moves as it does."""
    query, key, value = (
        random_tensor(1, 2, n, width, dtype=dtype, device=device, seed=i) for i, n in enumerate((queries, 90, 90))
    )
    mask = random_tensor(1, 2, queries, 1, device=device, seed=3).requires_grad_()
    output, lse = scaled_dot_product_attention(query, key, value, mask, return_lse=True)
    grads = random_tensor(*output.shape, dtype=dtype, device=device, seed=4), random_tensor(*lse.shape, device=device)
    (gradient,) = torch.autograd.grad((output, lse), mask, grads)
    torch.testing.assert_close(gradient[..., 0], grads[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_an_expanded_gradient_goes_the_way_of_its_copy(dtype: torch.dtype, device: str) -> None:
    leaves = [random_tensor(1, 2, 70, 16, dtype=dtype, device=device, seed=i).requires_grad_() for i in range(3)]
    output = scaled_dot_product_attention(*leaves, scale=1e3)
    ones = torch.ones(1, dtype=dtype, device=device).expand_as(output)
    expanded, copied = (torch.autograd.grad(output, leaves, grad, retain_graph=True) for grad in (ones, ones.clone()))
    for one, other in zip(expanded, copied, strict=True):
        assert torch.equal(one, other)
