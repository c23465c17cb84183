"""tools/check_gpu_build.py: reads what compilers report, and finds kernels that leave their registers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import REPOSITORY, load_script

tool = load_script(REPOSITORY / "tools" / "check_gpu_build.py")

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4goodPf' for 'sm_90'
ptxas info    : Function properties for _Z4goodPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers, used 1 barriers, 32 bytes smem
ptxas info    : Compile time = 14.743 ms
ptxas info    : Compiling entry function '_Z5localPfi' for 'sm_90'
ptxas info    : Function properties for _Z5localPfi
    256 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 18 registers, used 0 barriers, 256 bytes cumulative stack size
ptxas info    : Compile time = 3.154 ms
ptxas info    : Compiling entry function '_Z6spillsPf' for 'sm_90'
ptxas info    : Function properties for _Z6spillsPf
    1480 bytes stack frame, 1476 bytes spill stores, 1480 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 1480 bytes cumulative stack size
ptxas info    : Compile time = 41.029 ms
"""

AMDGPU = """\
bad.cu:3:1: remark: Function Name: _Z4goodPf [-Rpass-analysis=kernel-resource-usage]
    3 | __global__ void good(float* data) {
      | ^
bad.cu:3:1: remark:     SGPRs: 108 [-Rpass-analysis=kernel-resource-usage]
bad.cu:3:1: remark:     VGPRs: 256 [-Rpass-analysis=kernel-resource-usage]
bad.cu:3:1: remark:     AGPRs: 36 [-Rpass-analysis=kernel-resource-usage]
bad.cu:3:1: remark:     ScratchSize [bytes/lane]: 0 [-Rpass-analysis=kernel-resource-usage]
bad.cu:3:1: remark:     Occupancy [waves/SIMD]: 4 [-Rpass-analysis=kernel-resource-usage]
bad.cu:3:1: remark:     SGPRs Spill: 24 [-Rpass-analysis=kernel-resource-usage]
bad.cu:3:1: remark:     VGPRs Spill: 0 [-Rpass-analysis=kernel-resource-usage]
bad.cu:3:1: remark:     LDS Size [bytes/block]: 25600 [-Rpass-analysis=kernel-resource-usage]
bad.cu:9:1: remark: Function Name: _Z6spillsPf [-Rpass-analysis=kernel-resource-usage]
bad.cu:9:1: remark:     SGPRs: 20 [-Rpass-analysis=kernel-resource-usage]
bad.cu:9:1: remark:     VGPRs: 128 [-Rpass-analysis=kernel-resource-usage]
bad.cu:9:1: remark:     ScratchSize [bytes/lane]: 1116 [-Rpass-analysis=kernel-resource-usage]
bad.cu:9:1: remark:     SGPRs Spill: 0 [-Rpass-analysis=kernel-resource-usage]
bad.cu:9:1: remark:     VGPRs Spill: 279 [-Rpass-analysis=kernel-resource-usage]
bad.cu:9:1: remark:     LDS Size [bytes/block]: 0 [-Rpass-analysis=kernel-resource-usage]
"""

SEEDED = """
#include "common/gpu.cuh"

__global__ void good(float* data) { data[threadIdx.x] *= 2; }

__global__ void local(float* data, int index) {
  float held[512];
  for (int i = 0; i < 512; ++i) held[i] = data[i * blockDim.x + threadIdx.x];
  held[index] = held[index + 1];
  for (int i = 0; i < 512; ++i) data[i * blockDim.x + threadIdx.x] = held[i];
}

__global__ void __launch_bounds__(1024) spills(float* data) {
  float held[400];
#pragma unroll
  for (int i = 0; i < 400; ++i) held[i] = data[i * 1024 + threadIdx.x];
#pragma unroll
  for (int i = 0; i < 400; ++i) data[i * 1024 + threadIdx.x] = held[399 - i];
}

template <int kDeclared>
__device__ void reverse(float* data) {
  MYVISION_DYNAMIC_SHARED(float, dynamic, kDeclared);
  MYVISION_SHARED(float, variable, [64]);
  dynamic[threadIdx.x] = variable[threadIdx.x] = data[threadIdx.x];
  __syncthreads();
  data[threadIdx.x] = dynamic[63 - threadIdx.x] + variable[63 - threadIdx.x];
}
__global__ void declares(float* data) { reverse<256>(data); }
__global__ void forgets(float* data) { reverse<16>(data); }
"""


def found_compiler(name: str) -> Any:
    compiler = tool.found_here(tool.COMPILERS[name])
    if compiler is None:
        pytest.skip(f"{name} is not here")
    return compiler


def for_one_architecture(name: str) -> Any:
    """The compiler, in less time."""
    compiler = found_compiler(name)
    return replace(compiler, architectures=compiler.architectures[:1])


def test_reads_ptxas() -> None:
    good, local, spills = tool.read_ptxas(PTXAS, "sm_90")
    assert good == tool.Kernel("_Z4goodPf", "sm_90", registers=24, shared=32, spilled=0, local=0)
    assert local == tool.Kernel("_Z5localPfi", "sm_90", registers=18, shared=0, spilled=0, local=256)
    assert spills == tool.Kernel("_Z6spillsPf", "sm_90", registers=64, shared=0, spilled=1476, local=1480)


def test_reads_amdgpu() -> None:
    good, spills = tool.read_amdgpu(AMDGPU, "gfx90a")
    assert good == tool.Kernel("_Z4goodPf", "gfx90a", registers=292, shared=25600, spilled=0, local=0)
    assert spills == tool.Kernel("_Z6spillsPf", "gfx90a", registers=128, shared=0, spilled=1116, local=1116)


