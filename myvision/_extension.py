"""Loads the operator libraries, and says what is wrong where that fails."""

from __future__ import annotations

import os
import re
import warnings
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

_OLDEST_TORCH = (2, 11)
_PACKAGE = Path(__file__).resolve().parent


def _library(name: str) -> Path:
    return _PACKAGE / f"{name}{EXTENSION_SUFFIXES[-1]}"


def load() -> None:
    """Load the operators into torch; on import of myvision.

    Raises:
        ImportError: the libraries are missing, do not fit the installed torch, or another copy is loaded already.
    """
    path = _library("_C")
    if str(path) in torch.ops.loaded_libraries:
        return
    _check_torch()
    _check_first_copy(path)
    if not path.is_file():
        raise ImportError(_why_missing(path))
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise ImportError(_why_failed(path, str(error))) from error
    if torch.version.cuda or torch.version.hip:
        _load_gpu_library(_library("_C_cuda"))


def _load_gpu_library(path: Path) -> None:
    """The GPU operators, where they were built; without them the CPU operators are still of use."""
    if not path.is_file():
        return
    try:
        torch.ops.load_library(path)
    except OSError as error:
        warnings.warn(f"No GPU operators: {_why_failed(path, str(error))}", RuntimeWarning, stacklevel=4)


def has_cuda_ops() -> bool:
    """Whether the GPU operators (CUDA, or HIP on ROCm) are built and loaded.

    Example:
        >>> import myvision
        >>> device = "cuda" if torch.cuda.is_available() and myvision.has_cuda_ops() else "cpu"
    """
    return str(_library("_C_cuda")) in torch.ops.loaded_libraries


def _check_torch() -> None:
    version = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])
    if version < _OLDEST_TORCH:
        raise ImportError(
            f"torch {torch.__version__} is too old for myvision, which needs torch >= 2.11: pip install --upgrade torch"
        )


def _check_first_copy(path: Path) -> None:
    """A second registration of the same operators would end the process."""
    if not hasattr(torch.ops.myvision, "_cpu_capability"):
        return
    copies = [library for library in torch.ops.loaded_libraries if Path(library).stem == path.stem]
    raise ImportError(
        f"myvision's operators are registered already, by another copy ({', '.join(copies) or 'path unknown'}); "
        f"loading {path} too would crash the process. Keep one copy: check `pip list`, PYTHONPATH and the directory "
        "you started in."
    )


def _why_missing(path: Path) -> str:
    if (_PACKAGE.parent / "setup.py").is_file():
        return (
            f"myvision is imported from its source tree {_PACKAGE.parent}, which holds no built {path.name}. Build it "
            "there with `pip install --no-build-isolation -e .`, or start Python in another directory to use an "
            "installed myvision."
        )
    return f"{path} is missing: the installation is incomplete. Reinstall: pip install --force-reinstall myvision"


def _why_failed(path: Path, error: str) -> str:
    """The dynamic linker's message, and what it means."""
    if missing := re.search(r"(\S+): cannot open shared object file", error):
        return f"{path.name} needs {missing[1]}, which is not found.{_toolkit_hint(missing[1])} ({error})"
    if symbol := re.search(r"undefined symbol: (\S+)", error):
        return (
            f"{path.name} needs {symbol[1]}, which torch {torch.__version__} does not have. myvision serves torch >= "
            f"2.11 of the kind (CPU, CUDA, ROCm) it was built with: update torch, or rebuild myvision. ({error})"
        )
    if re.search(r"version `\S+' not found", error):
        return f"{path.name} was built on a newer system than this one: rebuild myvision here. ({error})"
    return f"{path.name} does not load, rebuild or reinstall myvision: {error}"


def _toolkit_hint(library: str) -> str:
    if "cuda" in library or "cudart" in library:
        return f" It was built for another CUDA version than torch {torch.__version__} ({torch.version.cuda}): rebuild."
    return " Install it, or put its directory on LD_LIBRARY_PATH."


def instruction_set() -> tuple[str, str]:
    """The instruction set that the CPU kernels use, and why."""
    name: str = torch.ops.myvision._cpu_capability()
    limit = os.environ.get("ATEN_CPU_CAPABILITY")
    if limit and limit.lower() == name.lower():
        return name, f"ATEN_CPU_CAPABILITY={limit}"
    return name, "the best that is built and that this CPU has"
