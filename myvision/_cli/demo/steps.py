"""What the demo does, one step after the other."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import nn

from myvision._cli.graph import read_graph

from . import data, exports, plots, training
from .model import DigitNet

TOLERANCE = 1e-3  # of scores that are of the order of 10


class DemoError(Exception):
    """A step whose result is not what it should be; the message is one line."""


def run(args: argparse.Namespace) -> None:
    """Every step.

    Raises:
        DemoError: the accuracy is too low, or a model that was saved or exported is not the same.
    """
    start = time.perf_counter()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)

    digits = data.load()
    print(
        f"{len(digits.train)} images of digits to train on, turned by up to {data.MAX_DEGREES:g} degrees and shifted "
        f"by up to {data.MAX_SHIFT:g} pixels, anew each time; {len(digits.test_labels)} to test"
    )
    model, history = training.train(DigitNet(), digits, args.epochs or (3 if args.quick else 14), args.workers)
    check_accuracy(model, digits, wanted=0.8 if args.quick else 0.97)
    print(f"trained in {time.perf_counter() - start:.0f} s")

    images = digits.test_moved[:64]
    check_saved(model, images, args.out / "digits_weights.pt")
    for exported in exports.export_all(model, images, args.out):
        check_exported(model, images, exported)

    plots.training_curve(history, args.out / "training_curve.png")
    plots.sampling_points(model, digits, args.out / "sampling_points.png")
    plots.speed(args.out / "speed.png", args.quick)
    print(f"pictures in {args.out}: training_curve.png, sampling_points.png, speed.png")
    print(f"done in {time.perf_counter() - start:.0f} s")


def check_accuracy(model: nn.Module, digits: data.Digits, wanted: float) -> None:
    moved = training.accuracy(model, digits.test_moved, digits.test_labels)
    upright = training.accuracy(model, digits.test_upright, digits.test_labels)
    print(f"accuracy {moved:.1%} on test images turned and shifted likewise, {upright:.1%} on upright ones")
    if min(moved, upright) < wanted:
        raise DemoError(f"an accuracy of {min(moved, upright):.1%} is too low, at least {wanted:.0%} was expected")


def check_saved(model: nn.Module, images: torch.Tensor, path: Path) -> None:
    difference = _difference(model, exports.save_and_reload(model, path), images)
    if difference != 0:
        raise DemoError(f"the model reloaded from {path} is not the same: outputs differ by {difference:.1e}")
    print(f"{path} reloaded with weights_only=True: the same output")


def check_exported(model: nn.Module, images: torch.Tensor, exported: exports.Exported) -> None:
    operators = read_graph(exported.path).operators
    missing = {name: count for name, count in exported.operators.items() if operators[name] != count}
    if missing:
        raise DemoError(f"{exported.path} should have the operators {missing}, it has {dict(operators)}")
    difference = _difference(model, exported.predict, images)
    if not difference <= TOLERANCE:
        raise DemoError(f"{exported.path} is not the same model: outputs differ by {difference:.1e}")
    names = ", ".join(f"{count} x {name}" for name, count in exported.operators.items())
    print(f"{exported.path} ({exported.format}): {names}, outputs within {difference:.0e}")


@torch.no_grad()
def _difference(model: nn.Module, predict: exports.Predict, images: torch.Tensor) -> float:
    """The largest in any score, with a batch size that no example had."""
    return (model(images[:5]) - predict(images[:5])).abs().max().item()
