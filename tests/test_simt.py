"""The emulator of the GPU: that it computes as a GPU does, and that it finds the bugs it is there to find."""

from __future__ import annotations

import os
import re
import subprocess

import emulation
import numpy as np
import pytest
import torch
from emulation import Emulator
from helpers import random_tensor

from myvision._cli.ops import has_kernel, operator_names, overload
from myvision.ops import my_add

pytestmark = pytest.mark.skipif(not emulation.is_supported(), reason="the GPU emulator runs on Linux and x86-64")

RACE = "ThreadSanitizer: data race"
# Bug of seeded_bugs.cu -> what it is built with, what is printed, and settings.
BUGS: dict[str, tuple[str, str, dict[str, str]]] = {
    "missing_barrier": ("thread", RACE, {}),
    "missing_second_barrier": ("thread", RACE, {}),
    "missing_warp_barrier": ("thread", RACE, {}),
    "non_atomic_sum": ("thread", RACE, {}),
    "non_atomic_sum_of_blocks": ("thread", RACE, {}),
    "divergent_barrier": ("none", r"seeded_bugs.cu:\d+: divergent barriers: thread .* of block \(0, 0, 0\)", {}),
    "hang": ("none", r"seeded_bugs.cu:\d+: hang: 128 of 128 threads wait in vain, .* thread \(0, 0, 0\)", {}),
    "exited_lane": ("none", r"seeded_bugs.cu:\d+: a shuffle in vain: lane 20 of its warp has exited", {}),
    "divergent_warp": ("none", r"seeded_bugs.cu:\d+: divergent warp: a shuffle, while lane 0", {}),
    "part_of_a_warp": ("none", r"seeded_bugs.cu:\d+: a shuffle in a warp of less than", {}),
    "misaligned_vector": ("none", r"seeded_bugs.cu:\d+: misaligned address: .* a multiple of 16, thread", {}),
    "too_many_threads": ("none", "invalid launch", {}),
    "forgotten_variable": ("none", "invalid launch: 49152 .* and 512 of shared variables, .* may have 49152", {}),
    "too_much_shared_memory": ("none", "invalid launch: 101376 .* and 512 of shared variables, .* may have 101376", {}),
    "undeclared_variable": ("none", "shared variables take 512 bytes, where it declares 256", {}),
    "uninitialised_shared_memory": ("none", "wrong", {}),
    "missing_copy_wait": ("none", "wrong", {"SIMT_COPIES": "lazy"}),
    "too_short_copy_wait": ("none", "wrong", {"SIMT_COPIES": "lazy"}),
    "early_copy": ("none", "wrong", {"SIMT_COPIES": "eager"}),
    "outside_of_shared_memory": ("address", "AddressSanitizer: use-after-poison", {}),
    "outside_of_dynamic_shared_memory": ("address", "AddressSanitizer: use-after-poison", {}),
    "outside_of_a_tensor": ("address", "AddressSanitizer: heap-buffer-overflow", {}),
    "misaligned_pointer": ("address", "runtime error: .* misaligned address", {}),
}


# ---- what it computes ------------------------------------------------------------------------------------------------


def dump(emulator: Emulator, **settings: str) -> dict[str, np.ndarray]:
    """The words that primitives.cu writes."""
    result = run(emulator, "primitives", **settings)
    assert result.returncode == 0, result.stdout
    lines = (re.fullmatch(r"(.*?)((?: [0-9a-f]+)+)", line) for line in result.stdout.splitlines())
    return {line[1]: np.array([int(word, 16) for word in line[2].split()], np.uint32) for line in lines if line}


@pytest.fixture(scope="module")
def words() -> dict[str, np.ndarray]:
    return dump(Emulator(32, "none"))


