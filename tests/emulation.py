"""The GPU kernels as operators on CPU tensors: the sources of the GPU library, host launchers and all, compiled by the
C++ compiler with the emulator of tests/simt/. Built into build/emulated, anew only where something has changed.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock
from helpers import REPOSITORY, load_script
from ninja import ninja_syntax
from torch.utils import cpp_extension

SIMT = REPOSITORY / "tests" / "simt"
WARP_SIZES = [32, 64]
SANITIZERS = {
    "none": [],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-DSIMT_ASAN"],
    "thread": ["-fsanitize=thread", "-DSIMT_TSAN"],
}

COMPILER = os.environ.get("CXX", "c++")
setup_script = load_script(REPOSITORY / "setup.py")


def is_supported() -> bool:
    """Fibers are written for one platform."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


@dataclass(frozen=True)
class Emulator:
    """One way to compile the kernels."""

    warp_size: int = 32
    sanitizer: str = os.environ.get("MYVISION_EMULATED_SANITIZER", "none")

    @property
    def namespace(self) -> str:
        """Of the operators: ``torch.ops.myvision_emulated``."""
        return "myvision_emulated" if self.warp_size == 32 else f"myvision_emulated_{self.warp_size}"

    @property
    def directory(self) -> Path:
        return REPOSITORY / "build" / "emulated" / f"warp{self.warp_size}-{self.sanitizer}"

    def operators(self) -> Path:
        """The library with every operator, built."""
        sources = [*map(Path, setup_script.operator_glue()), *map(Path, setup_script.sources("ops/*/*_cuda.cu"))]
        return self._build("operators.so", [REPOSITORY / source for source in sources], library=True)

    def program(self, name: str) -> Path:
        """tests/simt/<name>.cu, built."""
        return self._build(name, [SIMT / f"{name}.cu"], library=False)

    def _build(self, name: str, sources: list[Path], library: bool) -> Path:
        setup_script.find_ninja()
        directory = self.directory / name.partition(".")[0]
        directory.mkdir(parents=True, exist_ok=True)
        with FileLock(directory / "lock"):
            (directory / "build.ninja").write_text(_ninja_file(self._flags(), name, sources, library))
            # A compiler does not run under a sanitizer that is loaded for the tests.
            environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
            result = subprocess.run(["ninja", "-C", directory], capture_output=True, text=True, env=environment)
        assert result.returncode == 0, f"the emulated kernels do not compile:\n{result.stdout}"
        return directory / name

    def _flags(self) -> list[str]:
        return [
            *["-std=c++20", "-O1", "-g1", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing"],
            *["-Wall", "-Wextra", "-Wno-unknown-pragmas"],
            *["-DMYVISION_GPU", "-DMYVISION_EMULATOR", f"-DSIMT_WARP_SIZE={self.warp_size}"],
            f"-DMYVISION_OP_NAMESPACE={self.namespace}",
            *[f"-I{REPOSITORY / directory}" for directory in ("csrc", "tests")],
            *[f"-isystem {path}" for path in cpp_extension.include_paths("cpu")],
            *SANITIZERS[self.sanitizer],
        ]


# As the tests' devices: warps are of 32 lanes on NVIDIA's and some of AMD's GPUs, of 64 on others of AMD's.
EMULATORS = {"emulated": Emulator(warp_size=32), "emulated_64": Emulator(warp_size=64)}


def _ninja_file(flags: list[str], name: str, sources: list[Path], library: bool) -> str:
    """The emulator itself is not instrumented, only told that the kernels are."""
    kinds = {"kernels": sources, "machine": sorted(SIMT.glob("*.cpp"))}
    objects = {f"{kind}/{source.stem}.o": (kind, source) for kind, files in kinds.items() for source in files}
    sanitize = [flag for flag in flags if flag.startswith("-fsanitize")]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths("cpu")] + ["-ltorch_cpu"]
    with contextlib.closing(io.StringIO()) as text:
        writer = ninja_syntax.Writer(text)
        compile = f"{COMPILER} -MMD -MF $out.d -x c++ -c $in -o $out"
        writer.rule("kernels", f"{compile} {' '.join(flags)}", depfile="$out.d", deps="gcc")
        plain = [flag for flag in flags if flag not in sanitize]
        writer.rule("machine", f"{compile} {' '.join(plain)}", depfile="$out.d", deps="gcc")
        linked = ["-shared", *libraries] if library else []
        writer.rule("link", f"{COMPILER} $in -o $out {' '.join([*sanitize, *linked])}")
        for target, (kind, source) in objects.items():
            writer.build(target, kind, str(source))
        writer.build(name, "link", list(objects))
        return text.getvalue()


@functools.cache
def load(emulator: Emulator) -> list[str]:
    """Makes the operators known to torch, and returns their names."""
    torch.ops.load_library(emulator.operators())
    prefix = f"{emulator.namespace}::"
    return [name.removeprefix(prefix) for name in torch._C._dispatch_get_all_op_names() if name.startswith(prefix)]


@contextlib.contextmanager
def in_place_of_cpu(emulator: Emulator) -> Iterator[None]:
    """Has myvision's operators run the emulated kernels where they would run those of the CPU."""
    library = torch.library.Library("myvision", "IMPL")
    for name in load(emulator):
        operator = getattr(getattr(torch.ops, emulator.namespace), name).default
        library.impl(name, operator, "CPU", allow_override=True)
    try:
        yield
    finally:
        library._destroy()
