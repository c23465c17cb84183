"""An environment whose Python loads a compiler's sanitizer first, as instrumented libraries need it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

COMPILER = os.environ.get("CXX", "c++")


def environment(*libraries: str, **options: str) -> dict[str, str]:
    """The environment of this process with these libraries of the compiler, for example "libasan.so", loaded first."""
    found = [_find(name) for name in libraries]
    return os.environ | {"LD_PRELOAD": ":".join(map(str, found))} | options


def _find(name: str) -> Path:
    printed = subprocess.run([COMPILER, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
    path = Path(printed.strip()).resolve()
    if not path.is_file():
        sys.exit(f"sanitizer: {COMPILER} has no {name}")
    return path
