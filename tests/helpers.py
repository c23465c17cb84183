"""What the tests share: element types, memory layouts, subprocesses, and the accuracy gate."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import myvision  # noqa: F401  loads the operators

HALF_DTYPES = [torch.float16, torch.bfloat16]
FLOATING_DTYPES = [torch.float64, torch.float32, *HALF_DTYPES]
INTEGER_DTYPES = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
LAYOUTS = ["contiguous", "channels_last", "permuted", "sliced", "offset"]
INSTRUCTION_SETS = ["default", "avx2", "avx512"]

WITHOUT_ARITHMETIC = {"aten.clone", "aten.detach", "aten._unsafe_view", "aten.empty", "aten.randint"}

REPOSITORY = Path(__file__).parent.parent
SNIPPET_SECONDS = 300


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> Tensor:
    """Standard normal for floating-point types, small integers otherwise; the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)
    low = 0 if dtype in (torch.uint8, torch.bool) else -50
    return torch.randint(low, 51, shape, generator=generator).to(device, dtype)


def with_layout(tensor: Tensor, layout: str) -> Tensor:
    """The same values, laid out differently in memory; channels_last is contiguous where there are not 4 dimensions."""
    if layout == "contiguous" or tensor.dim() == 0:
        return tensor.contiguous()
    if layout == "channels_last":
        return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor.contiguous()
    if layout == "permuted":
        backwards = list(reversed(range(tensor.dim())))
        return tensor.permute(backwards).contiguous().permute(backwards)
    if layout == "sliced":  # every other element of the last dimension
        return torch.stack([tensor, tensor.flip(-1)], dim=-1).select(-1, 0)
    if layout == "offset":  # one element into its storage, so that no address is aligned
        storage = tensor.new_empty(tensor.numel() + 1)
        return storage[1:].view(tensor.shape).copy_(tensor)
    raise ValueError(f"unknown layout {layout!r}")


def available_instruction_sets() -> list[str]:
    """Those this machine has, weakest first."""
    return INSTRUCTION_SETS[: INSTRUCTION_SETS.index(torch.ops.myvision._cpu_capability().lower()) + 1]


class Recorder(TorchDispatchMode):
    """Notes every operator that the dispatcher is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(func)
        return func(*args, **(kwargs or {}))

    @property
    def names(self) -> list[str]:
        return [func.name() for func in self.operators]


def operators_run(call: Callable[..., object], *args: Any, **kwargs: Any) -> list[str]:
    """Names of the operators that a call without gradients runs, myvision's and those of torch's that compute."""
    with torch.no_grad(), Recorder() as recorder:
        call(*args, **kwargs)
    named = [(str(func.overloadpacket), func) for func in recorder.operators]
    return [name for name, func in named if not func.is_view and name not in WITHOUT_ARITHMETIC]


# Starts processes that have imported torch and myvision, which takes longer than most of what they are for.
FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(["torch", "myvision"])


def run_python(code: str, instruction_set: str | None = None, **environment: str) -> str:
    """Runs a snippet in a process of its own and returns what it printed; fails, with its output, if it fails.

    The process has imported torch and myvision, and called neither: for a Python as it starts, see `run_fresh_python`.

    Args:
        code: the snippet.
        instruction_set: caps what the kernels may use: default, avx2 or avx512.
        environment: further environment variables.
    """
    with tempfile.TemporaryDirectory() as directory:
        output, errors = Path(directory, "output"), Path(directory, "errors")
        variables = _environment(instruction_set, environment)
        process = FORK_SERVER.Process(target=_run_snippet, args=(code, variables, output, errors))
        process.start()
        process.join(SNIPPET_SECONDS)
        ended = process.exitcode is not None
        process.kill()
        printed = output.read_text()
        assert ended, f"the snippet does not end within {SNIPPET_SECONDS} s\n{printed}\n{errors.read_text()}"
        assert process.exitcode == 0, f"exit status {process.exitcode}\n{printed}\n{errors.read_text()}"
        return printed


def run_fresh_python(code: str, instruction_set: str | None = None, **environment: str) -> str:
    """As `run_python`, but nothing is imported: for what happens when the package is loaded."""
    variables = _environment(instruction_set, environment)
    command = [sys.executable, "-c", code]
    result = subprocess.run(
        command, env=variables, cwd=REPOSITORY, capture_output=True, text=True, timeout=SNIPPET_SECONDS
    )
    assert result.returncode == 0, f"exit status {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def _environment(instruction_set: str | None, more: dict[str, str]) -> dict[str, str]:
    """The variables of a snippet's process."""
    limit = {"ATEN_CPU_CAPABILITY": instruction_set} if instruction_set else {}
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])
    return {**os.environ, **more, "PYTHONPATH": path, **limit}


def _run_snippet(code: str, variables: dict[str, str], output: Path, errors: Path) -> None:
    """In the process of a snippet."""
    os.chdir(REPOSITORY)
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:0] = variables["PYTHONPATH"].split(os.pathsep)
    for path, stream in ((output, sys.stdout), (errors, sys.stderr)):
        with path.open("wb") as file:
            os.dup2(file.fileno(), stream.fileno())
    exec(compile(code, "<snippet>", "exec"), {"__name__": "__main__"})


def load_script(path: Path) -> ModuleType:
    """Imports a file that is no module of the package, such as setup.py."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Has torch, and so the operators, use this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_as_accurate(actual: Tensor, plain: Tensor, oracle: Tensor, atol: float = 0) -> None:
    """The accuracy gate: the error is at most twice that of plain torch at the same dtype, plus an epsilon.

    Args:
        actual: what the operator gives.
        plain: what the same formula in plain torch gives at the same dtype.
        oracle: what it gives in float64.
        atol: an error that is always fair, as where terms cancel.
    """
    assert actual.shape == oracle.shape
    assert actual.dtype == plain.dtype
    actual, plain, oracle = actual.detach().cpu(), plain.detach().cpu(), oracle.detach().cpu()
    finite = oracle.isfinite() & plain.isfinite()
    torch.testing.assert_close(actual[~finite], plain[~finite], rtol=0, atol=0, equal_nan=True)
    if not finite.any():
        return
    error = (actual.double() - oracle)[finite].abs().max()
    plain_error = (plain.double() - oracle)[finite].abs().max()
    epsilon = torch.finfo(plain.dtype).eps * oracle[finite].abs().max()
    assert error <= 2 * plain_error + epsilon + atol, f"error {error:.3g}, plain torch's {plain_error:.3g}"
