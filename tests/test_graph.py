"""The graph command: it counts the nodes of each format, and no file, however broken or hostile, fools it."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from myvision.__main__ import main
from myvision._cli.graph import GraphError, read_graph
from myvision.ops import my_add

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")

MODULE_PICKLE = b"\x80\x02c__torch__\nM\nq\x00)\x81."  # an object of class __torch__.M


class Block(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return my_add(x.relu(), x)


class Nested(nn.Module):
    """Calls one block twice and another once, inside a container whose children have numbers for names."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = Block()
        self.layers = nn.Sequential(Block(), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.shared(self.shared(x)))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x) if x.sum() > 0 else torch.ops.myvision.my_add(x, x)
        for _ in range(3):
            x = x.tanh()
        return x


class Conditional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: my_add(x, x), lambda x: x.tanh(), (x,))


@pytest.fixture(scope="module")
def nested_pt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("nested") / "nested.pt"
    torch.jit.trace(Nested(), torch.randn(3)).save(file)
    return file


@pytest.fixture(scope="module")
def nested_pt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("nested") / "nested.pt2"
    torch.export.save(torch.export.export(Nested(), (torch.randn(3),)), file)
    return file


@pytest.fixture(scope="module")
def nested_onnx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("onnxscript")
    import myvision.onnx

    file = tmp_path_factory.mktemp("nested") / "nested.onnx"
    myvision.onnx.export(Nested(), (torch.randn(3),), file, verbose=False)
    return file


def test_traced_submodules_count_once_a_call(nested_pt: Path) -> None:
    graph = read_graph(nested_pt)
    assert graph.format == "TorchScript"
    assert graph.operators == {"myvision::my_add": 3, "aten::relu": 3, "aten::tanh": 1}


def test_scripted_branches_count_each_and_loops_once(tmp_path: Path) -> None:
    file = tmp_path / "branches.pt"
    torch.jit.script(Branches()).save(file)
    operators = read_graph(file).operators
    assert operators["myvision::my_add"] == operators["aten::relu"] == operators["aten::tanh"] == 1


def test_exported_program(nested_pt2: Path) -> None:
    graph = read_graph(nested_pt2)
    assert graph.format == "torch.export"
    assert graph.operators == {"myvision::my_add": 3, "aten::relu": 3, "aten::tanh": 1}


def test_exported_branches_count_each(tmp_path: Path) -> None:
    file = tmp_path / "conditional.pt2"
    torch.export.save(torch.export.export(Conditional(), (torch.randn(3),)), file)
    operators = read_graph(file).operators
    assert operators["higher_order::cond"] == operators["myvision::my_add"] == operators["aten::tanh"] == 1


def test_onnx_lists_function_bodies_apart(nested_onnx: Path) -> None:
    graph = read_graph(nested_onnx)
    assert graph.format == "ONNX"
    assert graph.operators == {"myvision::my_add": 3, "Relu": 3, "Tanh": 1}
    assert graph.functions == {"myvision::my_add": {"Add": 2}}


