"""Fixtures that every test file uses."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest

# Threads that wait sleep instead of spinning: several processes share the cores. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# This cache of torch.compile does not know the operators' version: it would run what an earlier one compiled.
os.environ.setdefault("TORCHINDUCTOR_AUTOGRAD_CACHE", "0")

# torch.compile believes the CPU what instruction sets it has, and compiles programs quickly, not for speed.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")

import torch
from emulation import EMULATORS, in_place_of_cpu, is_supported
from helpers import FLOATING_DTYPES, LAYOUTS, available_instruction_sets
from hypothesis import HealthCheck, settings
from selection import chosen
from torch._export import utils as export_utils

# Each export looks for all of torch's operators anew, once for every namespace. What a graph has was found by its call.
if hasattr(export_utils, "_materialize_cpp_cia_ops"):
    export_utils._materialize_cpp_cia_ops = functools.cache(export_utils._materialize_cpp_cia_ops)

# The fixtures of a test are the same for all of its examples.
HYPOTHESIS: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


def name_of(value: object) -> str:
    return str(value).removeprefix("torch.")


@pytest.fixture(params=["cpu", *EMULATORS, "cuda"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device of each implementation: the CPU's, the GPU's emulated on the CPU, and the GPU's.

    Without a GPU, "cuda" is skipped, or fails where MYVISION_REQUIRE_GPU=1.
    """
    if request.param in EMULATORS:
        if not is_supported():
            pytest.skip("the GPU emulator runs on Linux and x86-64")
        with in_place_of_cpu(EMULATORS[request.param]):
            yield "cpu"
    else:
        yield available(request.param)


@pytest.fixture
def fast_mode(request: pytest.FixtureRequest) -> bool:
    """Whether gradcheck compares a sum of a Jacobian's entries instead of each: calls of emulated kernels are slow."""
    return request.node.callspec.params["device"] in EMULATORS


@pytest.fixture
def opcheck_kinds(fast_mode: bool) -> tuple[str, ...]:
    """What opcheck tries: of emulated kernels what they return, as derivatives and graphs are the same as the CPU's."""
    kinds = ("test_schema", "test_faketensor")
    return kinds if fast_mode else (*kinds, "test_autograd_registration", "test_aot_dispatch_dynamic")


@pytest.fixture(params=["cpu", "cuda"])
def real_device(request: pytest.FixtureRequest) -> str:
    """As `device`, without emulation: for what would take too long or is of the device itself."""
    return available(request.param)


@pytest.fixture
def gpu() -> str:
    """The GPU, for tests of it alone; skipped or failing as `device`."""
    return available("cuda")


def available(device: str) -> str:
    import myvision

    if device == "cpu" or (torch.cuda.is_available() and myvision.has_cuda_ops()):
        return device
    message = "no GPU here" if not torch.cuda.is_available() else "myvision was built without its GPU library"
    if os.environ.get("MYVISION_REQUIRE_GPU") == "1":
        pytest.fail(f"MYVISION_REQUIRE_GPU=1, but {message}")
    pytest.skip(message)


@pytest.fixture(params=FLOATING_DTYPES, ids=name_of)
def floating_dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


def instruction_sets() -> list[Any]:
    """Those that this machine has. All other tests run with the best."""
    *weaker, best = available_instruction_sets()
    return [*weaker, pytest.param(best, marks=pytest.mark.exhaustive)] if weaker else [best]


@pytest.fixture(params=instruction_sets())
def instruction_set(request: pytest.FixtureRequest) -> str:
    """Each instruction set, for helpers.run_python."""
    return request.param


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    share = parser.getgroup("share of the parametrised tests").addoption
    share("--all", action="store_const", dest="share", const="all", default="chosen", help="the whole of each product")
    share("--rest", action="store_const", dest="share", const="rest", help="what is left out without --all")


def pytest_configure(config: pytest.Config) -> None:
    settings.register_profile("share", max_examples=30, **HYPOTHESIS)
    settings.register_profile("whole", max_examples=150, **HYPOTHESIS)
    settings.load_profile("share" if config.option.share == "chosen" else "whole")


def expects_gpu() -> bool:
    return torch.cuda.is_available() or os.environ.get("MYVISION_REQUIRE_GPU") == "1"


def pytest_report_header() -> str | None:
    return None if expects_gpu() else "GPU: none here, its tests are left out; MYVISION_REQUIRE_GPU=1 has them fail"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what needs a GPU, for `pytest -m gpu`, and leaves out what is not of the share that is asked for, and what
    needs a GPU where there is none.
    """
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if "gpu" in item.fixturenames or "cuda" in (parameters.get("device"), parameters.get("real_device")):
            item.add_marker("gpu")
    named = any("::" in argument for argument in config.args)  # whoever names tests gets them all
    if named:
        return
    runnable = [item for item in items if expects_gpu() or not item.get_closest_marker("gpu")]
    of_share = set(chosen(runnable))
    if config.option.share == "rest":  # whatever draws examples draws more of them now
        of_share = {item for item in runnable if item not in of_share or hasattr(item.obj, "hypothesis")}
    if config.option.share == "all":
        of_share = set(runnable)
    config.hook.pytest_deselected(items=[item for item in items if item not in of_share])
    items[:] = [item for item in items if item in of_share]


def pytest_collection_finish() -> None:
    """Spares the garbage collector what stays anyway, the modules and the items, and has it come less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
