"""The demo, the examples, and what they say when something is missing or wrong."""

from __future__ import annotations

import argparse
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from helpers import REPOSITORY, run_python

from myvision.__main__ import main
from myvision._cli import demo

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")

OF_THEIR_OWN = {"transformer_g2p"}  # tested in a file of their own
EXAMPLES = sorted(path for path in (REPOSITORY / "examples").glob("*.py") if path.stem not in OF_THEIR_OWN)

needs_extra = pytest.mark.skipif(
    any(find_spec(package) is None for package in demo.EXTRA), reason="myvision[demo] is not installed"
)


def arguments(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(options)


@needs_extra
def test_demo_runs_every_step(tmp_path: Path) -> None:
    printed = run_python(
        f"from myvision.__main__ import main; main(['demo', '--quick', '--threads', '1', '--out', {str(tmp_path)!r}])"
    )
    for pictured in ("training_curve", "sampling_points", "speed"):
        assert (tmp_path / f"{pictured}.png").read_bytes().startswith(b"\x89PNG")
    for exported in ("digits_traced.pt", "digits.pt2", "digits.onnx"):
        assert f"{exported} (" in printed
    assert "reloaded with weights_only=True: the same output" in printed


def test_missing_extra_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demo, "EXTRA", ("no_such_package",))
    monkeypatch.delattr(demo, "import_module")  # nothing may be started
    assert demo.run(arguments()) == 1
    assert capsys.readouterr().err == "demo: needs the package(s) no_such_package: pip install 'myvision[demo]'\n"


@needs_extra
def test_low_accuracy_fails() -> None:
    from myvision._cli.demo import data, model, steps

    with pytest.raises(steps.DemoError, match="is too low, at least 97% was expected"):
        steps.check_accuracy(model.DigitNet(), data.load(), wanted=0.97)


@needs_extra
def test_changed_output_fails(tmp_path: Path) -> None:
    from myvision._cli.demo import exports, model, steps

    images = torch.rand(8, 1, 16, 16)
    network = model.DigitNet().eval()
    path = tmp_path / "traced.pt"
    torch.jit.trace(network, images).save(str(path))
    exported = exports.Exported("TorchScript", path, exports.OPERATORS, lambda images: network(images) + 0.01)
    with pytest.raises(steps.DemoError, match="is not the same model: outputs differ by"):
        steps.check_exported(network, images, exported)


@needs_extra
def test_missing_operators_fail(tmp_path: Path) -> None:
    from myvision._cli.demo import exports, model, steps

    path = tmp_path / "other.pt"
    torch.jit.trace(torch.nn.ReLU(), torch.rand(2)).save(str(path))
    exported = exports.Exported("TorchScript", path, exports.OPERATORS, torch.relu)
    with pytest.raises(steps.DemoError, match="should have the operators"):
        steps.check_exported(model.DigitNet(), torch.rand(8, 1, 16, 16), exported)


@needs_extra
def test_digits_are_drawn_turned_and_shifted() -> None:
    from myvision._cli.demo import data

    image = torch.zeros(1, 1, 8, 8)
    image[..., 1, 3:5] = 1  # above the middle
    turned = data.draw(image, torch.tensor([90.0]), torch.zeros(1, 2))[0, 0]
    shifted = data.draw(image, torch.zeros(1), torch.tensor([[3.0, 1.0]]))[0, 0]
    upright = data.draw(image, torch.zeros(1), torch.zeros(1, 2))[0, 0]
    torch.testing.assert_close(turned, upright.rot90(-1), rtol=0, atol=1e-5)
    torch.testing.assert_close(shifted, upright.roll((1, 3), (0, 1)), rtol=0, atol=1e-5)


def run_in_this_process(command: list[str], check: bool) -> None:
    """What an example starts, without importing torch for each."""
    assert command[:3] == [sys.executable, "-m", "myvision"]
    assert main(command[3:]) == 0 or not check


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if path.stem == "from_torchvision":
        pytest.importorskip("torchvision")
    if path.stem == "export_model":
        pytest.importorskip("onnxscript")
    monkeypatch.setattr(sys, "argv", [str(path), str(tmp_path)])
    monkeypatch.setattr("subprocess.run", run_in_this_process)
    runpy.run_path(str(path), run_name="__main__")
