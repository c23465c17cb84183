"""python -m myvision env: what runs here, and how it was built."""

from __future__ import annotations

import argparse
import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import myvision
from myvision import _extension
from myvision._checks import FLOATING, name_of

OPTIONAL_PACKAGES = ("torchvision", "onnx", "onnxscript", "onnxruntime")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of lines")


def run(args: argparse.Namespace) -> int:
    report = describe()
    if args.json:
        print(json.dumps(report, indent=2))
        return 0
    width = max(map(len, report)) + 2
    for name, value in report.items():
        print(f"{name:<{width}}{value}")
    return 0


def describe() -> dict[str, str]:
    """One line of text per topic."""
    instruction_set, why = _extension.instruction_set()
    built: dict[str, str] = json.loads(torch.ops.myvision._build_configuration())
    return {
        "myvision": f"{myvision.__version__} in {Path(myvision.__file__).parent}",
        "Python": f"{platform.python_version()} on {platform.platform()}",
        "torch": f"{torch.__version__} ({torch_kind()})",
        **{name: installed_version(name) for name in OPTIONAL_PACKAGES},
        "instruction set": f"{instruction_set} ({why})",
        **{f"linear's product in {name_of(dtype)}": product(dtype) for dtype in FLOATING},
        "threads": str(torch.get_num_threads()),
        "GPU operators": gpu_operators(built["GPU library"]),
        "GPUs": gpus(),
        **{f"built: {topic}": choice for topic, choice in built.items()},
    }


def product(dtype: torch.dtype) -> str:
    """Whose kernels multiply matrices on the CPU, and why."""
    try:
        choice: str = torch.ops.myvision._product_choice(dtype)
    except RuntimeError as error:  # MYVISION_PRODUCT has a value that means nothing
        return str(error).splitlines()[0]
    return choice


def torch_kind() -> str:
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"


def installed_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def gpu_operators(choice: str) -> str:
    if myvision.has_cuda_ops():
        return "loaded"
    if choice.startswith("left out"):
        return f"none; the build {choice}"
    if not (torch.version.cuda or torch.version.hip):
        return f"built, not loaded: torch {torch.__version__} is built for the CPU only"
    return "built, not loaded: see the warning on import"


def gpus() -> str:
    if not torch.cuda.is_available():
        return "none that torch can use"
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return ", ".join(f"{gpu.name} (compute capability {gpu.major}.{gpu.minor})" for gpu in properties)
