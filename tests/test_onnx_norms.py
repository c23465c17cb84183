"""Exports of the norms to ONNX: which nodes they become, and the same numbers in onnxruntime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import random_tensor
from test_onnx import in_reference, in_runtime, nodes
from torch import Tensor, nn

import myvision.nn
import myvision.onnx
from myvision import ops

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

Norm = Callable[..., Any]
ACTIVATIONS = ["relu", "leaky_relu", "silu", "gelu", "gelu_tanh", "hardswish"]
WITH_NODE = ["gelu", "gelu_tanh"]  # of their own from opset 20 on
EXHAUSTIVE = pytest.mark.exhaustive  # what is translated as another one is


class Call(nn.Module):
    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, *args: Tensor) -> Any:
        return self.norm(*args)


AFFINE = {size: (random_tensor(size, seed=1), random_tensor(size, seed=2)) for size in (5, 6)}
RUNNING = random_tensor(6, seed=3), random_tensor(6, seed=4).exp()

# name: what it computes, and its nodes with opset 20 and with opset 23
NORMS: dict[str, tuple[Norm, list[str], list[str]]] = {
    "batch_norm": (
        lambda x: ops.batch_norm(x, *RUNNING, *AFFINE[6]),
        ["BatchNormalization"],
        ["BatchNormalization"],
    ),
    "batch_norm, bare": (
        lambda x: ops.batch_norm(x, *RUNNING),
        ["BatchNormalization"],
        ["BatchNormalization"],
    ),
    "instance_norm": (
        lambda x: ops.instance_norm(x, None, None, *AFFINE[6]),
        ["InstanceNormalization"],
        ["InstanceNormalization"],
    ),
    "instance_norm, running": (
        lambda x: ops.instance_norm(x, *RUNNING, *AFFINE[6], use_input_stats=False),
        ["BatchNormalization"],
        ["BatchNormalization"],
    ),
    "group_norm": (
        lambda x: ops.group_norm(x, 3, *AFFINE[6]),
        ["Reshape", "InstanceNormalization", "Reshape", "Mul", "Add"],
        ["GroupNormalization"],
    ),
    "layer_norm": (lambda x: ops.layer_norm(x, 5, *AFFINE[5]), ["LayerNormalization"], ["LayerNormalization"]),
    "layer_norm, bare, two dimensions": (
        lambda x: ops.layer_norm(x, (4, 5)),
        ["LayerNormalization"],
        ["LayerNormalization"],
    ),
    "layer_norm, channels first": (lambda x: ops.layer_norm(x, 6, *AFFINE[6], channels="first"), [], []),
    "batch_norm, own statistics": (lambda x: ops.batch_norm(x, None, None, *AFFINE[6], training=True), [], []),
    "rms_norm": (lambda x: ops.rms_norm(x, 5, AFFINE[5][0]), [], ["RMSNormalization"]),
    "rms_norm, channels first": (lambda x: ops.rms_norm(x, 6, channels="first"), [], []),
}


def export(norm: Norm, *args: Tensor, opset: int = 20) -> torch.onnx.ONNXProgram:
    program = myvision.onnx.export(Call(norm), args, opset_version=opset, verbose=False)
    onnx.checker.check_model(program.model_proto, full_check=True)
    return program


def run(program: torch.onnx.ONNXProgram, *args: Tensor) -> Tensor:
    return in_runtime(program.model_proto.SerializeToString(), *args)


def without_constants(program: torch.onnx.ONNXProgram) -> list[str]:
    return [name.removeprefix("::") for name in nodes(program) if name != "::Constant"]


@pytest.mark.parametrize("opset", [pytest.param(18, marks=EXHAUSTIVE), 20, pytest.param(21, marks=EXHAUSTIVE), 23])
@pytest.mark.parametrize("name", NORMS)
def test_nodes_and_numbers(name: str, opset: int) -> None:
    norm, old_nodes, new_nodes = NORMS[name]
    x = random_tensor(2, 6, 4, 5)
    program = export(norm, x, opset=opset)
    expected = new_nodes if opset >= 23 or (opset >= 21 and name == "group_norm") else old_nodes
    if expected:
        assert without_constants(program) == expected
    else:
        assert not [node for node in nodes(program) if "myvision" in node]
    torch.testing.assert_close(run(program, x), norm(x), rtol=1e-4, atol=1e-5)


NEGATIVE_EPS: dict[str, Norm] = {
    "instance_norm": lambda x: ops.instance_norm(x, None, None, *AFFINE[6], eps=-1e-2),
    "instance_norm, running": lambda x: ops.instance_norm(x, *RUNNING, *AFFINE[6], use_input_stats=False, eps=-1e-2),
    "group_norm": lambda x: ops.group_norm(x, 3, *AFFINE[6], eps=-1e-2),
    "layer_norm": lambda x: ops.layer_norm(x, 5, *AFFINE[5], eps=-1e-2),
    "layer_norm, channels first": lambda x: ops.layer_norm(x, 6, *AFFINE[6], eps=-1e-2, channels="first"),
    "rms_norm": lambda x: ops.rms_norm(x, 5, AFFINE[5][0], eps=-1e-2),
}


@pytest.mark.parametrize("opset", [20, 23])
@pytest.mark.parametrize("name", NEGATIVE_EPS)
def test_a_negative_eps(name: str, opset: int) -> None:
    """onnxruntime refuses it in the nodes of its own, and takes the formula."""
    model, x = Call(NEGATIVE_EPS[name]).eval(), random_tensor(2, 6, 4, 5)
    program = myvision.onnx.export(model, (x,), opset_version=opset)
    torch.testing.assert_close(in_runtime(program.model_proto.SerializeToString(), x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("activation", "opset"),
    [
        pytest.param(activation, opset, marks=[] if opset == 20 or activation in WITH_NODE else EXHAUSTIVE)
        for activation in ACTIVATIONS
        for opset in (18, 20)
    ],
)
def test_residual_and_activation_follow(activation: str, opset: int) -> None:
    def norm(x: Tensor, residual: Tensor) -> Tensor:
        return ops.layer_norm(x, 5, residual=residual, activation=activation, negative_slope=0.3)

    x, residual = random_tensor(3, 5, seed=1), random_tensor(3, 5, seed=2)
    program = export(norm, x, residual, opset=opset)
    assert without_constants(program)[:2] == ["LayerNormalization", "Add"]
    torch.testing.assert_close(run(program, x, residual), norm(x, residual), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("opset", [20, 23])
@pytest.mark.parametrize("norm", [ops.add_layer_norm, ops.add_rms_norm])
def test_add_forms(norm: Norm, opset: int) -> None:
    def step(x: Tensor, residual: Tensor) -> Tensor:
        output, sum = norm(x, residual, 5, AFFINE[5][0])
        return output - 2 * sum

    x, residual = random_tensor(3, 5, seed=1), random_tensor(3, 5, seed=2)
    program = export(step, x, residual, opset=opset)
    assert without_constants(program)[0] == "Add"
    torch.testing.assert_close(run(program, x, residual), step(x, residual), rtol=1e-4, atol=1e-5)


def test_dropout_is_refused() -> None:
    def step(x: Tensor) -> Tensor:
        return ops.add_layer_norm(x, x, 5, dropout_p=0.5, training=True)[0]

    with pytest.raises(
        ValueError, match=r"add_layer_norm with dropout has no form in ONNX: call model\.eval\(\) first"
    ):
        export(step, random_tensor(3, 5))


def test_updates_of_running_statistics_are_refused() -> None:
    with pytest.raises(ValueError, match=r"updates its running statistics.*model\.eval\(\) first"):
        myvision.onnx.export(myvision.nn.BatchNorm2d(6), (random_tensor(2, 6, 4, 5),), verbose=False)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float64, marks=EXHAUSTIVE), torch.float16])
@pytest.mark.parametrize("name", NORMS)
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    """Beside parameters of float32, in ONNX's own evaluator, which knows each of them."""
    norm = NORMS[name][0]
    x = random_tensor(2, 6, 4, 5, dtype=dtype)
    output = in_reference(export(norm, x, opset=23).model_proto.SerializeToString(), x)
    assert output.dtype == dtype
    torch.testing.assert_close(output, norm(x), rtol=2e-2, atol=2e-2)


def test_dynamic_batch_and_size() -> None:
    def norm(x: Tensor) -> Tensor:
        x = ops.batch_norm(x, *RUNNING, activation="relu")
        x = ops.group_norm(x, 2, activation="silu")
        x = ops.layer_norm(x, 6, channels="first")
        return ops.instance_norm(x)

    free = torch.export.Dim.DYNAMIC
    for opset in (20, 21):
        program = myvision.onnx.export(
            Call(norm),
            (random_tensor(2, 6, 4, 5),),
            opset_version=opset,
            dynamic_shapes=(({0: free, 2: free, 3: free},),),
            verbose=False,
        )
        other = random_tensor(3, 6, 7, 8)
        torch.testing.assert_close(run(program, other), norm(other), rtol=1e-4, atol=1e-5)
