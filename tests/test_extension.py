"""Loading the libraries: it works once, and each failure names its cause."""

from __future__ import annotations

import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from helpers import run_python

import myvision
from myvision import _extension


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A package directory of its own, in a process that looks as if nothing were loaded."""
    monkeypatch.setattr(_extension, "_PACKAGE", tmp_path)
    monkeypatch.setattr(_extension, "_check_first_copy", lambda path: None)
    return tmp_path


def fail_to_load(monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    def load_library(path: Path) -> None:
        raise OSError(message)

    monkeypatch.setattr(torch.ops, "load_library", load_library)


def test_importing_again_is_harmless() -> None:
    _extension.load()
    code = "import sys, myvision; [sys.modules.pop(m) for m in list(sys.modules) if m.startswith('myvision._ext')];"
    assert run_python(code + "from myvision import _extension; _extension.load(); print('loaded')") == "loaded\n"


def test_a_source_tree_without_a_build_says_so(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fresh / "setup.py").touch()
    monkeypatch.setattr(_extension, "_PACKAGE", fresh / "myvision")
    with pytest.raises(ImportError, match=r"source tree .* no built _C\.so.*pip install --no-build-isolation -e \."):
        _extension.load()


def test_an_incomplete_installation_says_so(fresh: Path) -> None:
    with pytest.raises(ImportError, match="the installation is incomplete"):
        _extension.load()


def test_an_old_torch_says_so(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    with pytest.raises(ImportError, match=r"torch 2\.10\.0 is too old"):
        _extension.load()


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ("libfoo.so.1: cannot open shared object file: No such file", r"_C\.so needs libfoo\.so\.1, .*LD_LIBRARY_PATH"),
        ("libcudart.so.12: cannot open shared object file: No such file", "built for another CUDA version"),
        ("/x/_C.so: undefined symbol: torch_new", "_C.so needs torch_new, which torch .* does not have"),
        ("/lib/libstdc++.so.6: version `GLIBCXX_3.4.33' not found", "built on a newer system"),
        ("/x/_C.so: invalid ELF header", "rebuild or reinstall myvision: /x/_C.so: invalid ELF header"),
    ],
)
def test_the_linkers_message_is_explained(
    message: str, cause: str, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fresh / _extension._library("_C").name).touch()
    fail_to_load(monkeypatch, message)
    with pytest.raises(ImportError, match=cause) as caught:
        _extension.load()
    assert message in str(caught.value)


def test_a_library_that_is_none_is_told() -> None:
    code = """
import pathlib, tempfile, myvision
from myvision import _extension
_extension._PACKAGE = pathlib.Path(tempfile.mkdtemp())
_extension._check_first_copy = lambda path: None
_extension._library("_C").write_bytes(b"not a library")
try:
    _extension.load()
except ImportError as error:
    print(error)
"""
    assert "does not load, rebuild or reinstall" in run_python(code)


def test_a_gpu_library_that_fails_leaves_the_cpu_operators(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fresh / "_C_cuda.so"
    path.touch()
    fail_to_load(monkeypatch, "libcudart.so.12: cannot open shared object file: No such file")
    with pytest.warns(RuntimeWarning, match=r"No GPU operators: _C_cuda\.so needs libcudart\.so\.12"):
        _extension._load_gpu_library(path)


def test_no_gpu_library_is_no_warning(fresh: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _extension._load_gpu_library(fresh / "_C_cuda.so")
    assert not myvision.has_cuda_ops()


def test_a_second_copy_is_refused_and_the_process_survives(tmp_path: Path) -> None:
    copy = tmp_path / "myvision"
    shutil.copytree(Path(myvision.__file__).parent, copy)
    code = f"""
import sys, torch
torch.ops.load_library({str(_extension._library("_C"))!r})
sys.path.insert(0, {str(tmp_path)!r})
try:
    import myvision
except ImportError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "registered already, by another copy" in result.stdout
    assert str(_extension._library("_C")) in result.stdout


def test_has_cuda_ops_agrees_with_the_dispatcher() -> None:
    registered = torch._C._dispatch_has_kernel_for_dispatch_key("myvision::deform_conv2d", "CUDA")
    assert myvision.has_cuda_ops() == registered


@pytest.mark.parametrize(("limit", "expected"), [("default", "DEFAULT"), ("nonsense", None)])
def test_the_instruction_set_can_only_be_lowered(limit: str, expected: str | None) -> None:
    code = "import torch, myvision; print(torch.ops.myvision._cpu_capability())"
    assert run_python(code, limit).strip() == (expected or run_python(code).strip())
