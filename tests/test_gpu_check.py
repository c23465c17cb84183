"""tools/gpu_check.sh and the report that it ends with."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from helpers import REPOSITORY, run_python


def run_report(directory: Path) -> None:
    program = str(REPOSITORY / "tools" / "gpu_report.py")
    arguments = [program, str(directory)]
    run_python(f"import runpy, sys; sys.argv = {arguments}; runpy.run_path({program!r}, run_name='__main__')")


def write_results(directory: Path) -> None:
    figures = [{"myvision": 1.0, "torch": 2.0}, {"myvision": 8.0, "torch": 2.0}]
    rows = [
        {"group": "op forward", "name": str(row), "unit": "ms", "figures": figures[row], "limit": 0.5} for row in (0, 1)
    ]
    (directory / "results.json").write_text(json.dumps({"environment": {}, "results": rows, "bars": []}))


def test_report_of_a_whole_run(tmp_path: Path) -> None:
    (tmp_path / "steps.tsv").write_text("build\tpassed\t48\nracecheck\tdoes not work here\t0\n")
    (tmp_path / "build.log").write_text("compiling\n==== 2 passed | in 3 s ====\n\n")
    (tmp_path / "environment.json").write_text('{"GPUs": "a GPU", "torch": "2.11.0"}')
    write_results(tmp_path)
    run_report(tmp_path)
    lines = (tmp_path / "report.md").read_text().splitlines()
    assert lines[0] == "a GPU, torch 2.11.0"
    assert "| build | passed | 48 s | 2 passed / in 3 s |" in lines
    assert "| op forward | torch | 1.414 × | 4.000 × | 18% |" in lines
    report = json.loads((tmp_path / "report.json").read_text())
    assert [step["outcome"] for step in report["steps"]] == ["passed", "does not work here"]
    assert len(report["benchmarks"]["results"]) == 2


@pytest.mark.parametrize("outcome", ["failed", "out of time", "no time left"])
def test_report_fails_where_a_step_did(outcome: str, tmp_path: Path) -> None:
    (tmp_path / "steps.tsv").write_text(f"build\tpassed\t48\ngpu-tests\t{outcome}\t9\n")
    with pytest.raises(AssertionError, match=r"^exit status 1\n(.*\n)*gpu_check: not passed: gpu-tests\n?$"):
        run_report(tmp_path)


def stand_in(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


def run_check(tmp_path: Path, python: str, sanitizer: str) -> list[list[str]]:
    """The recorded steps of a run in which stand-ins take the place of Python, nvcc and compute-sanitizer."""
    stand_in(tmp_path / "python", f'case "$*" in *gpu_report.py*) ;; {python} esac')
    stand_in(tmp_path / "nvcc", "exit 0")
    stand_in(tmp_path / "compute-sanitizer", sanitizer)
    environment = os.environ | {"PYTHON": str(tmp_path / "python"), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    check = REPOSITORY / "tools" / "gpu_check.sh"
    subprocess.run([check, tmp_path / "out"], env=environment, capture_output=True, timeout=60)
    return [line.split("\t")[:2] for line in (tmp_path / "out" / "steps.tsv").read_text().splitlines()]


def test_check_goes_on_after_a_failed_step(tmp_path: Path) -> None:
    steps = run_check(tmp_path, "*tests/test_gpu.py) exit 1 ;;", 'case "$*" in *planted_bugs) exit 9 ;; esac')
    assert steps == [
        ["build", "passed"],
        ["gpu-tests", "failed"],
        ["operator-tests", "failed"],
        ["benchmarks", "passed"],
        ["planted-bugs", "passed"],
        ["memcheck", "passed"],
        ["racecheck", "passed"],
    ]


def test_check_stops_where_the_build_fails(tmp_path: Path) -> None:
    assert run_check(tmp_path, "*build_ext*) exit 1 ;;", "exit 9") == [["build", "failed"]]


def test_check_believes_no_sanitizer_that_finds_no_planted_bug(tmp_path: Path) -> None:
    steps = dict(run_check(tmp_path, "", "exit 0"))
    assert steps["memcheck"] == steps["racecheck"] == "does not work here"


def test_check_tells_what_a_sanitizer_finds(tmp_path: Path) -> None:
    steps = dict(run_check(tmp_path, "", "exit 9"))
    assert steps["memcheck"] == steps["racecheck"] == "failed"
