"""Attention: bad input is told, in eager mode and in fake mode alike."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_cases import PLAIN, Case
from helpers import random_tensor
from torch import Tensor
from torch._subclasses import FakeTensorMode

from myvision.ops import scaled_dot_product_attention, varlen_attention

POSITIONS = {
    name: i
    for i, name in enumerate(
        ["query", "key", "value", "attn_mask", "alibi_slopes", "cu_seqlens_q", "cu_seqlens_k", "seed"]
    )
}
MASKED = PLAIN.but(mask="additive")
PACKED = PLAIN.but(lengths=((3, 4), (5, 6)))
FULL = PLAIN.but(mask="bool", alibi="batch", dropout_p=0.5)


def replaced(**changes: Callable[[Any], Any]) -> Callable[[list[Any]], list[Any]]:
    return lambda tensors: [
        changes[name](tensors[i]) if name in changes else tensors[i] for name, i in POSITIONS.items()
    ]


def none(_: Any) -> None:
    return None


# What is wrong -> (the call, what is done to its tensors, what the message says)
BAD: dict[str, tuple[Case, Callable[[list[Any]], list[Any]], str]] = {
    "integer query": (PLAIN, replaced(query=Tensor.long), "query must have dtype float64, .* but has int64"),
    "complex query": (PLAIN, replaced(query=lambda t: t + 0j), "query must have dtype .* but has complex64"),
    "key of another dtype": (
        PLAIN,
        replaced(key=Tensor.double),
        "key must have the dtype of query, float32, but has float64",
    ),
    "value of another dtype": (PLAIN, replaced(value=Tensor.half), "value must have the dtype of query, float32"),
    "query of 3 dimensions": (
        PLAIN,
        replaced(query=lambda t: t[0]),
        r"query must have 4 dimensions, \[batch, heads, length, width\], but has shape \(4, 19, 12\)",
    ),
    "value of 5 dimensions": (PLAIN, replaced(value=lambda t: t[None]), "value must have 4 dimensions"),
    "packed query of 4 dimensions": (
        PACKED,
        replaced(query=lambda t: t[None]),
        r"query must have 3 dimensions, \[rows, heads, width\]",
    ),
    "key of another batch": (PLAIN, replaced(key=lambda t: t[:1]), "query and key must have the same batch size"),
    "value of another batch": (PLAIN, replaced(value=lambda t: t[:1]), "key and value must have the same batch size"),
    "key of another width": (
        PLAIN,
        replaced(key=lambda t: t[..., :5]),
        r"query and key must have the same width, but query has shape \(2, 4, 19, 12\), key \(2, 4, 23, 5\)",
    ),
    "value of another length": (
        PLAIN,
        replaced(value=lambda t: t[:, :, :5]),
        "key and value must have the same length",
    ),
    "packed value of another length": (
        PACKED,
        replaced(value=lambda t: t[:5]),
        "key and value must have the same length",
    ),
    "value of other heads": (
        PLAIN,
        replaced(value=lambda t: t[:, :2]),
        "key and value must have the same number of heads",
    ),
    "heads that do not divide": (
        PLAIN,
        replaced(key=lambda t: t[:, :3], value=lambda t: t[:, :3]),
        "the heads of query must be a multiple of those of key",
    ),
    "no heads of key": (
        PLAIN,
        replaced(key=lambda t: t[:, :0], value=lambda t: t[:, :0]),
        "the heads of query must be a multiple of those of key",
    ),
    "integer mask": (
        MASKED,
        replaced(attn_mask=lambda t: torch.zeros_like(t, dtype=torch.int64)),
        "attn_mask must have dtype bool, float32 or that of query, float32, but has int64",
    ),
    "mask of half": (MASKED, replaced(attn_mask=Tensor.half), "attn_mask must have dtype bool, .* but has float16"),
    "mask of too many keys": (
        MASKED,
        replaced(attn_mask=lambda t: t[..., :22]),
        r"attn_mask must have at most 4 dimensions that broadcast to \(2, 4, 19, 23\), but has shape \(2, 4, 19, 22\)",
    ),
    "mask of other queries": (
        MASKED,
        replaced(attn_mask=lambda t: t[:, :, :18]),
        "attn_mask must have at most 4 dimensions",
    ),
    "mask of other heads": (MASKED, replaced(attn_mask=lambda t: t[:, :3]), "attn_mask must have at most 4 dimensions"),
    "mask of one dimension": (
        MASKED,
        replaced(attn_mask=lambda t: t[0, 0, 0, :5]),
        "attn_mask must have at most 4 dimensions",
    ),
    "mask of five dimensions": (
        MASKED,
        replaced(attn_mask=lambda t: t[None]),
        "attn_mask must have at most 4 dimensions",
    ),
    "causal mask of other queries": (
        MASKED.but(is_causal=True),
        replaced(attn_mask=lambda t: t[:, :, :18]),
        "attn_mask must have at most 4 dimensions",
    ),
    "mask of packed sequences": (
        PACKED,
        replaced(attn_mask=lambda _: torch.zeros(8, 10)),
        "attn_mask and cu_seqlens_q exclude each other",
    ),
    "slopes of another dtype": (
        FULL,
        replaced(alibi_slopes=Tensor.double),
        "alibi_slopes must have dtype float32, but has float64",
    ),
    "slopes of other heads": (
        FULL,
        replaced(alibi_slopes=lambda t: t[:, :3]),
        "alibi_slopes must have one number for each of the 4 heads",
    ),
    "slopes of another batch": (
        FULL,
        replaced(alibi_slopes=lambda t: t[:1]),
        "alibi_slopes must have one number for each of the 4 heads",
    ),
    "slopes without dimensions": (
        FULL,
        replaced(alibi_slopes=torch.sum),
        "alibi_slopes must have one number for each of the 4 heads",
    ),
    "no seed": (FULL, replaced(seed=none), "dropout needs a seed, but seed is None"),
    "seed of another dtype": (
        FULL,
        replaced(seed=Tensor.int),
        "seed must be one int64 without dimensions, but is int32",
    ),
    "seed of one dimension": (
        FULL,
        replaced(seed=lambda t: t[None]),
        r"seed must be one int64 without dimensions, but is int64 of shape \(1,\)",
    ),
    "no offsets of keys": (PACKED, replaced(cu_seqlens_k=none), "must both be given, but cu_seqlens_k is None"),
    "no offsets of queries": (PACKED, replaced(cu_seqlens_q=none), "must both be given, but cu_seqlens_q is None"),
    "offsets of floats": (
        PACKED,
        replaced(cu_seqlens_q=Tensor.float),
        "cu_seqlens_q must have dtype int32 or int64, but has float32",
    ),
    "offsets of two dimensions": (
        PACKED,
        replaced(cu_seqlens_k=lambda t: t[None]),
        r"cu_seqlens_k must have one dimension, .* but has shape \(1, 3\)",
    ),
    "empty offsets": (PACKED, replaced(cu_seqlens_k=lambda t: t[:0]), "cu_seqlens_k must have one dimension"),
    "offsets of different counts": (
        PACKED,
        replaced(cu_seqlens_k=lambda t: t[:2]),
        "must have the same length, but have 3 and 2",
    ),
    "negative dropout": (FULL.but(dropout_p=-0.1), replaced(), "dropout_p must be between 0 and 1, but is -0.1"),
    "dropout above 1": (FULL.but(dropout_p=1.5), replaced(), "dropout_p must be between 0 and 1, but is 1.5"),
    "dropout of NaN": (FULL.but(dropout_p=float("nan")), replaced(), "dropout_p must be between 0 and 1, but is nan"),
    "unknown alignment": (
        PLAIN.but(causal_alignment="middle"),
        replaced(),
        "causal_alignment must be 'top_left' or 'bottom_right', but is 'middle'",
    ),
    "negative cap": (PLAIN.but(softcap=-1.0), replaced(), "softcap must be at least 0, but is -1"),
    "window to the left": (
        PLAIN.but(window=(-1, 0)),
        replaced(),
        "window_left must be at least 0, or None for no limit, but is -1",
    ),
    "window to the right": (
        PLAIN.but(window=(0, -2)),
        replaced(),
        "window_right must be at least 0, or None for no limit, but is -2",
    ),
}


def says(call: Callable[[], Any]) -> str:
    with pytest.raises(RuntimeError) as raised:
        call()
    return str(raised.value).splitlines()[0]


@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises_in_eager_and_fake_alike(name: str, real_device: str) -> None:
    case, change, pattern = BAD[name]
    tensors = change(case.tensors(device=real_device))
    eager = says(lambda: case.run(tensors))
    assert re.search(pattern, eager), eager
    assert eager.startswith("attention: ")
    with FakeTensorMode() as mode:
        fakes = [t if t is None else mode.from_tensor(t) for t in tensors]
        assert says(lambda: case.run(fakes)) == eager
        assert says(lambda: torch.ops.myvision.attention(*fakes, *case.options())) == eager
    for context in (torch.inference_mode(), torch.no_grad()):
        with context:
            assert says(lambda: torch.ops.myvision.attention(*tensors, *case.options())) == eager


@pytest.mark.parametrize("name", ["key", "value", "attn_mask", "alibi_slopes", "seed"])
def test_tensors_of_another_device(name: str) -> None:
    tensors = FULL.tensors()
    tensors[POSITIONS[name]] = tensors[POSITIONS[name]].to("meta")
    with pytest.raises(RuntimeError, match="must be on the device of query, cpu, but is on meta"):
        FULL.run(tensors)


OFFSETS = {
    "do not start with 0": [1, 3, 8],
    "fall": [0, 9, 8],
    "end too early": [0, 3, 7],
    "end too late": [0, 3, 9],
    "are negative": [0, -3, 8],
    "are one": [0],
}


@pytest.mark.parametrize("name", OFFSETS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bad_offsets(name: str, dtype: torch.dtype) -> None:
    query, key, value = random_tensor(3, 8, 2, 4)
    good, bad = (
        torch.tensor(numbers, dtype=dtype) for numbers in ([0] * (len(OFFSETS[name]) - 1) + [8], OFFSETS[name])
    )
    if name == "are one":
        good = bad
    for starts, argument in (((bad, good), "cu_seqlens_q"), ((good, bad), "cu_seqlens_k")):
        if name == "are one" and argument == "cu_seqlens_k":
            continue  # the first of the two is told
        with pytest.raises(
            RuntimeError, match=f"{argument} must start with 0, never fall, and end with the number of rows, 8"
        ):
            varlen_attention(query, key, value, *starts)


BACKWARD = {
    "grad_output of another shape": (
        0,
        lambda t: t[:1],
        r"grad_output must be float32 of shape \(2, 4, 19, 12\), but is float32 of shape \(1",
    ),
    "grad_output of another dtype": (0, Tensor.double, "grad_output must be float32 .* but is float64"),
    "grad_lse of another shape": (1, lambda t: t[..., :1], "grad_lse must be float32 of shape"),
    "output of another shape": (10, lambda t: t[..., :1], "output must be float32 of shape"),
    "statistics of another dtype": (11, Tensor.double, r"statistics must be float32 of shape \(2, 4, 19, 2\)"),
    "mask of no gradient": (
        -1,
        lambda _: [True, True, True, True],
        "a gradient of attn_mask is wanted, but there is no additive one",
    ),
    "short output_mask": (-1, lambda _: [True], "output_mask must have 4 elements|bool\\[4\\]"),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_bad_backward(name: str) -> None:
    position, change, pattern = BACKWARD[name]
    tensors = PLAIN.tensors()
    arguments = [
        *PLAIN.grad_outputs(torch.float32, "cpu"),
        *tensors,
        *PLAIN.run_forward(tensors)[::2],
        *PLAIN.options(),
        [True] * 3 + [False],
    ]
    arguments[position] = change(arguments[position])
    assert re.search(pattern, says(lambda: torch.ops.myvision._attention_backward(*arguments)))
    if name != "short output_mask":
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments]
            assert re.search(pattern, says(lambda: torch.ops.myvision._attention_backward(*fakes)))


def test_functions_tell_what_is_wrong() -> None:
    x = random_tensor(2, 3, 5, 4)
    with pytest.raises(RuntimeError, match=r"query must have 2 dimensions or more, .* but has shape \(4,\)"):
        scaled_dot_product_attention(x[0, 0, 0], x, x)
    with pytest.raises(RuntimeError, match="query has 5 heads and key 2; enable_gqa=True"):
        varlen_attention(x[0], x[0, :, :2], x[0, :, :2], torch.tensor([0, 3]), torch.tensor([0, 3]))
    with pytest.raises(RuntimeError, match="dropout_p must be between 0 and 1"):
        scaled_dot_product_attention(x, x, x, dropout_p=2)


ROWS = torch.zeros(2, 4, 6, 8)
PACKED_ROWS, ENDS = torch.zeros(6, 4, 8), torch.tensor([0, 2, 6])


@pytest.mark.parametrize("bad", [None, "q", [1.0], ROWS.numpy()], ids=lambda bad: type(bad).__name__)
@pytest.mark.parametrize("position", range(5))
def test_what_is_no_tensor_is_told(position: int, bad: Any) -> None:
    name = ["query", "key", "value", "cu_seqlens_q", "cu_seqlens_k"][position]
    for function, given in (
        (scaled_dot_product_attention, [ROWS] * 3),
        (varlen_attention, [*[PACKED_ROWS] * 3, ENDS, ENDS]),
    ):
        if position < len(given):
            given[position] = bad
            with pytest.raises(TypeError, match=f"attention: {name} must be a tensor, but got {type(bad).__name__}"):
                function(*given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *[
            ({"window": window}, "window must be an int or a pair of ints or None")
            for window in ((1,), (1, 2, 3), (), 1.5, "3", (1.5, 2), 2**63)
        ],
        *[({"dropout_p": p}, f"dropout_p must be a number, but got {type(p).__name__}") for p in ("0.1", None)],
        *[({name: "1"}, f"{name} must be a number, but got str") for name in ("softcap", "scale")],
        ({"alibi_slopes": "1"}, "alibi_slopes must be a tensor, but got str"),
    ],
    ids=str,
)
def test_options_of_a_wrong_type_are_told(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        scaled_dot_product_attention(ROWS, ROWS, ROWS, **options)
    with pytest.raises(TypeError, match=message):
        varlen_attention(PACKED_ROWS, PACKED_ROWS, PACKED_ROWS, ENDS, ENDS, **options)


@pytest.mark.parametrize("bad", ["causal", True, [[0.0]]], ids=lambda bad: type(bad).__name__)
def test_a_mask_that_is_no_tensor_is_told(bad: Any) -> None:
    with pytest.raises(TypeError, match=f"attention: attn_mask must be a tensor, but got {type(bad).__name__}"):
        scaled_dot_product_attention(ROWS, ROWS, ROWS, bad)


def test_batches_that_do_not_broadcast_are_told() -> None:
    with pytest.raises(RuntimeError, match=r"attention: query, key and value .* query has \(3,\), key \(2,\)"):
        scaled_dot_product_attention(torch.zeros(3, 4, 6, 8), ROWS, ROWS)


def test_a_window_may_be_a_list() -> None:
    x = random_tensor(2, 4, 6, 8)
    expected = scaled_dot_product_attention(x, x, x, window=(1, 2))
    assert torch.equal(scaled_dot_product_attention(x, x, x, window=[1, 2]), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("softcap", [float("inf"), 1e39])
def test_a_cap_beyond_float32_is_none(softcap: float, dtype: torch.dtype) -> None:
    x = random_tensor(2, 4, 6, 8, dtype=dtype)
    expected = scaled_dot_product_attention(x, x, x)
    for function in (scaled_dot_product_attention, torch.compile(scaled_dot_product_attention, backend="eager")):
        assert torch.equal(function(x, x, x, softcap=softcap), expected)


@pytest.mark.parametrize(("key_heads", "value_heads"), [(2, 4), (4, 2), (1, 8), (8, 2)])
def test_key_and_value_of_different_heads(key_heads: int, value_heads: int) -> None:
    query, key, value = (random_tensor(2, heads, 6, 8, seed=heads) for heads in (8, key_heads, value_heads))
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    compiled = torch.compile(scaled_dot_product_attention, fullgraph=True, dynamic=True, backend="eager")
    for function in (scaled_dot_product_attention, compiled):
        torch.testing.assert_close(function(query, key, value, enable_gqa=True), expected)
