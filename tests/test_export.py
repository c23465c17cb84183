"""torch.jit.trace, torch.export and AOTInductor keep each operator as one node, for any batch and size."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from exported_model import DYNAMIC_SHAPES, OPERATORS, DeformableNet, images, runs_deform_conv
from helpers import REPOSITORY, run_fresh_python
from torch import Tensor

import myvision
from myvision._cli.graph import read_graph

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")

SIZES = [(2, 9, 8), (1, 5, 7), (3, 12, 20)]  # the first is the example that the model is exported with


def custom_nodes(graph: torch.fx.Graph) -> list[str]:
    return sorted(str(node.target) for node in graph.nodes if "myvision" in str(node.target))


EXPORTED_NODES = ["myvision.deform_conv2d.default"] * 2 + ["myvision.my_add.default"]


@pytest.fixture
def model() -> DeformableNet:
    return DeformableNet().eval()


@pytest.fixture(params=["parameters require grad", "parameters frozen"])
def traced(request: pytest.FixtureRequest, model: DeformableNet, tmp_path: Path) -> Path:
    model.requires_grad_(request.param == "parameters require grad")
    file = tmp_path / "model.pt"
    torch.jit.trace(model, images(*SIZES[0])).save(file)
    return file


@torch.no_grad()
def assert_same_results(exported: torch.nn.Module, model: DeformableNet) -> None:
    for size in SIZES:
        x = images(*size).to(model.weight1.dtype)
        torch.testing.assert_close(exported(x), model(x))


def test_trace_shows_single_operators(traced: Path) -> None:
    graph = read_graph(traced)
    assert {name: n for name, n in graph.operators.items() if name.startswith("myvision")} == OPERATORS


def test_trace_gives_the_same_for_other_sizes(traced: Path, model: DeformableNet) -> None:
    assert_same_results(torch.jit.load(traced), model)


def test_trace_has_the_same_gradients(traced: Path, model: DeformableNet) -> None:
    x = images(*SIZES[1]).requires_grad_()
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    (actual,) = torch.autograd.grad(torch.jit.load(traced)(x).sum(), x)
    torch.testing.assert_close(actual, expected)


def test_frozen_trace_keeps_the_operators(model: DeformableNet, tmp_path: Path) -> None:
    frozen = torch.jit.freeze(torch.jit.trace(model, images(*SIZES[0])))
    file = tmp_path / "frozen.pt"
    frozen.save(file)
    assert read_graph(file).operators["myvision::deform_conv2d"] == 2
    assert_same_results(torch.jit.load(file), model)


@pytest.mark.parametrize("training", [False, True])
def test_export_shows_single_operators(model: DeformableNet, training: bool, tmp_path: Path) -> None:
    model.train(training)
    program = torch.export.export(model, (images(*SIZES[0]),), dynamic_shapes=DYNAMIC_SHAPES)
    assert custom_nodes(program.graph) == EXPORTED_NODES
    file = tmp_path / "model.pt2"
    torch.export.save(program, file)
    graph = read_graph(file)
    assert {name: n for name, n in graph.operators.items() if name.startswith("myvision")} == OPERATORS
    assert_same_results(torch.export.load(file).module(), model)


def test_decompositions_keep_the_operators(model: DeformableNet) -> None:
    program = torch.export.export(model, (images(*SIZES[0]),), dynamic_shapes=DYNAMIC_SHAPES).run_decompositions()
    assert custom_nodes(program.graph) == EXPORTED_NODES
    assert_same_results(program.module(), model)


class Promotion(torch.nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return myvision.ops.my_add(x, y)


def test_my_add_promotes_after_export() -> None:
    x, y = torch.arange(6).view(2, 3), torch.randn(3)
    dim = torch.export.Dim.DYNAMIC
    program = torch.export.export(Promotion(), (x, y), dynamic_shapes=({0: dim}, None))
    assert custom_nodes(program.graph) == ["myvision.my_add.default"]
    for exported in (program.module(), torch.jit.trace(Promotion(), (x, y))):
        longer = torch.arange(12).view(4, 3)
        torch.testing.assert_close(exported(longer, y), 2 * longer + y)


@pytest.mark.skipif(not shutil.which("g++"), reason="AOTInductor compiles C++")
def test_aot_inductor_runs_the_operators(model: DeformableNet, tmp_path: Path) -> None:
    """In float64: its sigmoid and convolution round otherwise, and samples differ by several times what offsets do."""
    model.double()
    program = torch.export.export(model, (images(*SIZES[0]).double(),), dynamic_shapes=DYNAMIC_SHAPES)
    file = tmp_path / "compiled.pt2"
    torch._inductor.aoti_compile_and_package(program, package_path=str(file))
    assert_same_results(torch._inductor.aoti_load_package(str(file)), model)


def documented(language: str) -> list[str]:
    """The snippets of docs/exporting.md in one language."""
    text = (REPOSITORY / "docs" / "exporting.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def documented_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which the Python snippets of the documentation have run."""
    pytest.importorskip("onnxscript")
    directory = tmp_path_factory.mktemp("documented")
    checksum = 'print("sum:", model(torch.ones(1, 3, 40, 24)).sum().item())'
    output = run_fresh_python("\n".join([f"import os; os.chdir({str(directory)!r})", *documented("python"), checksum]))
    (directory / "sum.txt").write_text(output.rpartition("sum: ")[2])
    return directory


@runs_deform_conv
@pytest.mark.parametrize(
    ("file", "convolution"),
    [
        ("model.pt", "myvision::deform_conv2d"),
        ("model.pt2", "myvision::deform_conv2d"),
        ("model.onnx", "DeformConv"),
    ],
)
def test_documented_snippets_write_the_nodes(documented_files: Path, file: str, convolution: str) -> None:
    operators = read_graph(documented_files / file).operators
    assert operators[convolution] == operators["myvision::my_add"] == 1


@runs_deform_conv
@pytest.mark.skipif(not shutil.which("g++"), reason="compiles a C++ program")
def test_documented_program_runs_the_model_without_python(documented_files: Path) -> None:
    (program,) = documented("cpp")
    (documented_files / "run_model.cpp").write_text(program)
    (_, commands) = documented("sh")
    environment = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(REPOSITORY),
    }
    output = subprocess.run(
        ["sh", "-e", "-c", commands],
        cwd=documented_files,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert output.returncode == 0, output.stderr
    assert float(output.stdout) == pytest.approx(float((documented_files / "sum.txt").read_text()), rel=1e-4)
