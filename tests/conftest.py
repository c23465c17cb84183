"""Fixtures that every test file uses."""

from __future__ import annotations

import os

import pytest
import torch
from helpers import FLOATING_DTYPES, LAYOUTS, available_instruction_sets


def name_of(value: object) -> str:
    return str(value).removeprefix("torch.")


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    """Each device; without a GPU, "cuda" is skipped, or fails where MYVISION_REQUIRE_GPU=1."""
    if request.param == "cuda":
        require_gpu()
    return request.param


@pytest.fixture
def gpu() -> str:
    """The GPU, for tests of it alone; skipped or failing as `device`."""
    require_gpu()
    return "cuda"


def require_gpu() -> None:
    import myvision

    if torch.cuda.is_available() and myvision.has_cuda_ops():
        return
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


@pytest.fixture(params=available_instruction_sets())
def instruction_set(request: pytest.FixtureRequest) -> str:
    """Each instruction set that this machine has, for helpers.run_python."""
    return request.param


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
