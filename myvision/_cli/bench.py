"""`python -m myvision bench`: hands over to the benchmarks package."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

# Installed, the benchmarks are a part of the package; in the source tree they stand beside it.
_benchmarks = "myvision.benchmarks" if find_spec("myvision.benchmarks") else "benchmarks"


def module(name: str) -> Any:
    """A module of the benchmarks."""
    return import_module(f"{_benchmarks}.{name}")


add_arguments = module("__main__").add_arguments
run = module("__main__").run
