"""Saves the model, exports it to the three formats, and runs what was written."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import onnxruntime
import torch
from torch import nn

from myvision import onnx

from .model import DigitNet

Predict = Callable[[torch.Tensor], torch.Tensor]

OPERATORS = {"myvision::deform_conv2d": 2, "myvision::my_add": 2}
ONNX_OPERATORS = {"DeformConv": 2, "myvision::my_add": 2}


@dataclass(frozen=True)
class Exported:
    """A file, the operators it should show, and what runs it."""

    format: str
    path: Path
    operators: dict[str, int]
    predict: Predict


def save_and_reload(model: nn.Module, path: Path) -> Predict:
    """Through a state_dict, read with weights_only=True."""
    torch.save(model.state_dict(), path)
    reloaded = DigitNet()
    reloaded.load_state_dict(torch.load(path, weights_only=True))
    return reloaded.eval()


def export_all(model: nn.Module, images: torch.Tensor, directory: Path) -> Iterator[Exported]:
    """TorchScript, torch.export and ONNX, each for any batch size; yields what was read back."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        yield _torchscript(model, images, directory / "digits_traced.pt")
        yield _exported_program(model, images, directory / "digits.pt2")
        yield _onnx(model, images, directory / "digits.onnx")


def _torchscript(model: nn.Module, images: torch.Tensor, path: Path) -> Exported:
    torch.jit.trace(model, images).save(str(path))
    return Exported("TorchScript", path, OPERATORS, torch.jit.load(str(path)))


def _exported_program(model: nn.Module, images: torch.Tensor, path: Path) -> Exported:
    program = torch.export.export(model, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, path)
    return Exported("torch.export", path, OPERATORS, torch.export.load(path).module())


def _onnx(model: nn.Module, images: torch.Tensor, path: Path) -> Exported:
    batch = torch.export.Dim("batch")
    onnx.export(model, (images,), path, dynamic_shapes=({0: batch},), external_data=False, verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def predict(images: torch.Tensor) -> torch.Tensor:
        (scores,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
        return torch.from_numpy(scores)

    return Exported("ONNX", path, ONNX_OPERATORS, predict)
