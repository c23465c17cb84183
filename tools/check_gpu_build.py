"""Compile every GPU kernel for the GPUs of both vendors, and look at what the compilers made of it. Needs no GPU.

    python tools/check_gpu_build.py [--with nvcc hipcc clang] [--ops OP...]

Three compilers take the kernels: nvcc, hipcc (the sources as hipify translates them) and clang (the sources as they
are, for GPUs that hipcc may be too old for). A table shows registers, shared memory and spills. Fails where a file does
not compile, where a kernel spills registers to memory, where one keeps local memory (an array that the compiler could
not hold in registers, usually because it is indexed by what is known at run time only), and where one's variables in
shared memory take another number of bytes than it declares by MYVISION_DYNAMIC_SHARED.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import torch
from torch.utils import cpp_extension

ROOT = Path(__file__).parent.parent.resolve()


def load_build_script() -> ModuleType:
    """setup.py, which knows the sources, the flags and where the toolkits are."""
    spec = importlib.util.spec_from_file_location("setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["setup"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build_script = load_build_script()


def fail(message: str) -> NoReturn:
    sys.exit(f"check-gpu-build: error: {message}")


# ---- what the compilers tell -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """What a compiler made of one kernel; shared, spilled and local memory in bytes."""

    name: str  # mangled
    architecture: str
    registers: int
    shared: int
    spilled: int
    local: int
    declared: int | None = None  # of shared memory, where the kernel says what it has


def sections(report: str, title: str) -> list[str]:
    """What a report says of each kernel, behind the title that opens it."""
    return report.split(title)[1:]


def total(section: str, pattern: str, default: int | None = None) -> int:
    """The sum of the numbers that fit the pattern; without a default there must be one."""
    found = [int(number) for number in re.findall(pattern, section)]
    if not found and default is None:
        fail(f"the compiler's report is not understood, it has no {pattern!r}:\n{section}")
    return sum(found, default or 0)


def read_ptxas(report: str, architecture: str) -> list[Kernel]:
    """The kernels in what `ptxas -v` prints; functions that a kernel calls count as its own."""
    return [
        Kernel(
            name=section.split("'")[1],
            architecture=architecture,
            registers=total(section, r"Used (\d+) registers"),
            shared=total(section, r"(\d+) bytes smem", default=0),
            spilled=total(section, r"(\d+) bytes spill stores"),
            local=total(section, r"(\d+) bytes stack frame"),
        )
        for section in sections(report, "Compiling entry function")
    ]


def read_amdgpu(report: str, architecture: str) -> list[Kernel]:
    """The kernels in what `-Rpass-analysis=kernel-resource-usage` prints."""
    return [
        Kernel(
            name=section.split()[0],
            architecture=architecture,
            registers=total(section, r" VGPRs: (\d+)") + total(section, r" AGPRs: (\d+)", default=0),
            shared=total(section, r"LDS Size \[bytes/block\]: (\d+)"),
            spilled=4 * total(section, r"VGPRs Spill: (\d+)"),  # scalar registers are parked in vector registers
            local=total(section, r"ScratchSize \[bytes/lane\]: (\d+)"),
        )
        for section in sections(report, "Function Name: ")
    ]


def declarations(assembly: str, opening: str) -> dict[str, int]:
    """The bytes of shared memory that kernels declare, by name; the pattern opens a kernel and captures that."""
    _, *parts = re.split(opening, assembly)
    found = {
        name: re.search(r"shared variables: (\d+) bytes", text) for name, text in zip(*[iter(parts)] * 2, strict=True)
    }
    return {name: int(match[1]) for name, match in found.items() if match}


# ---- compilers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compiler:
    """How to have kernels compiled, and a report of them."""

    program: str
    package: str  # what brings the program
    architectures: tuple[str, ...]
    options: tuple[str, ...]  # {} stands for the architecture, {scratch} for a folder
    assembly: str  # which files in that folder hold it
    opening: str  # of a kernel in it
    read: Callable[[str, str], list[Kernel]]
    hipified: bool = False

    def compile(self, source: Path, architecture: str) -> list[Kernel]:
        """The source's kernels for one architecture."""
        with tempfile.TemporaryDirectory() as scratch:
            options = [option.format(architecture, scratch=scratch) for option in self.options]
            command = [self.program, *build_script.gpu_compiler_flags(), *options, str(source), "-o", f"{scratch}/out"]
            result = subprocess.run(command, env=os.environ | {"HIP_PLATFORM": "amd"}, capture_output=True, text=True)
            assembly = "\n".join(path.read_text() for path in Path(scratch).glob(self.assembly))
        if result.returncode != 0:
            fail(f"{Path(self.program).name} does not compile {source} for {architecture}:\n{result.stderr}")
        kernels = self.read(result.stderr, architecture)
        if not kernels:
            fail(f"{Path(self.program).name} reports no kernel in {source}:\n{result.stderr}")
        declared = declarations(assembly, self.opening)
        return [replace(kernel, declared=declared.get(kernel.name)) for kernel in kernels]


