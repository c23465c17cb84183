"""Put the results of tools/gpu_check.sh together: report.json, and report.md with short tables. Fails where a step did.

python tools/gpu_report.py DIRECTORY
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.harness import OURS, Result

ALLOWED = {"passed", "does not work here"}


@dataclass(frozen=True)
class Step:
    """How a step went, and the last line of its log."""

    name: str
    outcome: str
    seconds: int
    last_line: str


def read_steps(directory: Path) -> list[Step]:
    rows = [line.split("\t") for line in (directory / "steps.tsv").read_text().splitlines()]
    return [Step(name, outcome, int(seconds), last_line(directory / f"{name}.log")) for name, outcome, seconds in rows]


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n") if log.is_file() else []
    return next((line.strip("= ") for line in reversed(lines) if line.strip("= ")), "")


def read_json(path: Path) -> Any:
    """What a step left, None where it did not come so far."""
    return json.loads(path.read_text()) if path.is_file() else None


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def steps_table(steps: Sequence[Step]) -> str:
    rows = [(step.name, step.outcome, f"{step.seconds} s", step.last_line) for step in steps]
    return table(("step", "outcome", "time", "last line"), rows)


def benchmarks_table(results: Sequence[Result]) -> str:
    """For each group and peer the mean and the worst of ours / peer, and the mean share of the GPU's limit."""
    rows = []
    for group, cases in report.groups(results):
        for peer in cases[0].peers:
            ratios = [case.ratio(peer) for case in cases]
            rows.append(
                (group, peer, f"{statistics.geometric_mean(ratios):.3f} ×", f"{max(ratios):.3f} ×", share(cases))
            )
    return table(("what", "beside", "ours / theirs, mean", "worst", "share of the limit"), rows)


def share(cases: Sequence[Result]) -> str:
    shares = [case.limit / case.figures[OURS] for case in cases if case.limit]
    return f"{statistics.geometric_mean(shares):.0%}" if shares else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    directory: Path = parser.parse_args().directory
    steps = read_steps(directory)
    environment = read_json(directory / "environment.json")
    measured = read_json(directory / "results.json")

    content = {"environment": environment, "steps": [asdict(step) for step in steps], "benchmarks": measured}
    (directory / "report.json").write_text(json.dumps(content, indent=1) + "\n")
    parts = [f"{environment['GPUs']}, torch {environment['torch']}"] if environment else []
    parts.append(steps_table(steps))
    parts += [benchmarks_table([Result(**row) for row in measured["results"]])] if measured else []
    (directory / "report.md").write_text("\n\n".join(parts) + "\n")
    print((directory / "report.md").read_text())
    failed = [step.name for step in steps if step.outcome not in ALLOWED]
    if failed:
        sys.exit(f"gpu_check: not passed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
