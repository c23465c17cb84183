"""Plants the faults of mutations.py, one at a time, and tells which tests see them: those of `make test`, of `make
test-all` only, or none.

The work is done in a copy of the sources, build/mutants. For each fault the copy is built, the tests that are likely to
see it run first, and the first failure ends the search. Whether the tests pass without a fault is not asked again.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parent.parent
COPY = ROOT / "build" / "mutants"
JOBS = os.environ.get("TEST_JOBS", "2")
LIMIT = 3600  # seconds of a run of pytest
FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


def refresh() -> None:
    """Makes the copy what the sources are. What is as it was keeps its time, so that it is not compiled again."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, stdout=-1, text=True, check=True).stdout.split()
    for name in names:
        source, copy = ROOT / name, COPY / name
        if source.is_file() and not (copy.is_file() and copy.read_bytes() == source.read_bytes()):
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(source.read_bytes())


def build() -> str:
    """An empty text, or what went wrong."""
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    environment = os.environ | {"MYVISION_NO_CUDA": "1"}
    result = subprocess.run(command, cwd=COPY, env=environment, capture_output=True, text=True)
    return result.stdout + result.stderr if result.returncode else ""


def failing_test(share: list[str], files: list[str]) -> str | None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-rfE", "-n", JOBS, *share, *files]
    try:
        result = subprocess.run(command, cwd=COPY, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return f"some test does not end within {LIMIT} s"
    if result.returncode in (0, 5):  # passed, or there are none
        return None
    found = FAILURE.search(result.stdout)
    return found[1] if found else f"pytest ended with {result.returncode}: {result.stdout[-500:]}"


def searches(mutation: Mutation, quick: bool) -> Iterator[tuple[str, list[str], list[str]]]:
    """Who sees the fault if the tests of this share and these files do."""
    likely = [f"tests/test_{name}.py" for name in mutation.tests.split()]
    for who, share in (("make test", []), ("make test-all only", ["--rest"])):
        yield who, share, likely
        if not quick:
            yield who, share, ["tests"]


def verdict(mutation: Mutation, quick: bool) -> str:
    path = COPY / mutation.path
    text = path.read_text() if path.is_file() else ""
    if text.count(mutation.before) != 1:
        return f"the text occurs {text.count(mutation.before)} times: correct mutations.py"
    path.write_text(text.replace(mutation.before, mutation.after))
    try:
        if build():  # in Python too: the library still has the fault before this one
            return "make test: it does not compile"
        for who, share, files in searches(mutation, quick):
            if test := failing_test(share, files):
                return f"{who}: {test}"
        return "nobody"
    finally:
        path.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="of paths of files, such as _dispatch; all without")
    parser.add_argument("--quick", action="store_true", help="run only the tests that are likely to see a fault")
    options = parser.parse_args()
    refresh()
    if message := build():
        sys.exit(f"mutate: the copy does not build:\n{message}")
    missed = 0
    for mutation in MUTATIONS:
        if options.parts and not any(part in mutation.path for part in options.parts):
            continue
        start = time.monotonic()
        result = verdict(mutation, options.quick)
        missed += not result.startswith("make test:")
        print(f"{mutation.path}: {mutation.before!r} -> {mutation.after!r}", flush=True)
        print(f"    {result} ({time.monotonic() - start:.0f} s)", flush=True)
    sys.exit(f"mutate: {missed} of the faults are not seen by `make test`" if missed else None)


if __name__ == "__main__":
    main()
