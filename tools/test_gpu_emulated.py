"""Runs the tests of the emulated GPU kernels in full: every order of threads, and under the sanitizers.

The emulator, what it finds and its settings are described in tests/simt/machine.h. Linux on x86-64 only.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import sanitizer

ROOT = Path(__file__).parent.parent
JOBS = os.environ.get("TEST_JOBS", "2")
ORDERS = {
    "reverse order": {"SIMT_ORDER": "reverse"},
    "random order, copies at once": {"SIMT_ORDER": "random", "SIMT_SEED": "1", "SIMT_COPIES": "eager"},
    "warp by warp": {"SIMT_ORDER": "warp", "SIMT_SEED": "1"},
}


def sanitized() -> dict[str, dict[str, str]]:
    """Environments by what they are called."""
    # New memory holds NaN, so that whoever reads what was never written is found as well.
    asan = "detect_leaks=0:max_malloc_fill_size=268435456:malloc_fill_byte=255"
    return {
        "AddressSanitizer and UBSan": sanitizer.environment(
            "libasan.so", "libstdc++.so", MYVISION_EMULATED_SANITIZER="address", ASAN_OPTIONS=asan
        ),
        # One thread: torch's own are not instrumented, so nothing would be known of what orders them.
        "ThreadSanitizer": sanitizer.environment(
            "libtsan.so",
            MYVISION_EMULATED_SANITIZER="thread",
            OMP_NUM_THREADS="1",
            TSAN_OPTIONS="halt_on_error=1",
        ),
    }


def main() -> None:
    runs = {name: os.environ | settings for name, settings in ORDERS.items()} | sanitized()
    for name, environment in runs.items():
        print(f"emulated GPU: {name}", flush=True)
        start = time.monotonic()
        # What compares bits of large sums tells the sanitizers nothing that smaller ones do not.
        selected = "emulated" if name in ORDERS else "emulated and not bitwise"
        # Sanitizers write to the process's own standard error.
        command = [sys.executable, "-m", "pytest", "-q", "-n", JOBS, "--capture=sys", "-k", selected, "tests"]
        if subprocess.run(command, cwd=ROOT, env=environment).returncode:
            sys.exit(f"emulated GPU: the tests failed: {name}")
        print(f"emulated GPU: {name}: {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
