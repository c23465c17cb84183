"""The build: what it chooses, how it refuses, what comes out. Nothing here builds the whole of myvision."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import REPOSITORY, load_script
from setuptools import Distribution, Extension

setup_script = load_script(REPOSITORY / "setup.py")
check_symbols = load_script(REPOSITORY / "tools" / "check_symbols.py")


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the caller's switches nor those that setup.py sets reach another test."""
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX", "DEBUG", "FORCE_CUDA", "MYVISION_NO_CUDA", "NVCC_FLAGS"):
        monkeypatch.setenv(name, "")
    for name in ("TORCH_CUDA_ARCH_LIST", "PYTORCH_ROCM_ARCH"):
        monkeypatch.setenv(name, "")


def fake_torch(version: str = "2.14.1", cuda: str | None = "13.0", hip: str | None = None, gpu: bool = False) -> object:
    return SimpleNamespace(
        __version__=version,
        version=SimpleNamespace(cuda=cuda, hip=hip),
        cuda=SimpleNamespace(is_available=lambda: gpu),
    )


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def toolkit(home: Path, release: str = "13.0") -> Path:
    script(home / "bin" / "nvcc", f"echo Cuda compilation tools, release {release}, V{release}.1")
    (home / "include").mkdir()
    (home / "include" / "cuda_runtime.h").touch()
    return home


def run_setup(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "setup.py", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


# ---- one line instead of a traceback ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise ImportError('No module named torch')", "building needs torch >= 2.11"),
        ("__version__ = '2.10.1+cu128'", "torch 2.10.1+cu128 is too old"),
    ],
)
def test_a_missing_or_old_torch_is_one_line(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "torch.py").write_text(source)
    result = run_setup("build_ext", PYTHONPATH=str(tmp_path))
    assert result.returncode == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_missing_compiler_is_one_line(tmp_path: Path) -> None:
    result = run_setup("build_ext", CXX=str(tmp_path / "no-such-compiler"))
    assert result.returncode == 1
    assert "no C++ compiler" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_compiler_without_cxx20_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = script(tmp_path / "old-c++", 'echo "unrecognised option -std=c++20" >&2; exit 1')
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(SystemExit, match=r"does not compile C\+\+20: unrecognised option"):
        setup_script.check_compiler()


def test_the_compiler_of_this_machine_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX")
    assert setup_script.flags_of(setup_script.check_compiler()) in (setup_script.GCC, setup_script.CLANG)


def test_a_failed_compilation_is_one_line_after_the_compilers_own(tmp_path: Path) -> None:
    compile_nothing = 'case "$*" in *" -o "*) echo broken source; exit 1;; *) exec c++ "$@";; esac'
    compiler = script(tmp_path / "c++", compile_nothing)
    options = ["--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "objects")]
    result = run_setup("build_ext", *options, CXX=str(compiler), MYVISION_NO_CUDA="1")
    assert result.returncode == 1
    assert "broken source" in result.stdout
    assert result.stderr.splitlines()[-1].startswith("myvision: error: ")
    assert "Traceback" not in result.stderr


def test_one_run_of_ninja_gives_each_file_its_own_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX")
    directory = tmp_path / "with a space, a colon: and $"
    directory.mkdir()
    source = directory / "source.cpp"
    source.write_text("static_assert(sizeof(TEXT) == LENGTH + 1);")
    texts = {"short": '-DTEXT="a $b"', "longer": '-DTEXT="a longer \\"one\\""'}
    compilations = [
        setup_script.Compilation(source, directory / name / "o.o", [text, f"-DLENGTH={length}"])
        for (name, text), length in zip(texts.items(), (4, 14), strict=True)
    ]
    instructions = tmp_path / "kernels.ninja"
    instructions.write_text(setup_script.ninja_file(directory, compilations))
    assert setup_script.find_ninja()
    command = ["ninja", "-f", instructions]
    first, second = (subprocess.run(command, capture_output=True, text=True, cwd=tmp_path) for _ in range(2))
    assert first.returncode == 0, first.stdout
    assert all(c.compiled.is_file() for c in compilations)
    assert "no work to do" in second.stdout


# ---- CUDA and HIP: built, left out with the reason, or refused -------------------------------------------------------


def test_without_a_gpu_nothing_is_built_for_one_and_a_line_says_how_to_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_out = setup_script.Gpu(None, "torch sees no GPU; FORCE_CUDA=1 builds it all the same")
    for release in ("13.0", "12.8"):  # torch's, and another's, which was once an error
        monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / release, release)))
        assert setup_script.choose_gpu(fake_torch()) == left_out
    monkeypatch.setattr("torch.utils.cpp_extension.ROCM_HOME", "/opt/rocm")
    assert setup_script.choose_gpu(fake_torch(cuda=None, hip="7.0")) == left_out


def test_a_gpu_and_its_toolkit_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path)))
    gpu = setup_script.choose_gpu(fake_torch(gpu=True))
    assert gpu == setup_script.Gpu("cuda", f"CUDA 13.0 in {tmp_path}, architectures those of the GPUs here")
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == ""  # which torch takes for those of the GPUs here


