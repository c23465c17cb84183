"""Exports of linear to ONNX: which nodes it becomes, and the same numbers in onnxruntime."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import random_tensor
from linear_cases import PLAIN, Case
from norm_cases import ACTIVATIONS
from test_onnx import in_reference, in_runtime, nodes
from torch import Tensor, nn

import myvision.nn
import myvision.onnx

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

EXHAUSTIVE = pytest.mark.exhaustive  # what is translated as another one is
BARE = Case((6,), bias=False, residual=False)
MATRIX = BARE.but(bias=True)

# name: the call, and its nodes
CALLS: dict[str, tuple[Case, list[str]]] = {
    "matrix": (MATRIX, ["Gemm"]),
    "matrix, relu": (MATRIX.but(activation="relu"), ["Gemm", "Relu"]),
    "matrix, relu, residual": (MATRIX.but(activation="relu", residual=True), ["Gemm", "Relu", "Add"]),
    "matrix without bias": (BARE, ["Transpose", "MatMul"]),
    "vector": (MATRIX.but(rows=()), ["Transpose", "MatMul", "Add"]),
    "more dimensions": (PLAIN, ["Transpose", "MatMul", "Add", "Add"]),
    "more dimensions, silu": (PLAIN.but(activation="silu"), ["Transpose", "MatMul", "Add", "Sigmoid", "Mul", "Add"]),
}


class Call(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case

    def forward(self, *tensors: Tensor) -> Tensor:
        given = iter(tensors)
        present = [True, True, self.case.bias, self.case.residual]
        return self.case.run([next(given) if is_present else None for is_present in present])


def exported(case: Case, opset: int = 20, **options: Any) -> tuple[torch.onnx.ONNXProgram, list[Tensor]]:
    tensors = [tensor for tensor in case.tensors(**options) if tensor is not None]
    program = myvision.onnx.export(Call(case).eval(), tuple(tensors), opset_version=opset, verbose=False)
    onnx.checker.check_model(program.model_proto, full_check=True)
    return program, tensors


@pytest.mark.parametrize("opset", [pytest.param(18, marks=EXHAUSTIVE), 20, pytest.param(23, marks=EXHAUSTIVE)])
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ("matrix", "more dimensions, silu") else EXHAUSTIVE) for name in CALLS],
)
def test_nodes_and_numbers(name: str, opset: int) -> None:
    case, wanted = CALLS[name]
    program, tensors = exported(case, opset)
    assert [node.removeprefix("::") for node in nodes(program)] == wanted
    actual = in_runtime(program.model_proto.SerializeToString(), *tensors)
    torch.testing.assert_close(actual, Call(case)(*tensors), rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive  # the norms write the same nodes
@pytest.mark.parametrize(
    ("activation", "opset"),
    [(name, 20) for name in ACTIVATIONS] + [(name, 18) for name in ("gelu", "gelu_tanh")],
)
def test_activations(activation: str, opset: int) -> None:
    case = MATRIX.but(activation=activation)
    program, tensors = exported(case, opset)
    actual = in_runtime(program.model_proto.SerializeToString(), *tensors)
    torch.testing.assert_close(actual, Call(case)(*tensors), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float64, marks=EXHAUSTIVE), torch.float16])
@pytest.mark.parametrize("case", [pytest.param(MATRIX, marks=EXHAUSTIVE), PLAIN], ids=str)
def test_other_dtypes(case: Case, dtype: torch.dtype) -> None:
    program, tensors = exported(case, dtype=dtype)
    output = in_reference(program.model_proto.SerializeToString(), *tensors)
    assert output.dtype == dtype
    torch.testing.assert_close(output, Call(case)(*tensors), rtol=2e-2, atol=2e-2)


def test_dropout_is_refused() -> None:
    module = myvision.nn.LinearAct(5, 7, dropout_p=0.5)
    with pytest.raises(ValueError, match=r"linear with dropout has no form in ONNX: call model\.eval\(\) first"):
        myvision.onnx.export(module, (random_tensor(4, 5),), verbose=False)
    program = myvision.onnx.export(module.eval(), (random_tensor(4, 5),), verbose=False)
    assert nodes(program) == ["::Gemm", "::Relu"]


def test_dynamic_sizes() -> None:
    model = nn.Sequential(myvision.nn.LinearAct(5, 7, activation="gelu"), myvision.nn.Linear(7, 3)).eval()
    free = torch.export.Dim.DYNAMIC
    program = myvision.onnx.export(
        model, (random_tensor(2, 4, 5),), dynamic_shapes=({0: free, 1: free},), verbose=False
    )
    other = random_tensor(3, 6, 5)
    actual = in_runtime(program.model_proto.SerializeToString(), other)
    torch.testing.assert_close(actual, model(other), rtol=1e-4, atol=1e-5)
