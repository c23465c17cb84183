"""Exports a model to TorchScript, torch.export and ONNX, and shows its operators in each file.

python examples/export_model.py [directory]
"""

import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

import myvision.onnx
from myvision.nn import DeformConv2dPack, MyAdd


class Model(nn.Module):
    """[N, 16, H, W] to the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = DeformConv2dPack(16, 16, kernel_size=3, padding=1)
        self.add = MyAdd()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.add(x, self.conv(x))


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    traced, exported, onnx = (directory / f"model{suffix}" for suffix in (".pt", ".pt2", ".onnx"))
    model, image = Model().eval(), torch.rand(2, 16, 32, 32)
    dynamic = torch.export.Dim.DYNAMIC
    any_size = ({0: dynamic, 2: dynamic, 3: dynamic},)

    torch.jit.trace(model, image).save(str(traced))
    torch.export.save(torch.export.export(model, (image,), dynamic_shapes=any_size), exported)
    myvision.onnx.export(model, (image,), onnx, dynamic_shapes=any_size, external_data=False)

    for path in (traced, exported, onnx):
        subprocess.run([sys.executable, "-m", "myvision", "graph", str(path)], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "exported"))