@pytest.mark.parametrize("name", ["half", "bfloat16"])
def test_mma_is_a_matrix_product(words: dict[str, np.ndarray], name: str) -> None:
    a, b, product = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
    result = words[f"mma {name}"].view(np.float32).reshape(32, 4)
    actual = np.zeros((16, 8))
    for lane, i in np.ndindex(32, 4):
        line, place = lane // 4, lane % 4 * 2
        for j in (0, 1):
            a[line + i % 2 * 8, place + i // 2 * 8 + j] = number(lane * 8 + 2 * i + j)
            if i < 2:
                b[place + i * 8 + j, line] = number(1000 + lane * 4 + 2 * i + j)
        row, column = line + i // 2 * 8, place + i % 2
        product[row, column], actual[row, column] = number(2000 + lane * 4 + i), result[lane, i]
    np.testing.assert_array_equal(actual, product + 2 * a @ b)


def number(place: int) -> int:
    """As primitives.cu has it."""
    return (place * 2654435761 % 2**32 >> 16) % 17 - 8


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", ["", " transposed"])
def test_ldmatrix_spreads_rows_over_lanes(words: dict[str, np.ndarray], count: int, transposed: str) -> None:
    matrices = np.array([[[(31 - 8 * m - r) * 256 + 8 + c for c in range(8)] for r in range(8)] for m in range(count)])
    if transposed:
        matrices = matrices.swapaxes(1, 2)
    halves = words[f"ldmatrix x{count}{transposed}"].view(np.uint16).reshape(8, 4, count, 2)  # row, columns, matrix
    np.testing.assert_array_equal(halves.transpose(2, 0, 1, 3).reshape(count, 8, 8), matrices)


@pytest.mark.parametrize(("name", "dtype"), [("half", torch.float16), ("bfloat16", torch.bfloat16)])
def test_conversions_are_those_of_torch(words: dict[str, np.ndarray], name: str, dtype: torch.dtype) -> None:
    exact = torch.arange(2**16).to(torch.int16).view(dtype).float()
    exact[exact.isnan()] = 0
    actual = torch.from_numpy(words[f"to_real {name}"].view(np.float32).copy())
    assert torch.equal(actual.view(torch.int32), exact.view(torch.int32))


@pytest.mark.parametrize("warp_size", emulation.WARP_SIZES)
def test_strided_sum_adds_up_threads_that_are_a_stride_apart(warp_size: int) -> None:
    threads = 4 * warp_size
    numbers = np.array([number(place) for place in range(threads)])
    sums = iter(dump(Emulator(warp_size, "none"))["strided_sum float"].view(np.float32).reshape(-1, threads))
    powers = [2**i for i in range(threads.bit_length())]
    for stride, count in [(stride, count) for stride in powers for count in powers if stride * count <= threads]:
        groups = numbers.reshape(-1, count, stride).sum(axis=1, keepdims=True)
        np.testing.assert_array_equal(next(sums), np.broadcast_to(groups, (len(groups), count, stride)).reshape(-1))
    assert next(sums, None) is None


@pytest.mark.parametrize("warp_size", emulation.WARP_SIZES)
@pytest.mark.parametrize("order", ["reverse", "random", "warp"])
@pytest.mark.parametrize("copies", ["lazy", "eager"])
def test_nothing_depends_on_the_order_of_threads(warp_size: int, order: str, copies: str) -> None:
    emulator = Emulator(warp_size, "none")
    other = run(emulator, "primitives", SIMT_ORDER=order, SIMT_COPIES=copies, SIMT_SEED="7")
    assert other.stdout == run(emulator, "primitives").stdout


# The seeded bugs need the builds for 32 lanes anyway.
@pytest.mark.parametrize("warp_size", [32, pytest.param(64, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_primitives_under_sanitizers(warp_size: int, sanitizer: str) -> None:
    sanitized, plain = (run(Emulator(warp_size, name), "primitives") for name in (sanitizer, "none"))
    assert sanitized.stdout == plain.stdout


def test_unknown_settings_raise() -> None:
    result = run(Emulator(32, "none"), "seeded_bugs", "hang", "correct", SIMT_ORDER="backwards")
    assert result.stdout == "simt: SIMT_ORDER is unknown: backwards\n"


# ---- what it finds ---------------------------------------------------------------------------------------------------


def run(emulator: Emulator, program: str, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [emulator.program(program), *arguments],
        env=os.environ | {"TSAN_OPTIONS": "halt_on_error=1"} | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("bug", BUGS)
def test_seeded_bug_is_found(bug: str) -> None:
    sanitizer, message, settings = BUGS[bug]
    result = run(Emulator(32, sanitizer), "seeded_bugs", bug, "seeded", **settings)
    assert result.returncode != 0
    assert re.search(message, result.stdout), result.stdout


@pytest.mark.parametrize("sanitizer", emulation.SANITIZERS)
@pytest.mark.parametrize("bug", BUGS)
def test_without_the_bug_nothing_is_found(bug: str, sanitizer: str) -> None:
    if bug == "too_many_threads":
        pytest.skip("there is nothing else about it")
    result = run(Emulator(32, sanitizer), "seeded_bugs", bug, "correct", **BUGS[bug][2])
    assert (result.returncode, result.stdout) == (0, "right\n")


# ---- its operators ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warp_size", emulation.WARP_SIZES)
def test_every_operator_is_emulated(warp_size: int) -> None:
    emulator = Emulator(warp_size)
    gpu_operators = [name for name in operator_names(private=True) if has_kernel(name, "CPU")]
    assert sorted(emulation.load(emulator)) == gpu_operators
    for name in gpu_operators:
        emulated, schema = overload(name, emulator.namespace)._schema, overload(name)._schema
        assert str(emulated) == f"{emulator.namespace}{str(schema)[len('myvision') :]}"


@pytest.mark.parametrize("warp_size", emulation.WARP_SIZES)
def test_emulated_kernels_take_the_place_of_the_cpu(warp_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = random_tensor(5)
    with emulation.in_place_of_cpu(Emulator(warp_size)):
        assert torch.equal(my_add(x, x), 3 * x)
        monkeypatch.setenv("SIMT_ORDER", "backwards")
        with pytest.raises(RuntimeError, match="SIMT_ORDER is unknown"):
            my_add(x, x)
    assert torch.equal(my_add(x, x), 3 * x)
