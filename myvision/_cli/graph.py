"""The command ``graph``: list the operator nodes of an exported model.

It trusts no file: archives are read as text and never unpickled, compiled, extracted or run.
"""

from __future__ import annotations

import argparse
import json
import pickletools
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from myvision._cli import torchscript

_MAX_CODE_BYTES = 64 << 20  # of the parts of an archive that are read; weights are not
_MAX_ONNX_BYTES = 2 << 30  # what the format itself allows

# Namespaces of torch's and ONNX's own operators.
_BUILT_IN = {"", "_operator", "aten", "higher_order", "math", "prim", "prims", "quantized", "ai.onnx.ml"}


class GraphError(ValueError):
    """A file that holds no graph that can be listed; the message is one line."""


@dataclass
class Graph:
    """The operator nodes of a file, those of its submodules and nested graphs included."""

    format: str
    operators: Counter[str]
    functions: dict[str, Counter[str]] = field(default_factory=dict)  # bodies that an ONNX file brings along


def read_graph(path: str | Path) -> Graph:
    """Count the operator nodes of a TorchScript (.pt), torch.export (.pt2) or ONNX (.onnx) file.

    Raises:
        GraphError: the file is missing, broken, of another kind, or holds no graph.
        ImportError: an ONNX file is read and the package onnx is missing.
    """
    path = Path(path)
    try:
        return _reader(path)(path)
    except GraphError as error:
        raise GraphError(f"{path}: {error}") from error
    except ImportError:
        raise
    except Exception as error:  # broken files make the parsers raise errors that have no common base
        raise GraphError(f"{path}: cannot be read ({type(error).__name__}: {error})") from error


def _reader(path: Path) -> Callable[[Path], Graph]:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise GraphError(f"wants a file that ends in {', '.join(_READERS)}")
    if not path.exists():
        raise GraphError("no such file")
    if not path.is_file():
        raise GraphError("not a regular file")
    return reader


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="TorchScript (.pt), torch.export (.pt2) or ONNX (.onnx) file; none is executed")
    parser.add_argument("--custom", action="store_true", help="leave out the operators of torch and ONNX themselves")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    try:
        graph = read_graph(args.file)
    except (GraphError, ImportError) as error:
        print(f"error: {_one_line(str(error))}", file=sys.stderr)
        return 2
    if args.custom:
        graph.operators = Counter({name: n for name, n in graph.operators.items() if _is_custom(name)})
    print(_as_json(graph) if args.json else _as_table(graph, args.file))
    return 0


def _as_json(graph: Graph) -> str:
    return json.dumps(
        {
            "format": graph.format,
            "operators": dict(_ordered(graph.operators)),
            "functions": {name: dict(_ordered(body)) for name, body in graph.functions.items()},
        },
        indent=2,
    )


def _as_table(graph: Graph, file: str) -> str:
    lines = [f"{_one_line(file)}: {graph.format}, {graph.operators.total()} operator nodes", "count  operator"]
    lines += [f"{count:5}  {_one_line(name)}" for name, count in _ordered(graph.operators)]
    for name, body in graph.functions.items():
        nodes = ", ".join(f"{count} {operator}" for operator, count in _ordered(body))
        lines.append(_one_line(f"{name} comes with a body of {nodes or 'no nodes'}"))
    return "\n".join(lines)


def _ordered(operators: Counter[str]) -> list[tuple[str, int]]:
    """Our own operators first, then other custom ones, then by count."""
    return sorted(
        operators.items(),
        key=lambda item: (not item[0].startswith("myvision::"), not _is_custom(item[0]), -item[1], item[0]),
    )


def _is_custom(operator: str) -> bool:
    return _namespace(operator) not in _BUILT_IN


def _namespace(operator: str) -> str:
    return operator.rpartition("::")[0]


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _read_torchscript(path: Path) -> Graph:
    with _open_archive(path) as archive:
        files = _members(archive)
        code = {name: info for name, info in files.items() if name.parts[0] == "code" and name.suffix == ".py"}
        if not code and PurePosixPath("data.pkl") in files:
            raise GraphError("no TorchScript; torch.save stores objects, not graphs: trace or export the model first")
        if not code:
            raise GraphError("no TorchScript in this archive")
        sources = {
            ".".join(name.with_suffix("").parts[1:]): text.decode() for name, text in _read(archive, code).items()
        }
        root_file = PurePosixPath("data.pkl")
        root = _root_class(_read(archive, {root_file: files[root_file]})[root_file])
    return Graph("TorchScript", torchscript.count_operators(sources, root))