@pytest.mark.parametrize("lost", ["registers", "stack frame", "spill stores"])
def test_a_report_that_is_not_understood_is_an_error(lost: str) -> None:
    with pytest.raises(SystemExit, match=f"is not understood, it has no .*{lost}"):
        tool.read_ptxas(PTXAS.replace(lost, "?"), "sm_90")


def test_the_table_has_a_line_per_kernel_with_the_worst_of_each_architecture() -> None:
    kernels = [
        tool.Kernel("_ZN8myvision3gpu2op6kernelIfLi4EEEvPT_", "sm_80", registers=40, shared=64, spilled=0, local=0),
        tool.Kernel("_ZN8myvision3gpu2op6kernelIfLi4EEEvPT_", "sm_90", registers=48, shared=32, spilled=8, local=16),
    ]
    header, line = tool.table(kernels).splitlines()
    assert header.split() == ["registers", "sm_80", "sm_90", "shared", "spilled", "local"]
    assert line.split() == ["kernel<float,", "4>", "40", "48", "64", "8", "16"]


@pytest.mark.parametrize("name", ["nvcc", "clang"])
def test_finds_seeded_spills_local_arrays_and_declarations(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler = for_one_architecture(name)
    source = tmp_path / "seeded.cu"
    source.write_text(SEEDED)
    forgets, local, spills = sorted(tool.check(compiler, [source]))
    assert re.match(r"forgets for \w+ declares 16 bytes of variables in shared memory, and has 256", forgets)
    assert re.match(r"local for \w+ keeps \d+ bytes of local memory", local)
    assert re.match(r"spills for \w+ spills \d+ bytes", spills)
    assert "good" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "runtime"), [("nvcc", "cuda"), ("clang", "hip")])
def test_every_primitive_compiles(name: str, runtime: str, tmp_path: Path) -> None:
    """For the oldest and the newest GPU: NVIDIA's oldest has neither bfloat16 products nor asynchronous copies."""
    compiler = found_compiler(name)
    text = (REPOSITORY / "tests" / "simt" / "primitives.cu").read_text()
    source = tmp_path / "primitives.cu"
    source.write_text(text.replace("cuda", runtime))
    for architecture in (compiler.architectures[0], compiler.architectures[-1]):
        assert compiler.compile(source, architecture)


@pytest.fixture(scope="module")
def host_calls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """host_calls.cu, linked with the runtime that prints what is asked of it."""
    program = tmp_path_factory.mktemp("host_calls") / "host_calls"
    sources = [REPOSITORY / "tests" / "native" / name for name in ("host_calls.cu", "noting_cudart.cpp")]
    options = ["-std=c++20", "-arch=sm_75", "-cudart", "none", f"-I{REPOSITORY / 'csrc'}", "-o", program]
    subprocess.run([found_compiler("nvcc").program, *options, *sources], check=True)
    return program


def calls_made(program: Path, ptx: int, binary: int) -> list[str]:
    versions = {"PTX_VERSION": str(ptx), "BINARY_VERSION": str(binary)}
    result = subprocess.run([program], env=os.environ | versions, stdout=subprocess.PIPE, text=True, check=True)
    return result.stdout.splitlines()


def test_a_launch_asks_for_shared_memory_once_for_each_kernel_and_gpu(host_calls: Path) -> None:
    """However little it is, as variables may take the rest; and never for less than before."""
    of_a_gpu = [
        *("launch with 0", "limit of shared memory 4096", "launch with 4096"),
        *("limit of shared memory 49152", "launch with 49152", "launch with 1024"),
        *("limit of shared memory 512", "launch with 512"),  # of another kernel
    ]
    assert [line for line in calls_made(host_calls, 80, 80) if "shared" in line or "launch" in line] == 2 * of_a_gpu


@pytest.mark.parametrize(
    ("ptx", "binary", "has_mma"),
    [(75, 90, 0), (80, 90, 1), (100, 120, 1), (75, 75, 0), (80, 75, 0), (0, 0, 0)],
    ids=["jit_of_75", "jit_of_80", "jit_of_100", "image_of_75", "of_75", "no_code"],
)
def test_code_says_itself_whether_it_has_tensor_cores(host_calls: Path, ptx: int, binary: int, has_mma: int) -> None:
    calls = calls_made(host_calls, ptx, binary)
    assert calls.count(f"has mma: {has_mma} {has_mma}") == 2
    assert calls.count("asked for a version") == 2  # once for each GPU


def test_a_source_that_does_not_compile_is_an_error(tmp_path: Path) -> None:
    compiler = for_one_architecture("nvcc")
    source = tmp_path / "broken.cu"
    source.write_text("__global__ void broken() { undeclared(); }")
    with pytest.raises(SystemExit, match=r"nvcc does not compile .*broken.cu for sm_75:\n.*undeclared"):
        tool.check(compiler, [source])


def test_a_file_without_kernels_is_an_error(tmp_path: Path) -> None:
    compiler = for_one_architecture("nvcc")
    source = tmp_path / "empty.cu"
    source.write_text("")
    with pytest.raises(SystemExit, match=r"nvcc reports no kernel in .*empty.cu"):
        tool.check(compiler, [source])


def test_missing_compilers_are_named_with_what_brings_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: None)
    monkeypatch.setattr(tool.build_script, "find_cuda_home", lambda cuda: None)
    monkeypatch.setattr("sys.argv", ["check_gpu_build.py"])
    with pytest.raises(SystemExit) as error:
        tool.main()
    for text in ("nvcc is missing: NVIDIA's CUDA toolkit", "apt-get install hipcc", "apt-get install clang-19"):
        assert text in str(error.value)


def test_every_operator_is_compiled() -> None:
    every = [path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "csrc").rglob("*.cu")]
    assert sorted(tool.kernel_sources(tool.operators())) == sorted(every)
