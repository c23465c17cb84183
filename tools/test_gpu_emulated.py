"""Runs the tests of the emulated GPU kernels in full: every order of threads, and under the sanitizers.

The emulator, what it finds and its settings are described in tests/simt/machine.h. Linux on x86-64 only.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import sanitizer

ROOT = Path(__file__).parent.parent
JOBS = os.environ.get("TEST_JOBS", "2")
ORDERS = {
    "reverse": {"SIMT_ORDER": "reverse"},
    "random": {"SIMT_ORDER": "random", "SIMT_SEED": "1", "SIMT_COPIES": "eager"},
    "warp": {"SIMT_ORDER": "warp", "SIMT_SEED": "1"},
}
SANITIZERS = ["address", "thread"]
# `make test-all` has run all of it; large sums and the many calls of gradcheck add nothing here but time.
# Of the norms, of attention and of linear, whose tests are many, those of their kernels' ways, and every norm once.
NORMS = "norm_kernels or (matches_the_oracle and float32 and channels_last)"
ATTENTION = "attention_gpu and bfloat16 and (tensor_cores or split)"
LINEAR = "linear_gpu and (not any_size or bfloat16)"
SELECTED = (
    f"emulated and not bitwise and not gradcheck and (not norm or {NORMS}) and (not attention or ({ATTENTION})) "
    f"and (not linear or ({LINEAR}))"
)


def sanitized(name: str) -> dict[str, str]:
    """An environment whose Python has this sanitizer, with kernels built for it."""
    if name == "address":
        # New memory holds NaN, so that whoever reads what was never written is found as well.
        options = "detect_leaks=0:max_malloc_fill_size=268435456:malloc_fill_byte=255"
        loaded = sanitizer.environment("libasan.so", "libstdc++.so", ASAN_OPTIONS=options)
    else:
        # One thread: torch's own are not instrumented, so nothing would be known of what orders them.
        loaded = sanitizer.environment("libtsan.so", TSAN_OPTIONS="halt_on_error=1", OMP_NUM_THREADS="1")
    return loaded | {"MYVISION_EMULATED_SANITIZER": name}


def run(name: str) -> None:
    environment = os.environ | ORDERS[name] if name in ORDERS else sanitized(name)
    # Sanitizers write to the process's own standard error.
    options = ["-q", "--all", "-n", JOBS, "--capture=sys", "-k", SELECTED]
    command = [sys.executable, "-m", "pytest", *options, "tests"]
    start = time.monotonic()
    if subprocess.run(command, cwd=ROOT, env=environment).returncode:
        sys.exit(f"emulated GPU: the tests failed: {name}")
    print(f"emulated GPU: {name}: passed in {time.monotonic() - start:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*ORDERS, *SANITIZERS]
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"of {', '.join(names)}; all where none is named")
    chosen = parser.parse_args().runs or names
    if unknown := set(chosen) - set(names):
        parser.error(f"there is no run {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    for name in chosen:
        run(name)


if __name__ == "__main__":
    main()
