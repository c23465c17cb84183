"""python -m myvision: env, ops, and how commands are found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import REPOSITORY, run_python

from myvision import __main__
from myvision._cli import env, ops


def test_env_names_what_runs_and_what_was_built(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["env", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["torch"].startswith(torch.__version__)
    assert report["instruction set"].startswith(torch.ops.myvision._cpu_capability())
    assert report["linear's product in float32"].endswith(")")
    assert report["built: build type"] in ("release", "debug")
    assert __main__.main(["env"]) == 0
    assert torch.__version__ in capsys.readouterr().out


def test_env_says_why_the_instruction_set_is_in_use() -> None:
    code = "from myvision import __main__; __main__.main(['env'])"
    assert "DEFAULT (ATEN_CPU_CAPABILITY=default)" in run_python(code, "default")
    assert "the best that is built and that this CPU has" in run_python(code, ATEN_CPU_CAPABILITY="")


def test_env_says_what_became_of_the_gpu_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("myvision.has_cuda_ops", lambda: False)
    assert env.gpu_operators("left out: no nvcc") == "none; the build left out: no nvcc"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "not loaded: torch" in env.gpu_operators("CUDA 13.0")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "see the warning" in env.gpu_operators("CUDA 13.0")
    monkeypatch.setattr("myvision.has_cuda_ops", lambda: True)
    assert env.gpu_operators("CUDA 13.0") == "loaded"


def test_a_missing_package_is_not_installed() -> None:
    assert env.installed_version("no-such-package-of-anyone") == "not installed"


def test_ops_lists_each_public_operator(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["ops"]) == 0
    output = capsys.readouterr().out
    assert "myvision::my_add(Tensor x, Tensor y) -> Tensor" in output
    assert "_cpu_capability" not in output
    assert __main__.main(["ops", "--all"]) == 0
    assert "_cpu_capability" in capsys.readouterr().out


@pytest.mark.parametrize("name", ops.operator_names())
def test_every_public_operator_is_complete(name: str) -> None:
    described = ops.describe(name)
    assert "CPU" in described["devices"]
    assert "float32" in described["dtypes"]
    assert [described[trait] for trait in ("autograd", "fake")] == ["yes", "yes"]


def test_described_devices_come_from_the_dispatcher() -> None:
    with torch.library._scoped_library("myvision", "FRAGMENT") as library:
        library.define("_on_no_device(Tensor x) -> Tensor")
        assert ops.describe("_on_no_device")["devices"] == "none"
        library.impl("_on_no_device", lambda x: x, "CPU")
        assert ops.describe("_on_no_device")["devices"] == "CPU"


@pytest.mark.parametrize("command", ["env", "ops", "graph", "bench", "demo"])
def test_each_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        __main__.main([command, "--help"])
    assert caught.value.code == 0
    assert command in capsys.readouterr().out


def test_a_command_is_imported_only_when_called() -> None:
    code = """
import sys
from myvision import __main__
__main__.main(["env"])
late = {"onnx", *(f"myvision._cli.{name}" for name in ("bench", "demo", "graph"))}
print(sorted(late & set(sys.modules)))
"""
    assert run_python(code).splitlines()[-1] == "[]"


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["env", "--nonsense"]])
def test_wrong_arguments_give_usage_and_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        __main__.main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: python -m myvision")


def test_the_package_is_a_program_and_returns_its_status() -> None:
    command = [sys.executable, "-m", "myvision", "nonsense"]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.startswith("usage: python -m myvision")


def test_the_lines_of_the_readme_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxscript")
    monkeypatch.chdir(tmp_path)
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    first, exporting = (part.partition("```")[0] for part in text.split("```python\n")[1:])
    names: dict[str, torch.Tensor] = {}
    exec(first, names)
    assert capsys.readouterr().out == "torch.Size([1, 8, 32, 32])\n"
    convolution = torch.nn.functional.conv2d(names["image"], names["weight"], padding=1)
    torch.testing.assert_close(names["same_as_convolution"], convolution, rtol=1e-4, atol=1e-4)
    exec(exporting, names)
    assert {path.name for path in tmp_path.iterdir()} >= {"layer.pt2", "layer.onnx"}
