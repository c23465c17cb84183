"""Exports to ONNX: one node for each operator, the same numbers in onnxruntime and in ONNX's reference."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from exported_model import DYNAMIC_SHAPES, DeformableNet, images, runs_deform_conv
from helpers import random_tensor, run_python
from torch import Tensor, nn
from torch.onnx._internal._lazy_import import onnxscript_apis
from torch.onnx._internal.exporter import _schemas

import myvision.onnx
from myvision._cli.graph import read_graph
from myvision.ops import my_add

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

# Each export translates all that onnxscript knows of torch's operators, and reads what each of them takes and gives,
# anew: most of the time that a small one takes.
onnxscript_apis.get_torchlib_ops = functools.cache(onnxscript_apis.get_torchlib_ops)
_schemas.op_signature_from_function = functools.cache(_schemas.op_signature_from_function)

OPSETS = [19, 20, 21, 22, 23]


class MyAdd(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return my_add(x, y)


class DeformConv(nn.Module):
    """The operator itself, with every argument under control."""

    def __init__(self, stride: list[int], padding: list[int], dilation: list[int], groups: int, offset_groups: int):
        super().__init__()
        self.geometry = (stride, padding, dilation, groups, offset_groups)

    def forward(
        self, input: Tensor, weight: Tensor, offset: Tensor, mask: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        return torch.ops.myvision.deform_conv2d(input, weight, offset, mask, bias, *self.geometry)


def nodes(program: torch.onnx.ONNXProgram) -> list[str]:
    return [f"{node.domain}::{node.op_type}" for node in program.model_proto.graph.node]


def in_runtime(model: bytes | str, *args: Tensor | None) -> Tensor:
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    return in_session(session, [value.name for value in session.get_inputs()], args)


def in_reference(model: bytes, *args: Tensor | None) -> Tensor:
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(onnx.ModelProto.FromString(model))
    return in_session(evaluator, evaluator.input_names, args)


def in_session(session: Any, names: list[str], args: tuple[Tensor | None, ...]) -> Tensor:
    arrays = [arg.detach().numpy() for arg in args if arg is not None]
    return torch.from_numpy(session.run(None, dict(zip(names, arrays, strict=True)))[0])


def deform_conv_case(dtype: torch.dtype, with_mask: bool, with_bias: bool) -> tuple[DeformConv, list[Tensor | None]]:
    """A geometry in which no two numbers could be swapped unnoticed."""
    model = DeformConv(stride=[2, 1], padding=[1, 2], dilation=[2, 1], groups=2, offset_groups=3)
    out_size = (4, 13)  # of a 9 x 10 image and a 3 x 2 kernel
    args = (
        random_tensor(2, 12, 9, 10, dtype=dtype, seed=1),
        random_tensor(6, 6, 3, 2, dtype=dtype, seed=2),
        2 * random_tensor(2, 3 * 12, *out_size, dtype=dtype, seed=3),
        random_tensor(2, 3 * 6, *out_size, dtype=dtype, seed=4).sigmoid() if with_mask else None,
        random_tensor(6, dtype=dtype, seed=5) if with_bias else None,
    )
    return model, list(args)


@runs_deform_conv
@pytest.mark.parametrize("opset", OPSETS)
def test_deform_conv2d_in_every_opset(opset: int) -> None:
    model, args = deform_conv_case(torch.float32, with_mask=True, with_bias=True)
    program = myvision.onnx.export(model, tuple(args), opset_version=opset, verbose=False)
    onnx.checker.check_model(program.model_proto, full_check=True)
    assert nodes(program) == ["::DeformConv"]
    assert program.model_proto.opset_import[0].version == opset
    data = program.model_proto.SerializeToString()
    torch.testing.assert_close(in_runtime(data, *args), model(*args), rtol=1e-4, atol=1e-4)


@runs_deform_conv
@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_deform_conv2d_with_and_without_mask_and_bias(dtype: torch.dtype, with_mask: bool, with_bias: bool) -> None:
    model, args = deform_conv_case(dtype, with_mask, with_bias)
    program = myvision.onnx.export(model, tuple(args), verbose=False)
    assert nodes(program) == ["::DeformConv"]
    data = program.model_proto.SerializeToString()
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2}[dtype]
    torch.testing.assert_close(in_runtime(data, *args), model(*args), rtol=tolerance, atol=tolerance)


@runs_deform_conv
@pytest.mark.parametrize("with_optional", [False, True])
@pytest.mark.parametrize("opset", [19, 22])
def test_deform_conv2d_does_not_round_float_offsets(opset: int, with_optional: bool) -> None:
    model, args = deform_conv_case(torch.float16, with_optional, with_optional)
    args[2] = args[2].float() + 0.0003
    program = myvision.onnx.export(model, tuple(args), opset_version=opset, verbose=False)
    casts = ["::Cast"] * (4 if with_optional else 2)
    assert nodes(program) == [*casts, "::DeformConv", "::Cast"]
    actual = in_runtime(program.model_proto.SerializeToString(), *args)
    torch.testing.assert_close(actual, model(*args), rtol=torch.finfo(torch.float16).eps, atol=1e-4)


def test_deform_conv2d_in_the_reference_of_onnx() -> None:
    model, args = deform_conv_case(torch.float32, with_mask=True, with_bias=True)
    program = myvision.onnx.export(model, tuple(args), verbose=False)
    actual = in_reference(program.model_proto.SerializeToString(), *args)
    torch.testing.assert_close(actual, model(*args), rtol=1e-4, atol=1e-4)


def test_bfloat16_has_the_node_from_opset_22_on() -> None:
    model, args = deform_conv_case(torch.bfloat16, with_mask=True, with_bias=True)
    program = myvision.onnx.export(model, tuple(args), opset_version=22, verbose=False)
    onnx.checker.check_model(program.model_proto, full_check=True)
    assert nodes(program) == ["::DeformConv"]
    with pytest.raises(ValueError, match="deform_conv2d of bfloat16 needs ONNX opset 22 or later, got 21"):
        myvision.onnx.export(model, tuple(args), opset_version=21, verbose=False)


def test_deform_conv2d_needs_opset_19() -> None:
    model, args = deform_conv_case(torch.float32, with_mask=True, with_bias=True)
    with pytest.raises(ValueError, match=r"^deform_conv2d needs ONNX opset 19 or later, got opset_version=18$"):
        myvision.onnx.export(model, tuple(args), opset_version=18, verbose=False)


@pytest.fixture(scope="module")
def net() -> DeformableNet:
    torch.manual_seed(0)
    return DeformableNet().eval()


@pytest.fixture(scope="module")
def net_file(net: DeformableNet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("onnx") / "net.onnx"
    myvision.onnx.export(net, (images(2, 9, 8),), file, dynamic_shapes=DYNAMIC_SHAPES, verbose=False)
    return file


def test_saved_network_has_single_operators(net_file: Path) -> None:
    graph = read_graph(net_file)
    assert graph.operators["DeformConv"] == 2
    assert graph.operators["myvision::my_add"] == 1
    assert graph.functions == {"myvision::my_add": {"Add": 2}}
    onnx.checker.check_model(str(net_file), full_check=True)


@runs_deform_conv
@pytest.mark.parametrize("size", [(2, 9, 8), (1, 5, 7), (3, 12, 20)])
def test_saved_network_gives_the_same(net: DeformableNet, net_file: Path, size: tuple[int, int, int]) -> None:
    x = images(*size)
    torch.testing.assert_close(in_runtime(str(net_file), x), net(x).detach(), rtol=1e-4, atol=1e-4)


@runs_deform_conv
def test_exported_program_exports_too(net: DeformableNet) -> None:
    x = images(2, 9, 8)
    program = myvision.onnx.export(torch.export.export(net, (x,)), verbose=False)
    assert nodes(program).count("::DeformConv") == 2
    torch.testing.assert_close(program(x)[0], net(x).detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("opset", [18, *OPSETS])
def test_my_add_in_every_opset(opset: int) -> None:
    x, y = torch.randn(3, 4), torch.randn(4)
    program = myvision.onnx.export(MyAdd(), (x, y), opset_version=opset, verbose=False)
    onnx.checker.check_model(program.model_proto, full_check=True)
    assert nodes(program) == ["myvision::my_add"]
    assert {entry.domain: entry.version for entry in program.model_proto.opset_import} == {"": opset, "myvision": 1}
    data = program.model_proto.SerializeToString()
    for run in (in_runtime, in_reference):
        torch.testing.assert_close(run(data, x, y), 2 * x + y)


@pytest.mark.parametrize(
    ("x_dtype", "y_dtype", "y_shape", "nodes_wanted"),
    [
        *[(dtype, dtype, (4,), ["myvision::my_add"]) for dtype in (torch.float64, torch.float16, torch.int64)],
        *[(dtype, dtype, (4,), ["myvision::my_add"]) for dtype in (torch.int32, torch.int16, torch.int8, torch.uint8)],
        (torch.float32, torch.float64, (4,), ["::Cast", "myvision::my_add"]),
        (torch.int64, torch.float32, (4,), ["::Cast", "myvision::my_add"]),
        (torch.float16, torch.float32, (), ["::Cast", "myvision::my_add"]),  # a scalar does not widen x
        (torch.int16, torch.uint8, (4,), ["::Cast", "myvision::my_add"]),
    ],
)
def test_my_add_types(
    x_dtype: torch.dtype, y_dtype: torch.dtype, y_shape: tuple[int, ...], nodes_wanted: list[str]
) -> None:
    x, y = random_tensor(3, 4, dtype=x_dtype), random_tensor(*y_shape, dtype=y_dtype, seed=1)
    program = myvision.onnx.export(MyAdd(), (x, y), verbose=False)
    onnx.checker.check_model(program.model_proto, full_check=True)
    assert nodes(program) == nodes_wanted
    actual, expected = in_runtime(program.model_proto.SerializeToString(), x, y), my_add(x, y)
    # onnxruntime adds half types in float32, and drops a Cast to half that it finds in between.
    atol = 5e-3 if expected.dtype == torch.float16 else 1e-6
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=atol)


def test_my_add_bfloat16_is_a_valid_model() -> None:
    x = random_tensor(3, 4, dtype=torch.bfloat16)
    program = myvision.onnx.export(MyAdd(), (x, x), verbose=False)  # onnxruntime's CPU kernels have no bfloat16 Add
    onnx.checker.check_model(program.model_proto, full_check=True)
    assert nodes(program) == ["myvision::my_add"]


def test_table_serves_the_exporter_of_torch() -> None:
    x = torch.randn(3, 4)
    table = myvision.onnx.translation_table(20)
    program = torch.onnx.export(
        MyAdd(), (x, x), dynamo=True, opset_version=20, custom_translation_table=table, verbose=False
    )
    assert not program.model_proto.functions
    assert myvision.onnx.add_function_bodies(program) is program
    torch.testing.assert_close(program(x, x)[0], 3 * x)


def test_model_without_our_operators_gets_no_function() -> None:
    program = myvision.onnx.export(nn.ReLU(), (torch.randn(3),), verbose=False)
    assert not program.model_proto.functions
    assert [entry.domain for entry in program.model_proto.opset_import] == [""]


def test_table_of_the_user_comes_first() -> None:
    from onnxscript import opset20

    def subtract(x: Any, y: Any) -> Any:
        return opset20.Sub(x, y)

    x = torch.randn(3)
    table = {torch.ops.myvision.my_add.default: subtract}
    program = myvision.onnx.export(MyAdd(), (x, x), custom_translation_table=table, verbose=False)
    assert nodes(program) == ["::Sub"]


@pytest.mark.parametrize("arguments", [{"dynamo": False}, {"verify": True}])
def test_arguments_that_cannot_be_served(arguments: dict[str, bool]) -> None:
    with pytest.raises(TypeError, match="=".join(map(str, *arguments.items()))):
        myvision.onnx.export(MyAdd(), (torch.randn(3), torch.randn(3)), **arguments)


def test_error_of_torch_keeps_its_cause() -> None:
    with pytest.raises(torch.onnx.OnnxExporterError) as error:
        myvision.onnx.export(nn.Linear(2, 2), (torch.randn(3, 3),), verbose=False)
    assert error.value.__cause__ is not None


@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_missing_package_is_named(package: str) -> None:
    output = run_python(
        f"import sys; sys.modules[{package!r}] = None\n"
        "import myvision.onnx\n"
        "try: myvision.onnx.translation_table()\n"
        "except ImportError as error: print(error)"
    )
    assert output.startswith(f"ONNX export needs {package}: pip install 'myvision[onnx]'")


@pytest.mark.parametrize("call", ["my_add(x, x)", pytest.param("layer_norm(x, 4)", marks=pytest.mark.exhaustive)])
def test_torch_s_own_export_names_ours(call: str) -> None:
    error = run_python(f"""
import torch
from myvision.ops import *
class Model(torch.nn.Module):
    def forward(self, x):
        return {call}
try:
    torch.onnx.export(Model(), (torch.ones(2, 3, 4),), dynamo=True)
except torch.onnx.OnnxExporterError as error:
    print(error)
""")
    assert "call myvision.onnx.export, or pass it custom_translation_table=myvision.onnx.translation_table()" in error
