"""The emulator of the GPU: that it computes as a GPU does, and that it finds the bugs it is there to find."""

from __future__ import annotations

import os
import re
import subprocess

import emulation
import pytest
from emulation import Emulator

pytestmark = pytest.mark.skipif(not emulation.is_supported(), reason="the GPU emulator runs on Linux and x86-64")

ORDERS = ["forward", "reverse", "random", "warp"]
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
    "uninitialised_shared_memory": ("none", "wrong", {}),
    "missing_copy_wait": ("none", "wrong", {"SIMT_COPIES": "lazy"}),
    "too_short_copy_wait": ("none", "wrong", {"SIMT_COPIES": "lazy"}),
    "early_copy": ("none", "wrong", {"SIMT_COPIES": "eager"}),
    "outside_of_shared_memory": ("address", "AddressSanitizer: use-after-poison", {}),
    "outside_of_dynamic_shared_memory": ("address", "AddressSanitizer: use-after-poison", {}),
    "outside_of_a_tensor": ("address", "AddressSanitizer: heap-buffer-overflow", {}),
    "misaligned_pointer": ("address", "runtime error: .* misaligned address", {}),
}


def run(sanitizer: str, bug: str, variant: str, warp_size: int = 32, **settings: str) -> subprocess.CompletedProcess:
    program = Emulator(warp_size, sanitizer).program("seeded_bugs")
    return subprocess.run(
        [program, bug, variant],
        env=os.environ | {"TSAN_OPTIONS": "halt_on_error=1"} | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("bug", BUGS)
def test_seeded_bug_is_found(bug: str) -> None:
    sanitizer, message, settings = BUGS[bug]
    result = run(sanitizer, bug, "seeded", **settings)
    assert result.returncode != 0
    assert re.search(message, result.stdout), result.stdout


@pytest.mark.parametrize("sanitizer", emulation.SANITIZERS)
@pytest.mark.parametrize("bug", BUGS)
def test_without_the_bug_nothing_is_found(bug: str, sanitizer: str) -> None:
    if bug == "too_many_threads":
        pytest.skip("there is nothing else about it")
    result = run(sanitizer, bug, "correct", **BUGS[bug][2])
    assert (result.returncode, result.stdout) == (0, "right\n")