def _root_class(pickled: bytes) -> str:
    """Name of the class of a pickled object, from the pickle's text alone."""
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name == "GLOBAL":
            return str(argument).replace(" ", ".")
    raise GraphError("its data.pkl names no class")


def _read_exported_program(path: Path) -> Graph:
    with _open_archive(path) as archive:
        files = _members(archive)
        models = {name: info for name, info in files.items() if name.parts[0] == "models" and name.suffix == ".json"}
        if not models and any("aotinductor" in name.parts for name in files):
            raise GraphError("compiled by AOTInductor, which keeps no graph")
        if not models:
            raise GraphError("no exported program in this archive")
        programs = [json.loads(text) for text in _read(archive, models).values()]
    operators = Counter(name for program in programs for name in _export_nodes(program["graph_module"]["graph"]))
    return Graph("torch.export", operators)


def _export_nodes(graph: dict[str, Any]) -> Iterator[str]:
    for node in graph["nodes"]:
        yield _export_operator(node["target"])
        for argument in node["inputs"]:
            if "as_graph" in argument["arg"]:
                yield from _export_nodes(argument["arg"]["as_graph"]["graph"])


def _export_operator(target: str) -> str:
    """Turn torch.ops.aten.add.Tensor into aten::add."""
    match target.split("."):
        case ["torch", "ops", namespace, name, *_]:
            return f"{namespace}::{name}"
        case [namespace, name]:
            return f"{namespace}::{name}"
    return target


def _read_onnx(path: Path) -> Graph:
    try:
        import onnx
        from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(f"{path}: reading ONNX needs the package onnx: pip install 'myvision[onnx]'") from error
    if path.stat().st_size >= _MAX_ONNX_BYTES:
        raise GraphError("2 GiB or more, which no ONNX file may have")
    try:
        model = onnx.ModelProto.FromString(path.read_bytes())
    except DecodeError as error:
        raise GraphError("not an ONNX model") from error
    if not (model.ir_version and model.HasField("graph")):
        raise GraphError("not an ONNX model")
    functions = {_onnx_name(f.domain, f.name): Counter(_onnx_nodes(f.node)) for f in model.functions}
    return Graph("ONNX", Counter(_onnx_nodes(model.graph.node)), functions)


def _onnx_nodes(nodes: Any) -> Iterator[str]:
    for node in nodes:
        yield _onnx_name(node.domain, node.op_type)
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from _onnx_nodes(graph.node)


def _onnx_name(domain: str, name: str) -> str:
    return name if domain in ("", "ai.onnx") else f"{domain}::{name}"


def _open_archive(path: Path) -> zipfile.ZipFile:
    if not zipfile.is_zipfile(path):
        raise GraphError("not a zip archive, as torch.jit.save and torch.export.save write")
    return zipfile.ZipFile(path)


def _members(archive: zipfile.ZipFile) -> dict[PurePosixPath, zipfile.ZipInfo]:
    """The files of an archive by their path below its one top folder."""
    paths = ((PurePosixPath(info.filename), info) for info in archive.infolist())
    return {PurePosixPath(*path.parts[1:]): info for path, info in paths if len(path.parts) > 1}


def _read(archive: zipfile.ZipFile, files: dict[PurePosixPath, zipfile.ZipInfo]) -> dict[PurePosixPath, bytes]:
    if sum(info.file_size for info in files.values()) > _MAX_CODE_BYTES:
        raise GraphError(f"more than {_MAX_CODE_BYTES >> 20} MiB of code")
    return {name: archive.read(info) for name, info in files.items()}


_READERS: dict[str, Callable[[Path], Graph]] = {
    ".pt": _read_torchscript,
    ".pt2": _read_exported_program,
    ".onnx": _read_onnx,
}
