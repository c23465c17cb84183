"""The model that the export tests share."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from myvision.ops import deform_conv2d, my_add

OPERATORS = {"myvision::deform_conv2d": 2, "myvision::my_add": 1}
IN_CHANNELS = 4
DYNAMIC_SHAPES: tuple[Mapping[int, Any]] = (dict.fromkeys((0, 2, 3), torch.export.Dim.DYNAMIC),)


def _runtime_version() -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in metadata.version("onnxruntime").split(".")[:2])
    except metadata.PackageNotFoundError:
        return (0, 0)


runs_deform_conv = pytest.mark.skipif(
    _runtime_version() < (1, 25), reason="needs onnxruntime 1.25, the first with DeformConv (it wants Python 3.11)"
)


class DeformableNet(nn.Module):
    """One deformable convolution with groups, mask and bias, one without them, and the sum of the two."""

    def __init__(self) -> None:
        super().__init__()
        self.predictor = nn.Conv2d(IN_CHANNELS, 2 * 27, 3, padding=1)
        self.weight1 = nn.Parameter(torch.randn(6, IN_CHANNELS // 2, 3, 3))
        self.bias1 = nn.Parameter(torch.randn(6))
        self.weight2 = nn.Parameter(torch.randn(6, IN_CHANNELS, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        predicted = self.predictor(x)
        offset, mask = predicted[:, :36], predicted[:, 36:].sigmoid()
        first = deform_conv2d(x, offset, self.weight1, self.bias1, padding=1, mask=mask)
        second = deform_conv2d(x, offset[:, :18], self.weight2, padding=1)
        return my_add(first, second)


def images(batch: int, height: int, width: int) -> Tensor:
    return torch.randn(batch, IN_CHANNELS, height, width)
