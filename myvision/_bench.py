"""`python -m myvision bench`: hands over to the benchmarks package."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

# Installed, the benchmarks are a part of the package; in the source tree they stand beside it.
_benchmarks = "myvision.benchmarks" if find_spec("myvision.benchmarks") else "benchmarks"
_command = importlib.import_module(f"{_benchmarks}.__main__")

add_arguments = _command.add_arguments
run = _command.run
