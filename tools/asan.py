"""Runs kernel tests with the CPU kernels built under AddressSanitizer, once for each instruction set.

Whatever the kernels read or write outside a tensor or their workspace then ends the run, even where it would go
unnoticed otherwise. Linux with GCC or Clang only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import sanitizer

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "asan"
SOURCES = ["csrc", "myvision", "tests", "setup.py", "pyproject.toml", "README.md", "LICENSE"]
FILES = ("my_add", "deform_conv2d", "deform_conv2d_errors", "norm", "batch_norm", "attention")
TESTS = [f"tests/test_{name}.py" for name in FILES]
# What comes near the edges: odd shapes, strides with gaps, positions that are far off, infinite or NaN, bad input.
NAMES = "far or any_ or in_place or empty or wanted or layout and not norm or lengths or 32_bits or bad_input"
SELECTED = f"({NAMES}) and not emulated"


def build() -> None:
    """Builds myvision with AddressSanitizer in a copy of the sources."""
    for name in SOURCES:
        source, copy = ROOT / name, BUILD / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy2(source, copy)
    flags = "-fsanitize=address -fno-omit-frame-pointer"
    environment = os.environ | {"CFLAGS": flags, "CXXFLAGS": flags, "LDFLAGS": flags}
    environment |= {"MYVISION_NO_CUDA": "1", "DEBUG": "1"}  # optimised, it compiles four times as long
    subprocess.run([sys.executable, "setup.py", "build_ext", "--inplace"], cwd=BUILD, env=environment, check=True)


def instruction_sets(environment: dict[str, str]) -> list[str]:
    """Those this machine has, weakest first."""
    code = "import sys; sys.path.insert(0, 'tests'); import helpers; print(*helpers.available_instruction_sets())"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=BUILD, env=environment, stdout=-1, text=True, check=True).stdout.split()


def main() -> None:
    build()
    # Of the C++ runtime exceptions are watched, so it has to be there before Python. Python itself has leaks.
    environment = sanitizer.environment("libasan.so", "libstdc++.so", ASAN_OPTIONS="detect_leaks=0")
    # AddressSanitizer writes its report to the process's own standard error.
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "--all", "--capture=sys", "-k", SELECTED, *TESTS]
    for name in instruction_sets(environment):
        print(f"asan: {name}", flush=True)
        result = subprocess.run(pytest, cwd=BUILD, env=environment | {"ATEN_CPU_CAPABILITY": name})
        if result.returncode:
            sys.exit(f"asan: the tests failed with the instruction set {name}")


if __name__ == "__main__":
    main()
