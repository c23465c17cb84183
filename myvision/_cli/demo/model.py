"""The network of the demo."""

from __future__ import annotations

import torch
from torch import nn

from myvision.nn import DeformConv2dPack, MyAdd


class DeformableBlock(nn.Module):
    """A residual block, relu(2 * x + norm(deform_conv(x))): [N, C, H, W] to the same shape."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = DeformConv2dPack(channels, channels, kernel_size=3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.add = MyAdd()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.add(x, self.norm(self.conv(x))))


class DigitNet(nn.Module):
    """Images [N, 1, 16, 16] to the scores [N, 10] of the ten digits."""

    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, channels, kernel_size=3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()
        )
        self.block1 = DeformableBlock(channels)
        self.downsample = nn.Sequential(
            nn.Conv2d(channels, 2 * channels, kernel_size=3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2 * channels),
            nn.ReLU(),
        )
        self.block2 = DeformableBlock(2 * channels)
        self.head = nn.Sequential(nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8 * channels, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.block2(self.downsample(self.block1(self.stem(images)))))
        return scores
