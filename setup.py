"""Builds myvision's two operator libraries: _C (schemas and CPU kernels) and _C_cuda (CUDA or HIP kernels).

The GPU library is built where torch sees a GPU and the toolkit is there, or where it is asked for: then a missing
toolkit is an error.

Environment switches:
  FORCE_CUDA=1            ask for the GPU library, for a broad list of architectures where torch sees no GPU
  TORCH_CUDA_ARCH_LIST    ask for it, for these architectures, such as "8.0;9.0+PTX" (PYTORCH_ROCM_ARCH on ROCm)
  MYVISION_NO_CUDA=1      leave it out
  NVCC_FLAGS              further flags for nvcc or hipcc
  DEBUG=1                 no optimisation, debug symbols, assertions
  MAX_JOBS                compilers at work at the same time (default: one per available core)
  CXX, CUDA_HOME          the C++ compiler and the CUDA toolkit to use
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.errors import CompileError

ROOT = Path(__file__).parent.resolve()
CSRC = ROOT / "csrc"
HIP_CSRC = ROOT / "build" / "hip"
OLDEST_TORCH = (2, 11)
WINDOWS = sys.platform == "win32"
# Commands that read the metadata only: they must work before torch is installed.
METADATA_COMMANDS = {"egg_info", "dist_info", "sdist", "clean", "--version", "--name", "--help", "--help-commands"}


def fail(message: str) -> NoReturn:
    sys.exit(f"myvision: error: {message}")


def say(message: str) -> None:
    print(f"myvision: {message}", flush=True)


def switched_on(name: str) -> bool:
    return os.environ.get(name, "").lower() in {"1", "on", "yes", "true", "y"}


# ---- flags of every compiler and architecture ------------------------------------------------------------------------


@dataclass(frozen=True)
class Flags:
    """Compiler flags: of every file, of each build type, and of each instruction set."""

    every: list[str]
    release: list[str]
    products: list[str]  # of a release's kernels that are matrix products
    debug: list[str]
    instruction_set: dict[str, list[str]]

    def all(self) -> list[str]:
        return self.every + (self.debug if switched_on("DEBUG") else self.release)

    def kernels(self, instruction_set: str, source: str) -> list[str]:
        """Of a file that is compiled once per instruction set."""
        names = [f"-DCPU_CAPABILITY={instruction_set}", f"-DCPU_CAPABILITY_{instruction_set}"]
        only_for_old_cpus = instruction_set == "DEFAULT" and len(INSTRUCTION_SETS) > 1
        is_product = not MATRIX_PRODUCTS.isdisjoint(Path(source).parts)
        products = self.products if is_product and not only_for_old_cpus and not switched_on("DEBUG") else []
        return self.all() + products + self.instruction_set[instruction_set] + names


GNU_EVERY = ["-std=c++20", "-Wall", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math"]
GCC = Flags(
    # False alarms: in GCC 12's own AVX-512 intrinsics, and of Clang's pragmas in torch's headers.
    every=[*GNU_EVERY, "-Wno-maybe-uninitialized", "-Wno-unknown-pragmas"],
    # By itself -O2 leaves loops as they are whose length the compiler does not know.
    release=["-O2", "-fvect-cost-model=dynamic", "-g0", "-DNDEBUG"],
    # -O3 unrolls the tiles of products; all else is as fast without, and compiled in two thirds of the time.
    products=["-O3"],
    debug=["-O0", "-g", "-UNDEBUG"],
    instruction_set={
        "DEFAULT": [],
        "AVX2": ["-mavx2", "-mfma", "-mf16c"],
        # More false alarms in the intrinsics.
        "AVX512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c", "-Wno-uninitialized"],
    },
)
CLANG = replace(GCC, every=GNU_EVERY, release=["-O2", "-g0", "-DNDEBUG"])
MSVC = Flags(
    every=["/std:c++20", "/EHsc", "/permissive-", "/Zc:__cplusplus"],
    release=["/O2", "/DNDEBUG"],
    products=[],
    debug=["/Od", "/Z7", "/UNDEBUG"],
    instruction_set={"DEFAULT": [], "AVX2": ["/arch:AVX2"], "AVX512": ["/arch:AVX512"]},
)

MATRIX_PRODUCTS = {"attention", "deform_conv2d", "linear"}  # the operators whose kernels are

X86_64 = ["DEFAULT", "AVX2", "AVX512"]
# On other machines DEFAULT is what the compiler targets by itself: NEON on aarch64.
INSTRUCTION_SETS = {"x86_64": X86_64, "AMD64": X86_64}.get(platform.machine(), ["DEFAULT"])


def flags_of(compiler: str) -> Flags:
    """Of the compiler with this version line."""
    if compiler == "MSVC":
        return MSVC
    return CLANG if "clang" in compiler else GCC


def gpu_compiler_flags() -> list[str]:
    optimise = ["-g", "-O0"] if switched_on("DEBUG") else ["-O3", "-DNDEBUG"]
    return ["-std=c++20", *optimise, *shlex.split(os.environ.get("NVCC_FLAGS", ""))]


ROCM_ARCHITECTURES = "gfx90a;gfx942;gfx1030;gfx1100"


def cuda_architectures(cuda: tuple[int, int]) -> str:
    """Those that a toolkit compiles for, and PTX of one that is older than every GPU without an image, such as 11.0."""
    newest = ["9.0", "10.0+PTX", "12.0"] if cuda >= (12, 8) else ["9.0+PTX"]
    return ";".join(["7.5", "8.0", "8.6", "8.9", *newest])


# ---- what the machine has --------------------------------------------------------------------------------------------


def import_torch() -> Any:
    """torch, or one line that says what is wrong with it."""
    try:
        import torch
    except ImportError as error:
        fail(
            f"building needs torch >= 2.11, and importing it failed ({error}). "
            "Install torch first, then: pip install --no-build-isolation ."
        )
    version = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])
    if version < OLDEST_TORCH:
        fail(f"torch {torch.__version__} is too old, myvision needs torch >= 2.11: pip install --upgrade torch")
    return torch


def cxx() -> list[str]:
    """The C++ compiler's command."""
    return shlex.split(os.environ.get("CXX", "cl" if WINDOWS else "c++"))


