"""Every operator has all its rooms: whoever knows its name knows every path."""

from __future__ import annotations

import pytest
import torch
from helpers import REPOSITORY

import myvision
from myvision._cli.ops import operator_names

# Operators that share their kernels live in the directory of the first of them.
KERNELS = sorted(path.name for path in (REPOSITORY / "csrc" / "ops").iterdir() if path.is_dir())
OPERATORS = [name for name in operator_names() if "." not in name]
FUNCTIONS = sorted(myvision.ops.__all__)
KERNEL_ROOMS = [
    "csrc/ops/{op}/{op}.h",
    "csrc/ops/{op}/{op}.cpp",
    "csrc/ops/{op}/**/{op}_cpu.cpp",  # in a folder cpu/ or gpu/ where an operator has more than six files
    "csrc/ops/{op}/**/{op}_kernel.cuh",
    "csrc/ops/{op}/**/{op}_cuda.cu",
    "tests/test_{op}.py",
    "benchmarks/bench_{op}.py",
]
ROOMS = [
    "myvision/ops/{op}.py",
    "myvision/nn/{op}.py",
    "myvision/_formulas/{op}.py",
]


def test_operators_are_found():
    assert {"batch_norm", "deform_conv2d", "my_add"} <= set(KERNELS) <= set(OPERATORS)


@pytest.mark.parametrize("room", KERNEL_ROOMS)
@pytest.mark.parametrize("op", KERNELS)
def test_kernel_room_exists(op: str, room: str):
    assert len(list(REPOSITORY.glob(room.format(op=op)))) == 1


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("op", OPERATORS)
def test_room_exists(op: str, room: str):
    assert (REPOSITORY / room.format(op=op)).is_file()


@pytest.mark.parametrize("op", OPERATORS)
def test_operator_has_an_onnx_translation(op: str):
    """One that may refuse: with a sentence, where ONNX has no such thing."""
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package)
    assert getattr(torch.ops.myvision, op).default in myvision.onnx.translation_table()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_function_is_listed_for_users(function: str):
    assert f"`ops.{function}`" in (REPOSITORY / "README.md").read_text()
    assert f"`{function}`" in (REPOSITORY / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("op", OPERATORS)
def test_operator_is_registered_for_every_use(op: str):
    name = f"myvision::{op}"
    assert getattr(torch.ops.myvision, op).default._schema.returns[0].type.kind() == "TensorType"
    for key in ("CPU", "Meta", "Autograd"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, key), key
    assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA") == myvision.has_cuda_ops()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_function_is_documented(function: str):
    documentation = getattr(myvision.ops, function).__doc__
    for section in ("Args:", "Returns:", "Raises:", "Example:"):
        assert section in documentation


def test_public_names_exist():
    for module in (myvision, myvision.ops, myvision.nn):
        for name in module.__all__:
            assert hasattr(module, name), f"{module.__name__}.{name}"


@pytest.mark.parametrize("header", sorted((REPOSITORY / "csrc" / "ops").glob("**/*.h")), ids=lambda path: path.name)
def test_only_the_glue_knows_torch(header):
    for path in (header, *header.parent.glob("*.cu*")):
        includes = [line for line in path.read_text().splitlines() if line.startswith("#include")]
        assert not [line for line in includes if "torch/" in line or "stable.h" in line or "ATen/" in line], path