def test_onnx_branches_count_each(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    model = onnx.parser.parse_model(
        """
        <ir_version: 10, opset_import: ["": 20]>
        branches (bool choice, float x) => (float y) {
            y = If (choice) <
                then_branch = then_graph () => (then_y) { then_y = Tanh(x) },
                else_branch = else_graph () => (else_y) { else_y = Relu(x) }
            >
        }
        """
    )
    onnx.save(model, tmp_path / "branches.onnx")
    assert read_graph(tmp_path / "branches.onnx").operators == {"If": 1, "Tanh": 1, "Relu": 1}


def test_table_puts_our_operators_first(nested_pt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graph", str(nested_pt)]) == 0
    title, _, first, *_ = capsys.readouterr().out.splitlines()
    assert title == f"{nested_pt}: TorchScript, 7 operator nodes"
    assert first.split() == ["3", "myvision::my_add"]


def test_table_names_function_bodies(nested_onnx: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graph", str(nested_onnx)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "myvision::my_add comes with a body of 2 Add"


def test_custom_leaves_out_the_rest(nested_pt2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graph", str(nested_pt2), "--custom", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["operators"] == {"myvision::my_add": 3}


def test_json(nested_onnx: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graph", str(nested_onnx), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "format": "ONNX",
        "operators": {"myvision::my_add": 3, "Relu": 3, "Tanh": 1},
        "functions": {"myvision::my_add": {"Add": 2}},
    }


# ---- broken and hostile files ----------------------------------------------------------------------------------------


class CreatesFile:
    """Creates a file as soon as it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.trace),)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """What a file leaves behind if it is executed."""
    return tmp_path / "executed"


def write_archive(file: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return file


def write_torchscript(file: Path, code: str | bytes, data: bytes = MODULE_PICKLE) -> Path:
    code = code.encode() if isinstance(code, str) else code
    return write_archive(file, {"model/code/__torch__.py": code, "model/data.pkl": data})


def forward(*lines: str) -> str:
    """A class whose forward has these lines."""
    return "class M(Module):\n  def forward(self: __torch__.M, x: Tensor) -> Tensor:\n    " + "\n    ".join(lines)


def write_exported(file: Path, model: bytes) -> Path:
    return write_archive(file, {"model/models/model.json": model})


def exported_nodes(nodes: object) -> bytes:
    return json.dumps({"graph_module": {"graph": {"nodes": nodes}}}).encode()


def nested_onnx_bytes(depth: int) -> bytes:
    """An ONNX model whose only node holds a graph, whose only node holds a graph, and so on."""
    graph = b""
    for tag in (b"\x32", b"\x2a", b"\x0a") * depth:  # AttributeProto.g, NodeProto.attribute, GraphProto.node
        graph = tag + varint(len(graph)) + graph
    return b"\x08\x0a\x3a" + varint(len(graph)) + graph  # ir_version and ModelProto.graph


def varint(value: int) -> bytes:
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + varint(rest) if rest else bytes([low])


def assert_one_error_line(file: Path, capsys: pytest.CaptureFixture[str], reason: str = "") -> None:
    status = main(["graph", str(file)])
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    assert captured.err.startswith(f"error: {file}: ")
    assert captured.err.count("\n") == 1
    assert reason in captured.err


@pytest.mark.parametrize("extension", ["pt", "pt2", "onnx"])
@pytest.mark.parametrize(
    "content", [b"", b"\0" * 1000, b"hello world\n", random.Random(0).randbytes(5000), b"PK\x03\x04" + b"x" * 100]
)
def test_files_that_are_nothing(
    extension: str, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / f"model.{extension}"
    file.write_bytes(content)
    assert_one_error_line(file, capsys)


@pytest.mark.parametrize("extension", ["pt", "pt2", "onnx"])
def test_missing_file_and_directory(extension: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_one_error_line(tmp_path / f"missing.{extension}", capsys, "no such file")
    assert_one_error_line(tmp_path / f"{'long' * 1000}.{extension}", capsys)
    directory = tmp_path / f"directory.{extension}"
    directory.mkdir()
    assert_one_error_line(directory, capsys, "not a regular file")


def test_unknown_extension(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_one_error_line(tmp_path / "model.safetensors", capsys, "wants a file that ends in .pt, .pt2, .onnx")


@pytest.mark.parametrize("kind", ["pt", "pt2", "onnx"])
def test_truncated_and_renamed_files(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = request.getfixturevalue(f"nested_{kind}").read_bytes()
    truncated = tmp_path / f"truncated.{kind}"
    truncated.write_bytes(content[: len(content) // 2])
    assert_one_error_line(truncated, capsys)
    for other in {"pt", "pt2", "onnx"} - {kind}:
        renamed = tmp_path / f"renamed.{other}"
        renamed.write_bytes(content)
        assert_one_error_line(renamed, capsys)


@pytest.mark.parametrize("kind", ["pt", "pt2", "onnx"])
def test_damaged_bytes_never_escape_as_another_error(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    content = request.getfixturevalue(f"nested_{kind}").read_bytes()
    generator = random.Random(0)
    file = tmp_path / f"damaged.{kind}"
    for _ in range(100):
        damaged = bytearray(content)
        for _ in range(generator.choice([1, 10, 100])):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        file.write_bytes(damaged)
        with contextlib.suppress(GraphError):
            read_graph(file)


def test_no_pickle_is_executed(tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = CreatesFile(trace)
    pickle.loads(pickle.dumps(evil))
    assert trace.exists()  # so it would, if it were unpickled
    trace.rmdir()

    saved, legacy, raw, module = (tmp_path / f"{name}.pt" for name in ("saved", "legacy", "raw", "module"))
    torch.save(evil, saved)
    torch.save(evil, legacy, _use_new_zipfile_serialization=False)
    raw.write_bytes(pickle.dumps(evil))
    write_torchscript(module, forward("return x"), pickle.dumps(evil))
    for file in (saved, legacy, raw, module):
        assert_one_error_line(file, capsys)
    assert not trace.exists()


def test_no_code_of_the_archive_is_executed(tmp_path: Path, trace: Path) -> None:
    code = f"import os\nos.mkdir({str(trace)!r})\n" + forward("return torch.relu(x)")
    constants = pickle.dumps(CreatesFile(trace))
    file = write_torchscript(tmp_path / "model.pt", code)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("model/constants.pkl", constants)
        archive.writestr("model/code/__torch__.py.debug_pkl", constants)
    assert read_graph(file).operators == {"aten::relu": 1}
    assert not trace.exists()


def test_saved_tensors_are_no_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "weights.pt"
    torch.save(nn.Linear(2, 2).state_dict(), file)
    assert_one_error_line(file, capsys, "torch.save stores objects, not graphs: trace or export the model first")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (b" " * (65 << 20), "more than 64 MiB of code"),
        (b"\xff\xfe", "UnicodeDecodeError"),
        ("class M(", "SyntaxError"),
        ("class M(Module):\n  pass", "no method forward"),
        (forward("return (self).forward(x, )"), "forward calls itself"),
        (forward("return " + "-" * 100_000 + "x"), ""),
        (forward("return x" + ".a" * 100_000), ""),
        (forward("return " + "(" * 10_000 + ")" * 10_000), ""),
        (forward("if x:", "  pass", *["elif x:", "  pass"] * 20_000), ""),
        (forward("return " + "9" * 10_000), ""),
    ],
    ids=range(10),
)
def test_hostile_code(code: str | bytes, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_one_error_line(write_torchscript(tmp_path / "model.pt", code), capsys, reason)


def test_calls_that_double_at_each_level_are_counted_quickly(tmp_path: Path) -> None:
    methods = "".join(
        f"  def f{i}(self: __torch__.M):\n    return (self).f{i + 1}(), (self).f{i + 1}()\n" for i in range(50)
    )
    code = f"class M(Module):\n{methods}  def f50(self):\n    return ops.a.b()\n"
    code += "  def forward(self: __torch__.M):\n    return (self).f0()\n"
    assert read_graph(write_torchscript(tmp_path / "model.pt", code)).operators == {"a::b": 2**50}


def test_functions_under_another_name_are_followed(tmp_path: Path) -> None:
    code = "def f(x: Tensor) -> Tensor:\n  return torch.tanh(x)\n" + forward("_0 = __torch__.f", "return _0(x, )")
    assert read_graph(write_torchscript(tmp_path / "model.pt", code)).operators == {"aten::tanh": 1}


def test_call_of_an_unknown_class_is_shown(tmp_path: Path) -> None:
    code = forward("_0 = (self.missing).run(x, )", "return torch.relu(_0)")
    operators = read_graph(write_torchscript(tmp_path / "model.pt", code)).operators
    assert operators == {"prim::CallMethod": 1, "aten::relu": 1}


@pytest.mark.parametrize(
    "model",
    [
        b"",
        b"null",
        b"[]",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"9" * 10_000,
        exported_nodes(5),
        exported_nodes([{"target": 5, "inputs": []}]),
        exported_nodes([{"target": ["a"], "inputs": [{"arg": 3}]}]),
        exported_nodes([{"inputs": []}]),
        b" " * (65 << 20),
    ],
    ids=range(11),
)
def test_hostile_exported_program(model: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_one_error_line(write_exported(tmp_path / "model.pt2", model), capsys)


def test_compiled_package_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_archive(tmp_path / "model.pt2", {"model/data/aotinductor/model/wrapper.cpp": b""})
    assert_one_error_line(file, capsys, "compiled by AOTInductor")


@pytest.mark.parametrize("extension", ["pt", "pt2"])
@pytest.mark.parametrize("name", ["../../code/__torch__.py", "/etc/passwd", "models.json", "code/", "a\n/b"])
def test_odd_member_names(extension: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_one_error_line(write_archive(tmp_path / f"model.{extension}", {name: b"x"}), capsys)
    assert [entry.name for entry in tmp_path.iterdir()] == [f"model.{extension}"]


def test_onnx_nested_without_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnx")
    file = tmp_path / "model.onnx"
    file.write_bytes(nested_onnx_bytes(10))
    assert read_graph(file).operators.total() == 10
    file.write_bytes(nested_onnx_bytes(10_000))
    assert_one_error_line(file, capsys)


def test_names_cannot_write_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [{"target": "evil\n\x1b[31m\u202e", "inputs": []}]
    assert main(["graph", str(write_exported(tmp_path / "model.pt2", exported_nodes(nodes)))]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [r"    1  evil\n\x1b[31m\u202e"]
    assert main(["graph", str(tmp_path / "missing\n\x1b[31m.pt")]) == 2
    assert r"missing\n\x1b[31m.pt: no such file" in capsys.readouterr().err


def test_onnx_missing_is_told(
    nested_onnx: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    assert_one_error_line(nested_onnx, capsys, "pip install 'myvision[onnx]'")