def check_compiler() -> str:
    """The C++ compiler's version line, after compiling a line of C++20 with it."""
    compiler = cxx()
    if shutil.which(compiler[0]) is None:
        fail(f"no C++ compiler: {compiler[0]!r} is not on PATH. Install one (g++ or clang), or set CXX to it.")
    if WINDOWS:
        return "MSVC"
    test = subprocess.run(
        [*compiler, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"],
        input="#include <concepts>\nstatic_assert(std::integral<int>);",
        capture_output=True,
        text=True,
    )
    if test.returncode != 0:
        fail(f"{compiler[0]!r} does not compile C++20: {(test.stderr.strip() or 'no message').splitlines()[0]}")
    return subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout.splitlines()[0]


def find_ninja() -> bool:
    """Puts the ninja of the PyPI package on PATH where the environment is not activated."""
    try:
        import ninja

        os.environ["PATH"] += os.pathsep + ninja.BIN_DIR
    except ImportError:
        pass
    return shutil.which("ninja") is not None


def find_cuda_home(cuda: str) -> Path | None:
    """The toolkit with compiler and headers: nvcc on PATH may be a wrapper script far from cuda_runtime.h."""
    named = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    nvcc = shutil.which("nvcc")
    beside_nvcc = [Path(nvcc).resolve().parent.parent] if nvcc else []
    roots = Path("C:/Program Files/NVIDIA GPU Computing Toolkit/CUDA") if WINDOWS else Path("/usr/local")
    prefix = "v" if WINDOWS else "cuda-"
    standard = [
        roots / f"{prefix}{cuda}",
        *sorted(roots.glob(f"{prefix}{cuda.split('.')[0]}*"), reverse=True),
        *([] if WINDOWS else [roots / "cuda", Path("/opt/cuda")]),
    ]
    for home in [*(Path(name) for name in named if name), *beside_nvcc, *standard]:
        has_nvcc = any((home / "bin" / name).is_file() for name in ("nvcc", "nvcc.exe"))
        if has_nvcc and (home / "include" / "cuda_runtime.h").is_file():
            return home
    return None


def choose_jobs() -> None:
    """As many compilers at once as cores are ours, where MAX_JOBS does not say; needs ninja."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    os.environ.setdefault("MAX_JOBS", str(cores))
    if find_ninja():
        say(f"jobs: {os.environ['MAX_JOBS']}")
    else:
        say("ninja was not found: compiling one file at a time; pip install ninja makes it faster")


def nvcc_version(cuda_home: Path) -> tuple[int, int]:
    output = subprocess.run([cuda_home / "bin" / "nvcc", "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release (\d+)\.(\d+)", output)
    if release is None:
        fail(f"{cuda_home / 'bin' / 'nvcc'} --version does not tell a CUDA release; set CUDA_HOME to a CUDA toolkit")
    return int(release[1]), int(release[2])


# ---- what to build ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpu:
    """The GPU library: kind is "cuda", "hip" or None, and then `why` says why it is left out."""

    kind: str | None
    why: str


@dataclass(frozen=True)
class Configuration:
    """What this machine builds, and how; `shown` is embedded for `python -m myvision env`."""

    flags: Flags
    gpu: Gpu
    shown: dict[str, str]


def configure() -> Configuration:
    torch = import_torch()
    compiler = check_compiler()
    gpu = choose_gpu(torch)
    shown = {
        "torch": torch.__version__,
        "compiler": compiler,
        "build type": "debug" if switched_on("DEBUG") else "release",
        "instruction sets": ", ".join(INSTRUCTION_SETS),
        "GPU library": gpu.why if gpu.kind else f"left out: {gpu.why}",
    }
    for topic, chosen in shown.items():
        say(f"{topic}: {chosen}")
    return Configuration(flags_of(compiler), gpu, shown)


def choose_gpu(torch: Any) -> Gpu:
    asking = asks_for_gpu(torch)
    if switched_on("MYVISION_NO_CUDA"):
        if asking == "FORCE_CUDA":
            fail("MYVISION_NO_CUDA and FORCE_CUDA are both set; unset one")
        return Gpu(None, "MYVISION_NO_CUDA is set")
    if not asking and not torch.cuda.is_available():
        return Gpu(None, "torch sees no GPU; FORCE_CUDA=1 builds it all the same")
    gpu = choose_hip(torch) if torch.version.hip else choose_cuda(torch)
    if gpu.kind is None and asking:
        fail(f"{asking} is set, which asks for the GPU library, but {gpu.why}")
    return gpu


def asks_for_gpu(torch: Any) -> str | None:
    """The variable that asks for the GPU library, None where none does."""
    if switched_on("FORCE_CUDA"):
        return "FORCE_CUDA"
    variable = "PYTORCH_ROCM_ARCH" if torch.version.hip else "TORCH_CUDA_ARCH_LIST"
    return variable if os.environ.get(variable) else None


def choose_hip(torch: Any) -> Gpu:
    from torch.utils import cpp_extension

    if cpp_extension.ROCM_HOME is None:
        return Gpu(None, "no ROCm toolkit was found: set ROCM_HOME to it")
    architectures = choose_architectures(torch, "PYTORCH_ROCM_ARCH", ROCM_ARCHITECTURES)
    return Gpu("hip", f"ROCm in {cpp_extension.ROCM_HOME}, architectures {architectures}")


def choose_cuda(torch: Any) -> Gpu:
    if torch.version.cuda is None:
        return Gpu(None, f"torch {torch.__version__} is built without CUDA: install one with it")
    home = find_cuda_home(torch.version.cuda)
    if home is None:
        return Gpu(None, "no CUDA toolkit (bin/nvcc and include/cuda_runtime.h) was found: set CUDA_HOME to it")
    version = nvcc_version(home)
    if version[0] != int(torch.version.cuda.split(".")[0]):
        return Gpu(
            None,
            f"nvcc in {home} is of CUDA {version[0]}.{version[1]}, torch {torch.__version__} of CUDA "
            f"{torch.version.cuda}: set CUDA_HOME to a toolkit of the same major version",
        )
    os.environ["CUDA_HOME"] = str(home)  # read when torch.utils.cpp_extension is imported
    architectures = choose_architectures(torch, "TORCH_CUDA_ARCH_LIST", cuda_architectures(version))
    return Gpu("cuda", f"CUDA {version[0]}.{version[1]} in {home}, architectures {architectures}")


def choose_architectures(torch: Any, variable: str, default: str) -> str:
    """The variable as it is set; else torch takes those of the GPUs here, and without a GPU it takes the default."""
    if not os.environ.get(variable):
        if torch.cuda.is_available():
            return "those of the GPUs here"
        os.environ[variable] = default
    return os.environ[variable]


def sources(pattern: str) -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(f"csrc/{pattern}"))


def operator_glue() -> list[str]:
    return [source for source in sources("ops/*/*.cpp") if not source.endswith("_cpu.cpp")]


def kernel_sources() -> list[str]:
    """The files of the CPU kernels, compiled once per instruction set."""
    return sources("ops/**/*_cpu.cpp")


def library(
    name: str, files: list[str], headers: Path, device_type: str, linked: list[str], cxx: list[str], gpu: list[str]
) -> Extension:
    from torch.utils import cpp_extension

    return Extension(
        f"myvision.{name}",
        files,
        include_dirs=[str(headers), *cpp_extension.include_paths(device_type)],
        library_dirs=cpp_extension.library_paths(device_type),
        libraries=["torch_cpu", *linked],
        extra_compile_args={"cxx": cxx, "nvcc": gpu},
        extra_link_args=["-Wl,-z,defs"] if sys.platform == "linux" else [],  # what is missing fails here, not at load
        language="c++",
    )


def cpu_library(flags: Flags) -> Extension:
    built = ["-DMYVISION_CPU_X86"] if INSTRUCTION_SETS is X86_64 else []
    return library("_C", sources("common/*.cpp") + operator_glue(), CSRC, "cpu", [], flags.all() + built, [])


def gpu_library(flags: Flags, kind: str) -> Extension:
    """The glue once more, registering the GPU implementations, and the kernels."""
    files = operator_glue() + sources("ops/**/*_cuda.cu")
    cxx, gpu = [*flags.all(), "-DMYVISION_GPU"], gpu_compiler_flags()
    if kind == "hip":
        return library("_C_cuda", hipify(files), HIP_CSRC, "cuda", ["torch_hip", "amdhip64"], cxx, gpu)
    hidden = [] if WINDOWS else ["-Xcompiler", "-fvisibility=hidden"]
    return library("_C_cuda", files, CSRC, "cuda", ["torch_cuda", "cudart"], cxx, gpu + hidden)


def hipify(files: list[str]) -> list[str]:
    """Translates a copy of csrc, headers too, and returns the translated paths of `files`."""
    from torch.utils.hipify import hipify_python

    shutil.copytree(CSRC, HIP_CSRC, dirs_exist_ok=True)
    translated = hipify_python.hipify(
        project_directory=str(HIP_CSRC),
        output_directory=str(HIP_CSRC),
        header_include_dirs=[str(HIP_CSRC)],
        extensions=(".cu", ".cuh", ".cpp", ".h"),
        hip_clang_launch=True,
        is_pytorch_extension=True,
    )
    copies = [HIP_CSRC / Path(file).relative_to("csrc") for file in files]
    return [Path(translated[str(file)].hipified_path or file).relative_to(ROOT).as_posix() for file in copies]


def get_extensions(choice: Configuration) -> list[Extension]:
    return [cpu_library(choice.flags)] + ([gpu_library(choice.flags, choice.gpu.kind)] if choice.gpu.kind else [])


@dataclass(frozen=True)
class Compilation:
    """A file to compile, one of several with flags of their own."""

    source: Path
    compiled: Path
    flags: list[str]


def ninja_file(directory: Path, compilations: list[Compilation]) -> str:
    """What ninja builds `compilations` by, with its own notes in `directory`; for compilers like GCC and Clang."""

    def escaped(text: str) -> str:
        return text.replace("$", "$$")

    def path(name: Path) -> str:
        return escaped(str(name)).replace(" ", "$ ").replace(":", "$:")

    lines = [
        f"builddir = {escaped(str(directory))}",
        "rule compile",
        f"  command = {escaped(shlex.join(cxx()))} $flags -MMD -MF $out.d -c $in -o $out",
        "  description = $out",
        "  depfile = $out.d",
        "  deps = gcc",
    ]
    for c in compilations:
        lines += [f"build {path(c.compiled)}: compile {path(c.source)}", f"  flags = {escaped(shlex.join(c.flags))}"]
    return "\n".join([*lines, ""])


# ---- setuptools commands ---------------------------------------------------------------------------------------------


def build_ext_command(choice: Configuration) -> type:
    from torch.utils.cpp_extension import BuildExtension

    class KernelBuildExtension(BuildExtension):
        """Adds to torch's: CPU kernels compiled once per instruction set, a build directory per library."""

        build_temp: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs, no_python_abi_suffix=True)

        def finalize_options(self) -> None:
            # One place for setup.py, pip wheel and pip install -e, which else compile everything anew.
            self.build_temp = os.path.abspath(self.build_temp or ROOT / "build" / "objects")
            super().finalize_options()

        def run(self) -> None:
            self.remove_stale_libraries()
            self.write_configuration()
            super().run()

        def build_extensions(self) -> None:
            try:
                super().build_extensions()
            except (RuntimeError, CompileError) as error:
                fail(f"{error}; the compiler's own messages stand above")

        def remove_stale_libraries(self) -> None:
            """The GPU library of an earlier build must not travel with one that leaves it out."""
            for directory in (self.build_lib, ROOT):
                Path(directory, self.get_ext_filename("myvision._C_cuda")).unlink(missing_ok=True)

        def write_configuration(self) -> None:
            """What common/library.cpp embeds; rewritten only when it changes, so that nothing is compiled in vain."""
            header = Path(self.build_temp, "build_configuration.h")
            text = f'#define MYVISION_BUILD_CONFIGURATION R"json({json.dumps(choice.shown)})json"\n'
            header.parent.mkdir(parents=True, exist_ok=True)
            if not header.is_file() or header.read_text() != text:
                header.write_text(text)

        def build_extension(self, ext: Extension) -> None:
            shared = self.build_temp
            ext.include_dirs.append(shared)
            if ext.name == "myvision._C":
                at_once = self.compiler.compiler_type == "unix" and find_ninja()
                ext.extra_objects = self.compile_kernels_at_once(ext) if at_once else self.compile_kernels(ext)
            self.build_temp = os.path.join(shared, ext.name)  # the glue is compiled differently for each library
            super().build_extension(ext)
            self.build_temp = shared

        def compile_kernels(self, ext: Extension) -> list[str]:
            return [
                compiled
                for name, source in itertools.product(INSTRUCTION_SETS, kernel_sources())
                for compiled in self.compiler.compile(
                    [source],
                    output_dir=os.path.join(self.build_temp, name),
                    include_dirs=ext.include_dirs,
                    extra_postargs={"cxx": choice.flags.kernels(name, source)},
                )
            ]

        def compile_kernels_at_once(self, ext: Extension) -> list[str]:
            """The same in one run of ninja, where torch takes one for each set of flags: no core waits between them."""
            directory = Path(self.build_temp)
            every = self.compiler.compiler_so[1:] + [f"-I{path}" for path in ext.include_dirs]
            compilations = [
                Compilation(
                    ROOT / source,
                    (directory / name / source).with_suffix(".o"),
                    every + choice.flags.kernels(name, source),
                )
                for source in kernel_sources()
                for name in INSTRUCTION_SETS
            ]
            instructions = directory / "kernels.ninja"
            instructions.write_text(ninja_file(directory, compilations))
            if subprocess.run(["ninja", "-f", instructions, "-j", os.environ["MAX_JOBS"]]).returncode != 0:
                raise CompileError("the CPU kernels were not compiled")
            return [str(c.compiled) for c in compilations]

    return KernelBuildExtension


class PlatformWheel(bdist_wheel):
    """The libraries hold no Python symbol: one wheel serves every Python 3 of a platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def main() -> None:
    commands: dict[str, type] = {"bdist_wheel": PlatformWheel}
    extensions: list[Extension] = []
    if METADATA_COMMANDS.isdisjoint(sys.argv):
        choice = configure()
        choose_jobs()
        extensions = get_extensions(choice)
        commands["build_ext"] = build_ext_command(choice)
    setup(
        packages=[*find_packages(include=["myvision*"]), "myvision.benchmarks"],
        package_dir={"myvision.benchmarks": "benchmarks"},
        ext_modules=extensions,
        cmdclass=commands,
    )


if __name__ == "__main__":
    main()