def test_cuda_is_left_out_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MYVISION_NO_CUDA", "1")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")  # as images with CUDA set it
    assert setup_script.choose_gpu(fake_torch(gpu=True)) == setup_script.Gpu(None, "MYVISION_NO_CUDA is set")
    monkeypatch.setenv("FORCE_CUDA", "1")
    with pytest.raises(SystemExit, match="both set"):
        setup_script.choose_gpu(fake_torch(gpu=True))


@pytest.mark.parametrize(("asking", "value"), [("FORCE_CUDA", "1"), ("TORCH_CUDA_ARCH_LIST", "9.0")])
@pytest.mark.parametrize(
    ("cuda", "release", "reason"),
    [
        (None, None, "is built without CUDA"),
        ("13.0", None, "no CUDA toolkit .* was found: set CUDA_HOME"),
        ("13.0", "12.8", r"of CUDA 12\.8, torch 2\.14\.1 of CUDA 13\.0: set CUDA_HOME"),
    ],
)
def test_what_cuda_lacks_is_told_and_refused_where_it_was_asked_for(
    cuda: str | None,
    release: str | None,
    reason: str,
    asking: str,
    value: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home = toolkit(tmp_path, release) if release else None
    monkeypatch.setattr(setup_script, "find_cuda_home", lambda cuda: home)
    gpu = setup_script.choose_gpu(fake_torch(cuda=cuda, gpu=True))
    assert gpu.kind is None
    assert re.search(reason, gpu.why)
    monkeypatch.setenv(asking, value)
    with pytest.raises(SystemExit, match=f"{asking} is set, which asks for the GPU library, but .*{reason}"):
        setup_script.choose_gpu(fake_torch(cuda=cuda))


def test_a_wrapper_script_on_path_is_not_taken_for_a_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path / "wrapper" / "bin" / "nvcc", "exit 1")
    home = toolkit(tmp_path / "toolkit")
    monkeypatch.setenv("PATH", str(tmp_path / "wrapper" / "bin"), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_PATH", str(home))
    assert setup_script.find_cuda_home("13.0") == home
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "wrapper"))  # no headers there either
    assert setup_script.find_cuda_home("13.0") == home


def test_forced_without_a_gpu_the_architectures_are_never_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path)))
    monkeypatch.setenv("FORCE_CUDA", "1")
    assert setup_script.choose_gpu(fake_torch()).kind == "cuda"
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == setup_script.cuda_architectures((13, 0))


@pytest.mark.parametrize("cuda", [(12, 6), (12, 8), (13, 0)])
def test_there_is_code_for_every_gpu_that_the_toolkit_knows_and_for_later_ones(cuda: tuple[int, int]) -> None:
    listed = setup_script.cuda_architectures(cuda).split(";")
    images = {float(name.removesuffix("+PTX")) for name in listed}
    ptx = [float(name.removesuffix("+PTX")) for name in listed if name.endswith("+PTX")]
    known = [7.5, 8.0, 8.6, 8.7, 8.9, 9.0] + ([10.0, 10.3, 11.0, 12.0, 12.1] if cuda >= (12, 8) else [])
    for gpu in [*known, 13.0]:  # an image serves its generation from its own number on, PTX whatever is not older
        has_image = any(int(image) == int(gpu) and image <= gpu for image in images)
        assert has_image or any(version <= gpu for version in ptx), gpu


@pytest.mark.parametrize("gpu", [False, True])
def test_given_architectures_ask_and_stand(gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path)))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
    assert "architectures 8.0" in setup_script.choose_gpu(fake_torch(gpu=gpu)).why
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == "8.0"


def test_rocm_follows_the_same_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    rocm = fake_torch(cuda=None, hip="7.0")
    monkeypatch.setattr("torch.utils.cpp_extension.ROCM_HOME", None)
    assert "set ROCM_HOME" in setup_script.choose_gpu(fake_torch(cuda=None, hip="7.0", gpu=True)).why
    monkeypatch.setenv("PYTORCH_ROCM_ARCH", "gfx90a")
    with pytest.raises(SystemExit, match=r"PYTORCH_ROCM_ARCH is set, .* set ROCM_HOME"):
        setup_script.choose_gpu(rocm)
    monkeypatch.setattr("torch.utils.cpp_extension.ROCM_HOME", "/opt/rocm")
    assert setup_script.choose_gpu(rocm).why.endswith("architectures gfx90a")
    monkeypatch.setenv("PYTORCH_ROCM_ARCH", "")
    assert setup_script.choose_gpu(fake_torch(cuda=None, hip="7.0", gpu=True)).why.endswith("those of the GPUs here")
    monkeypatch.setenv("FORCE_CUDA", "1")
    assert setup_script.choose_gpu(rocm).kind == "hip"
    assert os.environ["PYTORCH_ROCM_ARCH"] == setup_script.ROCM_ARCHITECTURES


