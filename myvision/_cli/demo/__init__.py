"""The command `demo`: train a small network with deformable convolutions on real images, save, export, draw."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

EXTRA = ("sklearn", "matplotlib", "tqdm", "onnx", "onnxscript", "onnxruntime")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--epochs", type=_positive, help="default: 14, or 3 with --quick")
    parser.add_argument("--out", type=Path, default=Path("demo_output"), help="default: %(default)s")
    parser.add_argument(
        "--workers", type=_positive, default=2, help="processes that prepare images; default: %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--threads", type=_positive, help="default: as torch has it")
    parser.add_argument("--quick", action="store_true", help="shows that everything runs; asks for less accuracy")


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, but is {number}")
    return number


def run(args: argparse.Namespace) -> int:
    """0, or 1 with the reason on stderr."""
    if missing := [package for package in EXTRA if find_spec(package) is None]:
        return _fail(f"needs the package(s) {', '.join(missing)}: pip install 'myvision[demo]'")
    steps = import_module("myvision._cli.demo.steps")
    try:
        steps.run(args)
    except steps.DemoError as error:
        return _fail(str(error))
    return 0


def _fail(reason: str) -> int:
    print(f"demo: {reason}", file=sys.stderr)
    return 1