OPENING_OF_AMDGPU = r"-- Begin function (\w+)"
REPORT_OF_AMDGPU = "-Rpass-analysis=kernel-resource-usage"
BITCODE = f"/usr/lib/{platform.machine()}-linux-gnu/amdgcn/bitcode"
# AMD's device library, without which kernels are full of calls; clang itself refuses one that is older than the GPU.
DEVICE_LIBRARY = [
    word
    for name in ("hip", "ocml", "ockl", "oclc_abi_version_500")
    for word in ("-Xclang", "-mlink-builtin-bitcode", "-Xclang", f"{BITCODE}/{name}.bc")
]
COMPILERS = {
    "nvcc": Compiler(
        program="nvcc",
        package="NVIDIA's CUDA toolkit, where CUDA_HOME or PATH leads to it",
        architectures=("sm_75", "sm_80", "sm_90", "sm_100", "sm_120"),
        options=(
            *("-arch={}", "-cubin", "-Xptxas", "-v", "--keep", "--keep-dir={scratch}"),
            *cpp_extension.COMMON_NVCC_FLAGS,
            f"-I{build_script.CSRC}",
        ),
        assembly="*.ptx",
        opening=r"\.entry (\w+)\(",
        read=read_ptxas,
    ),
    "hipcc": Compiler(
        program="hipcc",
        package="apt-get install hipcc rocm-device-libs libamdhip64-dev",
        architectures=("gfx90a", "gfx1030"),
        options=(
            *("-x", "hip", "--offload-arch={}", "--cuda-device-only", "-S", REPORT_OF_AMDGPU),
            *cpp_extension.COMMON_HIP_FLAGS,
            *cpp_extension.COMMON_HIPCC_FLAGS,
            f"-I{build_script.HIP_CSRC}",
        ),
        assembly="out",
        opening=OPENING_OF_AMDGPU,
        read=read_amdgpu,
        hipified=True,
    ),
    "clang": Compiler(
        program="clang++-19",
        package="apt-get install clang-19 rocm-device-libs libamdhip64-dev",
        architectures=("gfx942", "gfx1100"),
        options=(
            *("-x", "hip", "--offload-arch={}", "--offload-device-only", "-S", REPORT_OF_AMDGPU),
            *("-nogpulib", *DEVICE_LIBRARY),
            f"-I{build_script.CSRC}",
        ),
        assembly="out",
        opening=OPENING_OF_AMDGPU,
        read=read_amdgpu,
    ),
}


def found_here(compiler: Compiler) -> Compiler | None:
    """The compiler with its path and the architectures that it knows; None where it is missing."""
    if compiler.program != "nvcc":
        return compiler if shutil.which(compiler.program) else None
    home = build_script.find_cuda_home(torch.version.cuda or "")
    if home is None:
        return None
    nvcc = str(home / "bin" / "nvcc")
    known = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout.split()
    return replace(compiler, program=nvcc, architectures=tuple(a for a in compiler.architectures if a in known))


# ---- the check -------------------------------------------------------------------------------------------------------


def operators() -> list[str]:
    return sorted(path.name for path in (ROOT / "csrc" / "ops").iterdir())


