"""The GPU kernels as operators on CPU tensors: the sources of the GPU library, host launchers and all, compiled by the
C++ compiler with the emulator of tests/simt/. Built into build/emulated, anew only where something has changed.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock
from helpers import REPOSITORY, load_script
from ninja import ninja_syntax
from torch.utils import cpp_extension

from myvision._cli.ops import overload

SIMT = REPOSITORY / "tests" / "simt"
WARP_SIZES = [32, 64]
# How kernels are instrumented, and what the emulator, which is not, has to know of it.
SANITIZERS = {
    "none": ([], []),
    "address": (["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"], ["-DSIMT_ASAN"]),
    "thread": (["-fsanitize=thread"], ["-DSIMT_TSAN"]),
}

COMPILER = shlex.split(os.environ.get("CXX", "c++"))
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
        return self._build("operators.so")

    def program(self, name: str) -> Path:
        """tests/simt/<name>.cu, built."""
        return self._build(name)

    def _build(self, name: str) -> Path:
        setup_script.find_ninja()
        self.directory.mkdir(parents=True, exist_ok=True)
        with FileLock(self.directory / "lock"):
            (self.directory / "build.ninja").write_text(self._ninja_file())
            # A compiler does not run under a sanitizer that is loaded for the tests.
            environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
            command = ["ninja", "-C", self.directory, name]
            result = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert result.returncode == 0, f"the emulated kernels do not compile:\n{result.stdout}"
        return self.directory / name

    def _ninja_file(self) -> str:
        """How each of the programs and the library are made. All of them share the emulator's objects."""
        instrument, told = SANITIZERS[self.sanitizer]
        flags = [*self._flags(), *told]
        kernels = [*flags, *instrument]
        torch_libraries = [*[f"-L{path}" for path in cpp_extension.library_paths("cpu")], "-ltorch_cpu"]
        text = io.StringIO()
        writer = ninja_syntax.Writer(text)
        # What only checks arguments and allocates is compiled as fast as can be; it runs once a call.
        for rule, options in {
            "emulator": [*flags, "-O1"],
            "kernels": [*kernels, "-O1"],
            "glue": [*kernels, "-Og"],
        }.items():
            command = f"{shlex.join([*COMPILER, *options])} -MMD -MF $out.d -x c++ -c $in -o $out"
            writer.rule(rule, command, depfile="$out.d", deps="gcc")
        for rule, options in {"program": instrument, "library": [*instrument, "-shared", *torch_libraries]}.items():
            writer.rule(rule, f"{shlex.join(COMPILER)} $in -o $out {shlex.join(options)}")

        def compiled(rule: str, files: Iterable[Path]) -> list[str]:
            return [output for file in files for output in writer.build(f"{rule}/{file.name}.o", rule, str(file))]

        emulator = compiled("emulator", sorted(SIMT.glob("*.cpp")))
        for program in sorted(SIMT.glob("*.cu")):
            writer.build(program.stem, "program", [*compiled("kernels", [program]), *emulator])
        glue = compiled("glue", [REPOSITORY / source for source in setup_script.operator_glue()])
        launchers = [REPOSITORY / source for source in setup_script.sources("ops/**/*_cuda.cu")]
        writer.build("operators.so", "library", [*compiled("kernels", launchers), *glue, *emulator])
        return text.getvalue()

    def _flags(self) -> list[str]:
        includes = [REPOSITORY / "csrc", REPOSITORY / "tests", *cpp_extension.include_paths("cpu")]
        return [
            *["-std=c++20", "-g1", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing"],
            *["-DMYVISION_GPU", "-DMYVISION_EMULATOR", f"-DSIMT_WARP_SIZE={self.warp_size}"],
            f"-DMYVISION_OP_NAMESPACE={self.namespace}",
            *[f"-I{path}" for path in includes],
        ]


# As the tests' devices: warps are of 32 lanes on NVIDIA's and some of AMD's GPUs, of 64 on others of AMD's.
EMULATORS = {"emulated": Emulator(warp_size=32), "emulated_64": Emulator(warp_size=64)}


@functools.cache
def load(emulator: Emulator) -> list[str]:
    """Makes the operators known to torch, and returns their names, with the overload where there are several."""
    torch.ops.load_library(emulator.operators())
    prefix = f"{emulator.namespace}::"
    return [name.removeprefix(prefix) for name in torch._C._dispatch_get_all_op_names() if name.startswith(prefix)]


@contextlib.contextmanager
def in_place_of_cpu(emulator: Emulator) -> Iterator[None]:
    """Has myvision's operators run the emulated kernels where they would run those of the CPU."""
    library = torch.library.Library("myvision", "IMPL")
    for name in load(emulator):
        library.impl(name, overload(name, emulator.namespace), "CPU", allow_override=True)
    try:
        yield
    finally:
        library._destroy()