def test_hipify_translates_kernels_and_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_script, "HIP_CSRC", tmp_path / "hip")
    monkeypatch.setattr(setup_script, "ROOT", tmp_path)
    (kernels,) = setup_script.hipify(["csrc/ops/my_add/my_add_cuda.cu"])
    assert kernels == "hip/ops/my_add/my_add_hip.hip"
    assert "cudaStream_t" not in (tmp_path / "hip" / "common" / "gpu_hip.cuh").read_text()
    assert "my_add_kernel_hip.cuh" in (tmp_path / kernels).read_text()


def test_debug_and_nvcc_flags_reach_the_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    best, product = setup_script.INSTRUCTION_SETS[-1], "csrc/ops/attention/cpu/attention_cpu.cpp"
    assert "-O2" in setup_script.GCC.all()
    assert "-O3" in setup_script.GCC.kernels(best, product)
    assert "-O3" not in setup_script.GCC.kernels(best, "csrc/ops/my_add/my_add_cpu.cpp")
    monkeypatch.setenv("DEBUG", "1")
    monkeypatch.setenv("NVCC_FLAGS", "-lineinfo --ptxas-options='-v -w'")
    assert "-O0" in setup_script.GCC.all()
    assert "-O3" not in setup_script.GCC.kernels(best, product)
    assert setup_script.gpu_compiler_flags()[-2:] == ["-lineinfo", "--ptxas-options=-v -w"]


def test_max_jobs_is_kept_and_has_a_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MAX_JOBS", "3")
    setup_script.choose_jobs()
    assert os.environ["MAX_JOBS"] == "3"
    monkeypatch.delenv("MAX_JOBS")
    monkeypatch.setattr(setup_script, "find_ninja", lambda: False)
    setup_script.choose_jobs()
    assert int(os.environ["MAX_JOBS"]) >= 1
    assert "ninja was not found" in capsys.readouterr().out


# ---- what comes out --------------------------------------------------------------------------------------------------


def test_metadata_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError")
    result = run_setup("--version", PYTHONPATH=str(tmp_path))
    assert result.stdout.splitlines()[-1] == "0.1.0"


def test_the_source_distribution_has_the_sources_and_no_binary(tmp_path: Path) -> None:
    result = run_setup("egg_info", "--egg-base", str(tmp_path), "sdist", "--dist-dir", str(tmp_path))
    assert result.returncode == 0, result.stderr
    with tarfile.open(tmp_path / "myvision-0.1.0.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "csrc").rglob("*.*")}
    assert sources <= names
    assert {"pyproject.toml", "setup.py", "LICENSE", "myvision/py.typed", "tools/check_symbols.py"} <= names
    assert not [name for name in names if name.endswith(".so")]


def test_one_wheel_serves_every_python() -> None:
    command = setup_script.PlatformWheel(Distribution({"name": "m", "ext_modules": [Extension("m", ["m.c"])]}))
    command.ensure_finalized()
    python, abi, platform = command.get_tag()
    assert (python, abi) == ("py3", "none")
    assert platform != "any"


def test_built_libraries_need_nothing_outside_the_stable_interface() -> None:
    libraries = sorted((REPOSITORY / "myvision").glob("*.so"))
    if not libraries:
        pytest.skip("myvision is not built in this source tree")
    assert check_symbols.check(libraries) == 0


@pytest.mark.parametrize(
    "source",
    [
        "namespace c10 { void f(); } void g() { c10::f(); }",
        "namespace at { struct Tensor; Tensor* f(); } void g() { at::f(); }",
        "namespace torch { struct Node; } template <class T> void f(T*); void g() { f<torch::Node>(nullptr); }",
        'extern "C" void PyList_New(long); void g() { PyList_New(0); }',
    ],
)
def test_the_symbol_check_sees_a_forbidden_symbol(source: str, tmp_path: Path) -> None:
    library = tmp_path / "bad.so"
    compile_command = ["c++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)]
    subprocess.run(compile_command, input=source, text=True, check=True)
    result = subprocess.run(
        [sys.executable, REPOSITORY / "tools" / "check_symbols.py", library], capture_output=True, text=True
    )
    assert result.returncode == 1
    assert "not portable" in result.stdout


def test_the_symbol_check_refuses_to_check_nothing(tmp_path: Path) -> None:
    empty = tmp_path / "empty.whl"
    empty.write_bytes(b"PK\x05\x06" + bytes(18))  # a zip archive without entries
    assert check_symbols.check([empty]) == 1


@pytest.mark.parametrize("instruction_set", ["AVX2", "AVX512"])
def test_kernel_objects_lend_no_function_to_others(instruction_set: str) -> None:
    """The linker may keep any copy of an inline function: one compiled for AVX-512 must not serve older CPUs."""
    objects = sorted((REPOSITORY / "build" / "objects" / instruction_set).rglob("*_cpu.o"))
    if not objects:
        pytest.skip("no kernel of this instruction set is built in this source tree")
    for built in objects:
        listing = subprocess.run(["nm", "--demangle", "--defined-only", built], capture_output=True, text=True).stdout
        weak = [line for line in listing.splitlines() if line.split()[1] in "VWu"]
        assert not [line for line in weak if instruction_set not in line and "DW.ref" not in line]


def test_torch_itself_is_recent_enough() -> None:
    assert setup_script.import_torch() is torch
