"""scikit-learn's handwritten digits, rotated and shifted on a larger canvas."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import Dataset

CANVAS = 16  # pixels; the digits of 8x8 pixels are drawn 12 pixels large
SCALE = 12 / CANVAS
MAX_DEGREES = 25.0
MAX_SHIFT = 2.0  # pixels of the canvas
TEST_SEED = 0


class MovedDigits(Dataset[tuple[torch.Tensor, int]]):
    """Training images [1, 16, 16], rotated and shifted anew each time, with their labels."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return move(self.images[index : index + 1])[0], int(self.labels[index])


@dataclass(frozen=True)
class Digits:
    """Images to train on, and test images as they are and moved, the same way in every run."""

    train: MovedDigits
    test_labels: torch.Tensor
    test_upright: torch.Tensor
    test_moved: torch.Tensor


def load() -> Digits:
    """A fixed split, a fifth of each digit for the test."""
    digits = load_digits()
    images = torch.as_tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.as_tensor(digits.target)
    train, test = train_test_split(range(len(labels)), test_size=0.2, random_state=TEST_SEED, stratify=labels)
    return Digits(
        MovedDigits(images[train], labels[train]),
        labels[test],
        draw(images[test], torch.zeros(len(test)), torch.zeros(len(test), 2)),
        move(images[test], torch.Generator().manual_seed(TEST_SEED)),
    )


def move(images: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Draws each image [N, 1, 8, 8] on the canvas at a random angle and place."""
    angles, shifts = (2 * torch.rand(len(images), size, generator=generator) - 1 for size in (1, 2))
    return draw(images, angles[:, 0] * MAX_DEGREES, shifts * MAX_SHIFT)


def draw(images: torch.Tensor, degrees: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
    """Draws images [N, 1, 8, 8] on canvases [N, 1, 16, 16], turned clockwise by degrees [N], moved by (x, y) [N, 2]."""
    angles = degrees * math.pi / 180
    cos, sin = angles.cos() / SCALE, angles.sin() / SCALE
    shift_x, shift_y = (2 * shifts / CANVAS).unbind(1)
    canvas_to_image = torch.stack(
        [
            torch.stack([cos, sin, -cos * shift_x - sin * shift_y], 1),
            torch.stack([-sin, cos, sin * shift_x - cos * shift_y], 1),
        ],
        1,
    )
    grid = F.affine_grid(canvas_to_image, [len(images), 1, CANVAS, CANVAS], align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)
