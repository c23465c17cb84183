"""Attention: values and gradients over the product of options, torch's own as a peer, masks, dropout, memory."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_cases import CASES, EMPTY, LONG, LONG_MASK, PLAIN, SEED, Case
from helpers import HALF_DTYPES, assert_as_accurate, num_threads, random_tensor, run_python
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from myvision._formulas._dropout import philox
from myvision.ops import scaled_dot_product_attention, varlen_attention

GRAD_LAYOUTS = ["heads_inside", "contiguous", "sliced"]
WIDTHS = [8, 64]  # of a head: rows of whole vectors that lie next to each other are read where they are


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_reference(case: Case, floating_dtype: torch.dtype, device: str) -> None:
    case.check(floating_dtype, device)


@pytest.mark.parametrize("case", LONG, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_across_the_borders_of_tiles(case: Case, dtype: torch.dtype, real_device: str) -> None:
    case.check(dtype, real_device)


@pytest.mark.parametrize("layout", ["contiguous", "packed_qkv", "permuted", "sliced", "offset"])
@pytest.mark.parametrize("grad_layout", GRAD_LAYOUTS)
def test_layouts(layout: str, grad_layout: str, device: str) -> None:
    for case in (PLAIN.but(is_causal=True), PLAIN.but(lengths=((9, 12), (33, 50)))):
        case.check(torch.float32, device, layout, grad_layout)
        case.check(torch.bfloat16, device, layout, grad_layout)


@pytest.mark.parametrize("case", LONG, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rows_next_to_each_other(case: Case, dtype: torch.dtype, real_device: str) -> None:
    case.but(width=64, value_width=64).check(dtype, real_device, "contiguous", "contiguous")


@pytest.mark.parametrize("mask_shape", ["qk", "hq", "bk", "hk", "bhqk"])
def test_the_gradient_of_a_mask_across_the_borders_of_tiles(mask_shape: str, real_device: str) -> None:
    case = PLAIN.but(batch=3, key_heads=2, queries=150, keys=210, mask="additive", mask_shape=mask_shape)
    case.but(is_causal=True).check(torch.float32, real_device)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.exhaustive)])
def test_the_gradient_of_a_long_mask(dtype: torch.dtype, real_device: str) -> None:
    """In phases: all of its sums at once would take more than 32 MB."""
    LONG_MASK.check(dtype, real_device)


@pytest.mark.parametrize("case", EMPTY, ids=str)
def test_empty(case: Case, device: str) -> None:
    case.check(torch.float32, device)


cases = st.builds(
    Case,
    batch=st.integers(1, 2),
    heads=st.sampled_from([2, 4]),
    key_heads=st.sampled_from([1, 2]),
    queries=st.integers(1, 100),
    keys=st.integers(1, 100),
    width=st.integers(1, 40),
    value_width=st.integers(1, 40),
    mask=st.sampled_from([None, "bool", "additive"]),
    mask_shape=st.sampled_from(["bhqk", "bk", "q", "BHqk", "Bhk", ""]),
    alibi=st.sampled_from([None, "heads", "batch"]),
    dropout_p=st.sampled_from([0.0, 0.25]),
    is_causal=st.booleans(),
    causal_alignment=st.sampled_from(["top_left", "bottom_right"]),
    window=st.tuples(*[st.one_of(st.none(), st.integers(0, 100))] * 2),
    softcap=st.sampled_from([0.0, 1.5]),
)


@given(case=cases)
def test_any_options(case: Case) -> None:
    case.check()


# ---- torch's own -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (2, 3, 5, 8), (2, 2, 3, 5, 8)])
def test_drops_in_for_torch(shape: tuple[int, ...], is_causal: bool, floating_dtype: torch.dtype) -> None:
    query, key, value = (random_tensor(*shape, dtype=floating_dtype, seed=seed) for seed in range(3))
    oracle = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), is_causal=is_causal)
    plain = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
    actual = scaled_dot_product_attention(query, key, value, is_causal=is_causal)
    assert_as_accurate(actual, plain, oracle, atol=1e-6)
    output, lse = scaled_dot_product_attention(query, key, value, is_causal=is_causal, return_lse=True)
    assert torch.equal(output, actual)
    assert lse.shape == query.shape[:-1]


@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 4, 5, 8), (1, 4, 7, 8), (2, 4, 7, 6)),
        ((2, 4, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8)),
        ((2, 4, 5, 8), (2, 4, 7, 8), (2, 1, 7, 8)),
        ((2, 1, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)),
        ((4, 5, 8), (2, 4, 7, 8), (7, 8)),
        ((3, 1, 4, 5, 8), (2, 4, 7, 8), (3, 2, 4, 7, 8)),
    ],
    ids=str,
)
def test_broadcasts_like_products(shapes: tuple[tuple[int, ...], ...]) -> None:
    tensors = [random_tensor(*shape, dtype=torch.float64, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    query, key, value = tensors
    expected = torch.softmax(query @ key.transpose(-1, -2) / math.sqrt(8), -1) @ value
    actual = scaled_dot_product_attention(*tensors)
    torch.testing.assert_close(actual, expected)
    grad = random_tensor(*expected.shape, dtype=torch.float64, seed=9)
    torch.testing.assert_close(torch.autograd.grad(actual, tensors, grad), torch.autograd.grad(expected, tensors, grad))


@pytest.mark.parametrize(
    "mask_shape", [(), (7,), (1,), (5, 7), (1, 7), (4, 5, 7), (1, 5, 1), (3, 1, 1, 7), (2, 3, 1, 5, 7), (2, 1, 4, 5, 7)]
)
@pytest.mark.parametrize("boolean", [False, True])
def test_masks_of_any_rank(mask_shape: tuple[int, ...], boolean: bool) -> None:
    query, key, value = (random_tensor(2, 3, 4, n, 8, seed=i) for i, n in enumerate((5, 7, 7)))
    mask = random_tensor(*mask_shape, seed=4)
    mask = mask > -1 if boolean else mask.requires_grad_()
    expected = F.scaled_dot_product_attention(query, key, value, mask)
    actual = scaled_dot_product_attention(query, key, value, mask)
    torch.testing.assert_close(actual, expected)
    if not boolean:
        grad = random_tensor(*expected.shape, seed=5)
        gradients = [torch.autograd.grad(output, mask, grad)[0] for output in (actual, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_grouped_heads_as_torch_has_them() -> None:
    query, key = random_tensor(2, 6, 5, 8), random_tensor(2, 2, 7, 8, seed=1)
    expected = F.scaled_dot_product_attention(query, key, key, enable_gqa=True)
    torch.testing.assert_close(scaled_dot_product_attention(query, key, key, enable_gqa=True), expected)
    with pytest.raises(RuntimeError, match="query has 6 heads and key 2; enable_gqa=True"):
        scaled_dot_product_attention(query, key, key)


def test_one_number_is_a_window_to_both_sides() -> None:
    query, key, value = random_tensor(3, 1, 2, 9, 4)
    both = scaled_dot_product_attention(query, key, value, window=(2, 2))
    assert torch.equal(scaled_dot_product_attention(query, key, value, window=2), both)
    assert not torch.equal(scaled_dot_product_attention(query, key, value), both)


def test_packed_sequences_are_those_alone() -> None:
    lengths = [3, 0, 8, 1]
    query, key, value = random_tensor(3, sum(lengths), 2, 4)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    packed, lse = varlen_attention(query, key, value, ends, ends, is_causal=True, return_lse=True)
    for start, end in pairwise(ends):
        q, k, v = (rows[start:end].transpose(0, 1) for rows in (query, key, value))
        output, own_lse = scaled_dot_product_attention(q, k, v, is_causal=True, return_lse=True)
        torch.testing.assert_close(packed[start:end].transpose(0, 1), output)
        torch.testing.assert_close(lse[:, start:end], own_lse)


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_queries_that_see_no_key(device: str, floating_dtype: torch.dtype) -> None:
    query, key, value = (random_tensor(1, 2, 70, 8, dtype=floating_dtype, device=device, seed=i) for i in range(3))
    seen = torch.ones(70, 70, dtype=torch.bool, device=device)
    seen[3:40] = False
    for mask in (seen, torch.zeros_like(query[0, 0] @ query[0, 0].T).masked_fill(~seen, -torch.inf)):
        leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        output, lse = scaled_dot_product_attention(*leaves, mask, return_lse=True)
        assert (output[:, :, 3:40] == 0).all()
        assert (lse[:, :, 3:40] == -torch.inf).all()
        assert (output[:, :, 40:] != 0).any(-1).all()
        gradients = torch.autograd.grad(output.float().square().sum() + output.sum(), leaves)
        assert (gradients[0][:, :, 3:40] == 0).all()
        assert all(gradient.isfinite().all() for gradient in gradients)


def test_rows_of_the_least_number_give_the_mean(device: str, floating_dtype: torch.dtype) -> None:
    """As torch's formula does: what is added to it is lost by rounding."""
    query, key, value = (random_tensor(1, 1, 37, 8, dtype=floating_dtype, device=device, seed=i) for i in range(3))
    mask = torch.zeros(37, 37, dtype=floating_dtype, device=device)
    mask[5] = torch.finfo(floating_dtype).min
    output = scaled_dot_product_attention(query, key, value, mask)
    if floating_dtype != torch.float16:  # whose least number is no bound to float32
        torch.testing.assert_close(output[0, 0, 5], value[0, 0].mean(0), rtol=1e-2, atol=1e-2)
    plain = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), mask.double())
    rows = [i for i in range(37) if i != 5]
    tolerance = 2e-2 if floating_dtype in HALF_DTYPES else 1e-5
    torch.testing.assert_close(output[0, 0, rows].double(), plain[0, 0, rows], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("hidden_by", ["bool", "additive", "causal", "window", "padding"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_hidden_keys_do_not_leak(
    softcap: float | None, width: int, poison: float, hidden_by: str, dtype: torch.dtype, device: str
) -> None:
    length, hidden = 75, 50
    query, key, value = (random_tensor(1, 2, length, width, dtype=dtype, device=device, seed=i) for i in range(3))
    seen = torch.ones(length, length, dtype=torch.bool, device=device)
    options: dict[str, Any] = {}
    if hidden_by == "causal":
        options, seen = {"is_causal": True}, seen.tril()
    elif hidden_by == "window":
        options, seen = {"window": (None, 3)}, seen.tril(3)
    elif hidden_by == "padding":
        seen = seen[0].clone()[None, None, None]
        seen[..., hidden:] = False
        options = {"attn_mask": seen}
    else:
        seen[:40, hidden:] = False
        mask = torch.zeros(length, length, dtype=dtype, device=device).masked_fill(~seen, -torch.inf)
        options = {"attn_mask": seen if hidden_by == "bool" else mask}
    ignorant = (
        seen.expand(1, 2, length, length)[0, 0, :, hidden:].any(-1).logical_not()
    )  # queries that see none of them
    assert ignorant.sum() >= 40
    grad = random_tensor(1, 2, length, width, dtype=dtype, device=device, seed=4)
    grad[:, :, ~ignorant] = 0

    def run(key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        output = scaled_dot_product_attention(*leaves, **options, softcap=softcap)
        return output.detach(), *torch.autograd.grad(output, leaves, grad)

    poisoned_key, poisoned_value = key.clone(), value.clone()
    poisoned_key[:, :, hidden:] = poison
    poisoned_value[:, :, hidden:] = poison
    for tensors in ((poisoned_key, value), (key, poisoned_value), (poisoned_key, poisoned_value)):
        output, grad_query, grad_key, grad_value = run(*tensors)
        expected, expected_grad_query, *_ = run(key, value)
        torch.testing.assert_close(output[:, :, ignorant], expected[:, :, ignorant])
        torch.testing.assert_close(grad_query[:, :, ignorant], expected_grad_query[:, :, ignorant])
        if hidden_by == "padding":
            assert (grad_key[:, :, hidden:] == 0).all()
            assert (grad_value[:, :, hidden:] == 0).all()
            assert grad_key.isfinite().all()
            assert grad_value.isfinite().all()
        else:
            assert not output[:, :, -1].isfinite().all(), "who sees the key must see that it is NaN"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_blind_queries_do_not_leak(softcap: float | None, width: int, device: str) -> None:
    """NaN in a query that sees nothing, and in the gradient of its output, reaches no key."""
    leaves = [random_tensor(1, 2, 40, width, device=device, seed=i) for i in range(3)]
    leaves[0][:, :, 7] = math.nan
    leaves = [leaf.requires_grad_() for leaf in leaves]
    seen = torch.ones(40, 40, dtype=torch.bool, device=device)
    seen[7] = False
    output = scaled_dot_product_attention(*leaves, seen, softcap=softcap)
    grad = random_tensor(1, 2, 40, width, device=device, seed=4)
    grad[:, :, 7] = math.nan
    assert output.isfinite().all()
    for gradient in torch.autograd.grad(output, leaves, grad):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("width", WIDTHS)
def test_live_nan_propagates(width: int, device: str) -> None:
    for name in ("query", "key", "value"):
        tensors = {
            n: random_tensor(1, 1, 33, width, device=device, seed=i) for i, n in enumerate(("query", "key", "value"))
        }
        tensors[name][:, :, 20, 3] = math.nan
        output = scaled_dot_product_attention(*tensors.values())
        if name == "query":
            assert output[0, 0, 20].isnan().all()
            assert output[0, 0, :20].isfinite().all()
        elif name == "key":
            assert output.isnan().all()
        else:
            assert output[..., 3].isnan().all()
            assert output[..., :3].isfinite().all()


def test_huge_scores(device: str) -> None:
    """The largest scores are subtracted first: nothing overflows."""
    query, key, value = (random_tensor(1, 1, 50, 16, device=device, seed=i) for i in range(3))
    exact = F.scaled_dot_product_attention(1e4 * query.double(), key.double(), value.double())
    torch.testing.assert_close(
        scaled_dot_product_attention(1e4 * query, key, value).double(), exact, rtol=1e-3, atol=1e-3
    )


def test_lse_merges_partial_results(device: str) -> None:
    """What lse is for: attention over two halves of the keys, put together, is attention over all."""
    query, key, value = (random_tensor(1, 2, n, 8, device=device, seed=i) for i, n in enumerate((9, 40, 40)))
    whole, whole_lse = scaled_dot_product_attention(query, key, value, return_lse=True)
    halves = [
        scaled_dot_product_attention(query, key[:, :, part], value[:, :, part], return_lse=True)
        for part in (slice(0, 13), slice(13, 40))
    ]
    lses = torch.stack([lse for _, lse in halves])
    torch.testing.assert_close(torch.logsumexp(lses, 0), whole_lse)
    shares = torch.softmax(lses, 0)
    torch.testing.assert_close(sum(s[..., None] * o for s, (o, _) in zip(shares, halves, strict=True)), whole)


def test_output_lies_as_query_does(device: str) -> None:
    for layout in ("heads_inside", "contiguous", "packed_qkv"):
        query, key, value, *_ = PLAIN.tensors(device=device, layout=layout)
        leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
        output = scaled_dot_product_attention(*leaves)
        inside = layout != "contiguous"
        assert output.transpose(1, 2).is_contiguous() == inside
        assert output.is_contiguous() == (not inside)
        for gradient in torch.autograd.grad(output.sum(), leaves):
            assert gradient.transpose(1, 2).is_contiguous() == inside


# ---- dropout ---------------------------------------------------------------------------------------------------------


def kept(case: Case, device: str = "cpu", seed: int = SEED) -> Tensor:
    """Which probabilities were kept: with equal scores and the identity as values the output shows them."""
    query = torch.zeros(case.batch, case.heads, case.queries, 4, device=device)
    key = torch.zeros(case.batch, case.heads, case.keys, 4, device=device)
    value = torch.eye(case.keys, device=device).expand(case.batch, case.heads, -1, -1)
    tensors = query, key, value, None, None, None, None, torch.tensor(seed, device=device)
    return torch.ops.myvision.attention(*tensors, *case.but(dropout_p=0.3).options()) != 0


def test_dropout_follows_its_generator(device: str) -> None:
    """Row r counts from r * ceil(keys / 4); four neighbours share a counter."""
    case = Case(batch=2, heads=3, queries=5, keys=30)
    rows = torch.arange(2 * 3 * 5).reshape(2, 3, 5, 1)
    key = torch.arange(30)
    words = torch.stack(philox(torch.tensor(SEED), rows * 8 + key // 4), -1)
    word = words.gather(-1, (key % 4).expand(2, 3, 5, 30).unsqueeze(-1)).squeeze(-1)
    assert torch.equal(kept(case, device).cpu(), word >= int(0.3 * 2**32))


def test_dropout_is_random() -> None:
    """Counts of rows, of columns and of pairs of neighbours, within 5 standard deviations of chance."""
    mask = kept(Case(batch=2, heads=4, queries=200, keys=203)).double()
    p, n = 0.7, mask.numel()

    def assert_by_chance(count: Tensor, trials: float, chance: float) -> None:
        deviation = math.sqrt(trials * chance * (1 - chance))
        assert (count - trials * chance).abs().max() < 5 * deviation

    assert_by_chance(mask.sum(), n, p)
    assert_by_chance(mask.sum(-1), 203, p)
    assert_by_chance(mask.sum((0, 1, 2)), n / 203, p)
    for distance in (1, 2, 3, 4, 5, 8):
        pairs = mask[..., distance:] * mask[..., :-distance]
        assert_by_chance(pairs.sum(), pairs.numel(), p * p)
    between_rows = mask[:, :, 1:] * mask[:, :, :-1]
    assert_by_chance(between_rows.sum(), between_rows.numel(), p * p)
    between_seeds = mask * kept(Case(batch=2, heads=4, queries=200, keys=203), seed=SEED + 1)
    assert_by_chance(between_seeds.sum(), n, p * p)


def test_dropout_repeats_by_torch_s_seed(device: str) -> None:
    query, key, value = random_tensor(3, 2, 2, 33, 8, device=device)

    def run() -> Tensor:
        torch.manual_seed(3)
        return scaled_dot_product_attention(query, key, value, dropout_p=0.5)

    first = run()
    assert torch.equal(run(), first)
    assert not torch.equal(scaled_dot_product_attention(query, key, value, dropout_p=0.5), first)


def test_dropout_keeps_the_mean(real_device: str) -> None:
    query, key, value = random_tensor(3, 2, 2, 33, 8, device=real_device)
    expected = scaled_dot_product_attention(query, key, value)
    mean = sum(scaled_dot_product_attention(query, key, value, dropout_p=0.5) for _ in range(400)) / 400
    torch.testing.assert_close(mean, expected, rtol=0, atol=0.25)


# ---- one result whatever the machine does ----------------------------------------------------------------------------


SAME = [
    PLAIN,
    LONG[1],
    LONG[3],
    LONG[4],
    LONG[5],
    LONG_MASK,
    PLAIN.but(batch=3, queries=150, keys=150, mask="additive", mask_shape="BHqk"),
    PLAIN.but(batch=1, queries=1, keys=3000, key_heads=1),
    PLAIN.but(batch=1, heads=1, key_heads=1, queries=700, keys=700, is_causal=True),
]


@pytest.mark.parametrize("case", SAME, ids=str)
def test_any_number_of_threads_gives_the_same_bits(case: Case, real_device: str) -> None:
    results = []
    for threads in (1, 2, 3, 8, 2):
        with num_threads(threads):
            tensors = case.tensors(device=real_device)
            gradients = case.gradients(tensors, case.grad_outputs(torch.float32, real_device))
            results.append([*case.run(tensors), *gradients.values()])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_every_instruction_set(instruction_set: str) -> None:
    run_python(
        """
import torch
from attention_cases import CASES, LONG
dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
for i, case in enumerate([*CASES, *LONG]):
    case.check(dtypes[i % 4])
    case.check(dtypes[(i // 4 + i + 1) % 4])
print(torch.ops.myvision._cpu_capability())
""",
        instruction_set,
    )


def test_memory_grows_with_the_length() -> None:
    """No scores: 16,384 x 16,384 of them would be 1 GB."""
    extra = run_python(
        """
import torch
from benchmarks.harness import extra_memory
from myvision.ops import scaled_dot_product_attention
query, key, value = torch.randn(3, 1, 1, 16384, 64).unbind()
leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
grad = torch.randn(1, 1, 16384, 64)
def run():
    return torch.cat(torch.autograd.grad(scaled_dot_product_attention(*leaves), leaves, grad))
small = [tensor[:, :, :64].detach().requires_grad_() for tensor in leaves]
torch.autograd.grad(scaled_dot_product_attention(*small), small, grad[:, :, :64])  # threads, caches
print(extra_memory(run, torch.device("cpu")))
"""
    )
    results = 3 * 16384 * 64 * 4  # the gradients, before they are put together
    output = 16384 * 65 * 4
    assert int(extra) <= results + output + (64 << 20)
