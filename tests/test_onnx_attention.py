"""Exports of attention to ONNX: ONNX's own node where it can, the same numbers in onnxruntime."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from helpers import random_tensor
from test_onnx import in_reference, in_runtime, nodes
from torch import Tensor, nn

import myvision.onnx
from myvision.ops import scaled_dot_product_attention, varlen_attention

EXHAUSTIVE = pytest.mark.exhaustive  # opsets with the same translation as another one
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Any:
        return scaled_dot_product_attention(query, key, value, mask, **self.options)


SLOPES = torch.tensor([0.1, 0.2, 0.3, 0.4])
SEEN = random_tensor(1, 1, 6, 9, seed=5) > -1
# options, mask, and whether opset 23 has one node and nothing else for it
CASES: dict[str, tuple[dict[str, Any], Tensor | None, bool]] = {
    "plain": ({}, None, True),
    "scale": ({"scale": 0.3}, None, True),
    "softcap": ({"softcap": 1.5}, None, True),
    "additive mask of one row of keys": ({}, random_tensor(9, seed=6), False),
    "mask of one number": ({}, random_tensor(seed=6), False),
    "causal": ({"is_causal": True}, None, True),
    "bool mask": ({}, SEEN, True),
    "additive mask": ({}, random_tensor(6, 9, seed=6), True),
    "key padding": ({}, random_tensor(2, 1, 1, 9, seed=5) > -1, False),
    "additive mask of keys": ({}, random_tensor(1, 9, seed=6), False),
    "additive mask of queries": ({}, random_tensor(2, 1, 6, 1, seed=6), False),
    "mask of batches and heads": ({}, random_tensor(2, 1, 6, 9, seed=6), True),
    "mask and causal": ({"is_causal": True}, SEEN, True),
    "bottom right": ({"is_causal": True, "causal_alignment": "bottom_right"}, None, False),
    "window": ({"window": (3, 2)}, None, False),
    "window, mask and slopes": (
        {"window": (5, None), "alibi_slopes": SLOPES, "is_causal": True},
        random_tensor(4, 6, 9, seed=6),
        False,
    ),
    "window and bool mask": ({"window": (5, 5)}, SEEN, False),
    "softcap and mask": ({"softcap": 1.5}, SEEN, False),
    "softcap and causal": ({"softcap": 1.5, "is_causal": True}, None, False),
}


def inputs(dtype: torch.dtype = torch.float32, key_heads: int = 4) -> list[Tensor]:
    shapes = (2, 4, 6, 8), (2, key_heads, 9, 8), (2, key_heads, 9, 5)
    return [random_tensor(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]


def export(module: nn.Module, *args: Tensor, opset: int) -> torch.onnx.ONNXProgram:
    program = myvision.onnx.export(module.eval(), args, opset_version=opset, verbose=False)
    onnx.checker.check_model(program.model_proto, full_check=True)
    return program


def run(program: torch.onnx.ONNXProgram, *args: Tensor) -> Tensor:
    return in_runtime(program.model_proto.SerializeToString(), *args)


@pytest.mark.parametrize("opset", [18, pytest.param(20, marks=EXHAUSTIVE), 23, pytest.param(24, marks=EXHAUSTIVE)])
@pytest.mark.parametrize("name", CASES)
def test_nodes_and_numbers(name: str, opset: int) -> None:
    options, mask, single = CASES[name]
    module, args = Attention(**options), [*inputs(), *([] if mask is None else [mask])]
    program = export(module, *args, opset=opset)
    if opset >= 23 and single:
        assert nodes(program) == ["::Attention"]
    elif opset >= 23 and "softcap" not in name:
        assert nodes(program).count("::Attention") == 1
    else:
        assert "::Attention" not in nodes(program)
    torch.testing.assert_close(run(program, *args), module(*args), rtol=1e-4, atol=1e-5)


RANGES: list[dict[str, Any]] = [
    *[{"scale": scale} for scale in (0, 0.0, -0.3, 1e-50, 1e-6, 2.0)],
    {"scale": -0.3, "is_causal": True, "softcap": 0.7},
    *[{"softcap": softcap} for softcap in (0.0, 1e-3, 1e6, math.inf)],
    *[{"window": window, "causal_alignment": "bottom_right"} for window in (0, (0, None), (None, 2**63 - 1))],
    {"window": (2**63 - 1, 0)},
]


class WholeRange(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.stack([scaled_dot_product_attention(query, key, value, **options) for options in RANGES])


@pytest.mark.parametrize("opset", [18, 23, 24])
def test_the_whole_range_of_options(opset: int) -> None:
    module, args = WholeRange(), inputs()
    outputs = run(export(module, *args, opset=opset), *args)
    for options, actual, expected in zip(RANGES, outputs, module(*args), strict=True):
        torch.testing.assert_close(
            actual, expected, rtol=1e-4, atol=1e-5, msg=functools.partial("{}: {}".format, options)
        )


@pytest.mark.parametrize("opset", [18, 23])
@pytest.mark.parametrize("name", ["plain", "window", "softcap and mask"])
def test_grouped_heads(name: str, opset: int) -> None:
    options, mask, _ = CASES[name]
    module = Attention(**options, enable_gqa=True)
    args = [*inputs(key_heads=2), *([] if mask is None else [mask])]
    torch.testing.assert_close(run(export(module, *args, opset=opset), *args), module(*args), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("opset", [18, 23])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes(dtype: torch.dtype, opset: int) -> None:
    """In ONNX's own evaluator, which knows each of them."""
    module, args = Attention(window=(3, 2)), inputs(dtype)
    output = in_reference(export(module, *args, opset=opset).model_proto.SerializeToString(), *args)
    assert output.dtype == dtype
    torch.testing.assert_close(output, module(*args), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("opset", [20, 23])
def test_lse(opset: int) -> None:
    class Lse(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            output, lse = scaled_dot_product_attention(query, key, value, is_causal=True, return_lse=True)
            return output * lse[..., None]

    args = inputs()
    torch.testing.assert_close(run(export(Lse(), *args, opset=opset), *args), Lse()(*args), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("opset", [20, 23])
def test_dynamic_batch_and_lengths(opset: int) -> None:
    module, free = (
        Attention(is_causal=True, causal_alignment="bottom_right", window=(4, None)).eval(),
        torch.export.Dim.DYNAMIC,
    )
    shapes = tuple({0: free, 2: free} for _ in range(3))
    program = myvision.onnx.export(module, tuple(inputs()), opset_version=opset, dynamic_shapes=shapes, verbose=False)
    args = random_tensor(3, 4, 7, 8), random_tensor(3, 4, 11, 8, seed=1), random_tensor(3, 4, 11, 5, seed=2)
    torch.testing.assert_close(run(program, *args), module(*args), rtol=1e-4, atol=1e-5)


def test_what_has_no_form_in_onnx() -> None:
    class Packed(nn.Module):
        def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
            return varlen_attention(rows, rows, rows, ends, ends)

    with pytest.raises(ValueError, match="varlen_attention has no form in ONNX"):
        export(Packed(), random_tensor(5, 2, 4), torch.tensor([0, 2, 5]), opset=23)
    with pytest.raises(ValueError, match=r"attention with dropout has no form in ONNX: export with dropout_p=0"):
        export(Attention(dropout_p=0.5), *inputs(), opset=23)