def kernel_sources(names: Sequence[str]) -> list[str]:
    return [path for op in names for path in build_script.sources(f"ops/{op}/**/*_cuda.cu")]


def hipify(sources: Sequence[str]) -> list[str]:
    with contextlib.redirect_stdout(io.StringIO()):  # it names every file
        return build_script.hipify(sources)


def compile_all(compiler: Compiler, sources: Sequence[str]) -> list[Kernel]:
    """The kernels of every source for every architecture, several at a time."""
    paths = [ROOT / source for source in (hipify(sources) if compiler.hipified else sources)]
    jobs = [(path, architecture) for path in paths for architecture in compiler.architectures]
    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:
        return [kernel for kernels in pool.map(lambda job: compiler.compile(*job), jobs) for kernel in kernels]


def short_names(kernels: Sequence[Kernel]) -> list[str]:
    """Demangled, without parameters and the project's namespaces."""
    mangled = "\n".join(kernel.name for kernel in kernels)
    demangled = subprocess.run(["c++filt", "--no-params"], input=mangled, capture_output=True, text=True, check=True)
    return (
        re.sub(r"\bmyvision::(gpu::\w+::)?|\(anonymous namespace\)::", "", demangled.stdout)
        .replace("> >", ">>")
        .splitlines()
    )


def table(kernels: Sequence[Kernel]) -> str:
    """A line per kernel: registers on each architecture, the most of everything else on any."""
    architectures = list(dict.fromkeys(kernel.architecture for kernel in kernels))
    rows: dict[str, list[Kernel]] = {}
    for name, kernel in zip(short_names(kernels), kernels, strict=True):
        rows.setdefault(name, []).append(kernel)
    width = max(map(len, rows))
    lines = [f"{'registers':{width}} {' '.join(f'{a:>8}' for a in architectures)}   shared  spilled    local"]
    for name, row in sorted(rows.items()):
        registers = {kernel.architecture: kernel.registers for kernel in row}
        most = (max(kernel.shared for kernel in row), max(k.spilled for k in row), max(k.local for k in row))
        figures = [registers.get(architecture, "") for architecture in architectures]
        lines.append(f"{name:{width}} " + " ".join(f"{figure:>8}" for figure in (*figures, *most)))
    return "\n".join(lines)


def complain(kernel: Kernel) -> str | None:
    """What a kernel has that it should not have."""
    if kernel.spilled:
        return f"spills {kernel.spilled} bytes: let a thread hold less, or relax the launch bounds"
    if kernel.local:
        return f"keeps {kernel.local} bytes of local memory: index arrays by constants, in unrolled loops"
    if kernel.declared not in (None, kernel.shared):
        return f"declares {kernel.declared} bytes of variables in shared memory, and has {kernel.shared}"
    return None


def check(compiler: Compiler, sources: Sequence[str]) -> list[str]:
    """Prints what the compiler made of the sources, returns what is wrong with it."""
    kernels = compile_all(compiler, sources)
    print(f"\n{compiler.program}: {len(kernels)} kernels for {', '.join(compiler.architectures)}")
    print(table(kernels), flush=True)
    return [
        f"{name} for {kernel.architecture} {complaint}"
        for name, kernel in zip(short_names(kernels), kernels, strict=True)
        if (complaint := complain(kernel))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--with", nargs="+", choices=COMPILERS, default=list(COMPILERS), dest="compilers")
    parser.add_argument("--ops", nargs="+", choices=operators(), default=operators())
    args = parser.parse_args()
    compilers = {name: found_here(COMPILERS[name]) for name in args.compilers}
    missing = [f"{name} is missing: {COMPILERS[name].package}" for name, found in compilers.items() if found is None]
    if missing:
        fail("\n  ".join(["compilers are missing (or choose others by --with):", *missing]))
    sources = kernel_sources(args.ops)
    complaints = [line for compiler in compilers.values() if compiler for line in check(compiler, sources)]
    if complaints:
        fail("\n  ".join(["kernels do not keep everything in registers, or are not as they say:", *complaints]))


if __name__ == "__main__":
    main()
