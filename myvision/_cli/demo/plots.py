"""The pictures of the demo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from myvision._cli import bench

from .data import Digits
from .model import DigitNet
from .training import History

DRAWN_DIGITS = (2, 3, 4, 5, 6)


def training_curve(history: History, path: Path) -> None:
    """Loss and test accuracy, epoch by epoch, and the accuracy of the averaged weights."""
    epochs = range(1, len(history.loss) + 1)
    figure = Figure(figsize=(7, 4), layout="constrained")
    loss_axes = figure.subplots()
    accuracy_axes = loss_axes.twinx()
    lines = loss_axes.plot(epochs, history.loss, color="tab:blue", label="training loss")
    lines += accuracy_axes.plot(epochs, history.accuracy, color="tab:orange", label="test accuracy")
    final = [history.final_accuracy] * len(epochs)
    lines += accuracy_axes.plot(epochs, final, "--", color="tab:green", label="of the averaged weights")
    loss_axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    loss_axes.set(xlabel="epoch", ylabel="training loss", ylim=(0, None))
    accuracy_axes.set(ylabel="test accuracy", ylim=(min(0.9, *history.accuracy), 1.01))
    accuracy_axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    loss_axes.legend(handles=lines, loc="center right")
    loss_axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)


@torch.no_grad()
def sampling_points(model: DigitNet, digits: Digits, path: Path) -> None:
    """Where the first deformable convolution looks, for two pixels of some digits."""
    images = torch.cat([digits.test_moved[digits.test_labels == digit][:1] for digit in DRAWN_DIGITS])
    convolution = model.block1.conv
    offset, mask = convolution.conv_offset(model.stem(images)).split((18, 9), dim=1)
    offset = offset.unflatten(1, (9, 2))  # [digit, tap, (down, right), row, column]
    figure = Figure(figsize=(3 * len(images), 3.6), layout="constrained")
    all_axes = figure.subplots(1, len(images))
    for index, axes in enumerate(all_axes):
        axes.imshow(images[index, 0], cmap="gray_r", vmax=1.6)
        for row, column in _two_pixels(images[index, 0]):
            taps = offset[index, :, :, row, column], mask[index, :, row, column].sigmoid()
            points = _draw_pixel(axes, row, column, *taps)
        axes.set_axis_off()
    figure.colorbar(points, ax=all_axes, label="mask", shrink=0.7)
    figure.suptitle("Where a 3x3 convolution (o) and the deformable one (coloured) sample, for two pixels (x)")
    figure.savefig(path, dpi=130)


def _two_pixels(image: torch.Tensor) -> list[tuple[int, int]]:
    """Two pixels on the line of a digit, far from each other: the highest and the lowest."""
    rows, columns = torch.where(image > 0.7 * image.max())
    return [(int(rows[i]), int(columns[i])) for i in (0, -1)]


def _draw_pixel(axes: Any, row: int, column: int, offset: torch.Tensor, mask: torch.Tensor) -> Any:
    """Draws offset [9, (down, right)] from the grid around a pixel, coloured by mask [9], and returns the points."""
    taps = torch.cartesian_prod(torch.arange(-1, 2), torch.arange(-1, 2))
    y, x = taps[:, 0] + row, taps[:, 1] + column
    axes.quiver(x, y, offset[:, 1], offset[:, 0], angles="xy", scale_units="xy", scale=1, width=0.006, alpha=0.5)
    axes.plot(x, y, "o", color="black", markersize=4, fillstyle="none")
    axes.plot(column, row, "x", color="red", markersize=7)
    style = {"cmap": "viridis", "vmin": 0, "vmax": 1, "s": 36, "edgecolors": "black", "linewidths": 0.5, "zorder": 3}
    return axes.scatter(x + offset[:, 1], y + offset[:, 0], c=mask, **style)


def speed(path: Path, quick: bool) -> None:
    """The forward passes of the benchmark of deform_conv2d, measured briefly: a table and a plot."""
    harness, report, operator, command = map(bench.module, ("harness", "report", "bench_deform_conv2d", "__main__"))
    cpu = torch.device("cpu")
    cases = [
        case
        for case in operator.cases(harness.Settings(cpu, seconds=0, quick=quick))
        if case.group == operator.FORWARD and "channels_last" not in case.name
    ]
    briefly = harness.Settings(cpu, seconds=0.02 if quick else 0.3, quick=True)
    results = command.measure(cases, briefly, harness.measure_limits(cpu, quick=True))
    report.save_plot(path, results, f"on {torch.get_num_threads()} threads, measured briefly")
