"""Fail where a built library needs a symbol outside torch's stable C interface.

Such a symbol (C++ of c10, at or torch, or Python's C API) ties the binary to one release of torch or Python.

    python tools/check_symbols.py LIBRARY_OR_WHEEL...
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

FORBIDDEN = re.compile(r"\b(c10|at|torch)::|^_?Py[A-Z_]")  # of a demangled name


def forbidden(symbols: list[str]) -> list[str]:
    return [symbol for symbol in symbols if FORBIDDEN.search(symbol)]


def undefined_symbols(library: Path) -> list[str]:
    """The undefined dynamic symbols, weak ones too, demangled."""
    command = ["nm", "--dynamic", "--demangle", "--undefined-only", str(library)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [line.strip().partition(" ")[2] for line in listing.splitlines()]


def libraries(path: Path, scratch: Path) -> Iterator[Path]:
    """The path itself, or the libraries in a wheel."""
    if path.suffix != ".whl":
        yield path
        return
    with zipfile.ZipFile(path) as wheel:
        for name in wheel.namelist():
            if name.endswith(".so"):
                yield Path(wheel.extract(name, scratch / path.stem))


def check(paths: list[Path]) -> int:
    """The exit status: 0 where every library is clean, and at least one was looked at."""
    status, seen = 0, 0
    with tempfile.TemporaryDirectory() as scratch:
        for library in (found for path in paths for found in libraries(path, Path(scratch))):
            seen += 1
            bad = forbidden(undefined_symbols(library))
            print(f"{library.name}: {'not ' if bad else ''}portable")
            for symbol in bad:
                print(f"  undefined: {symbol}")
                status = 1
    if not seen:
        print("no library to check")
    return status if seen else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, metavar="LIBRARY_OR_WHEEL")
    paths: list[Path] = parser.parse_args().paths
    for path in paths:
        if not path.is_file():
            parser.error(f"there is no file {path}")
    return check(paths)


if __name__ == "__main__":
    sys.exit(main())
