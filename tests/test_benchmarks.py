"""The benchmarks: what the harness counts, what a run writes, and how runs are compared. No test judges a time."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from helpers import run_python

from benchmarks import harness, report
from benchmarks.__main__ import main, operators
from benchmarks.bench_deform_conv2d import SHAPES, Problem, Shape
from benchmarks.harness import OURS, Bar, Result, Settings

CPU = torch.device("cpu")


def result(ours: float, peer: float, group: str = "group", name: str = "case") -> Result:
    return Result(group, name, "ms", {OURS: ours, "peer": peer}, limit=ours / 2)


def test_quick_run_writes_json_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main(["--quick", "--ops", "my_add", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["environment"]["limits"]["bandwidth"] > 0
    assert [row["name"] for row in content["results"]] == ["1M floats", "64 floats", "64 floats"]
    assert all(min(row["figures"].values()) > 0 for row in content["results"])
    assert len(content["bars"]) == 4
    assert "geometric mean" in capsys.readouterr().out


def test_a_headline_is_the_peers_speed_beside_ours(tmp_path: Path) -> None:
    rows = [result(1, 2, "a"), result(1, 8, "a"), result(3, 1.5, "b"), result(1, 1, "left out")]
    found = report.headlines(rows, {"b": ("peer", "a peer that is missing"), "a": ("peer",), "not measured": ("peer",)})
    assert found == [report.Headline("b", {"peer": 2}), report.Headline("a", {"peer": 0.25})]
    assert report.headline_table(found).splitlines()[2:] == ["| b | 0.5 × |", "| a | 4.0 × |"]
    pytest.importorskip("matplotlib")
    for path in (tmp_path / "once.svg", tmp_path / "again.svg"):
        report.save_picture(path, found, "a machine")
    assert (tmp_path / "once.svg").read_bytes() == (tmp_path / "again.svg").read_bytes()


def test_the_picture_measures_headlines_alone_and_names_the_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    described = []
    monkeypatch.setattr(report, "save_picture", lambda path, found, machine: described.append((found, machine)))
    options = ["--quick", "--picture", "speed.svg", "--ops", "my_add", "transformer", "--out", str(tmp_path)]
    assert main(options) == 0
    ((found, machine),) = described
    assert [line.group for line in found] == ["encoder layer, training forward + backward"]
    assert f"torch {torch.__version__}" in machine
    assert "my_add" not in capsys.readouterr().out


def test_command_line_runs_them(tmp_path: Path) -> None:
    options = ["bench", "--quick", "--filter", "one small call", "--out", str(tmp_path)]
    printed = run_python(f"from myvision.__main__ import main; main({options})")
    assert "my_add, one small call in inference mode" in printed
    assert "deform_conv2d" not in printed


# Memory is measured in a new process for each of the peers.
@pytest.mark.parametrize("memory", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("op", "groups"), [("deform_conv2d", 3), ("attention", 8), ("linear", 15)])
def test_every_case_runs(op: str, groups: int, memory: bool, tmp_path: Path) -> None:
    pattern = "" if memory else "^(?!.*memory)"
    assert main(["--quick", "--ops", op, "--filter", pattern, "--out", str(tmp_path)]) == 0
    rows = report.load_json(tmp_path / "results.json")
    assert len({row.group for row in rows}) == groups + (memory and harness.can_measure_memory(CPU))


def test_networks_are_measured_whole_and_shape_by_shape(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    assert main(["--quick", "--networks", "--filter", "^(?!.*compiled)", "--out", str(tmp_path)]) == 0
    rows = {(row.group, row.name): row for row in report.load_json(tmp_path / "results.json")}
    assert ("ResNet-18, training", "batch 2") in rows
    per_call = rows["ResNet-18, training: batch_norm", "backward 2x8x8x64, 4 calls"]
    of_step = rows["ResNet-18, training: batch_norm in all", "batch 2"]
    assert all(0 < 4 * per_call.figures[name] < of_step.figures[name] for name in per_call.figures)
    assert of_step.peers == [harness.EAGER]
    for name in ("forward 2x512x1000, 1 calls", "backward 2x1000, 1 calls"):
        assert min(rows["ResNet-18, training: linear", name].figures.values()) > 0


def test_filter_that_matches_nothing_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--filter", "no such case"]) == 1
    assert "no case matches 'no such case'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        (["--filter", "("], "is no regular expression"),
        (["--device", "tpu"], "must be cpu or cuda, but is 'tpu'"),
        (["--compare", "no/such/file.json"], "cannot be read as the JSON file of a run"),
        (["--compare", __file__], "cannot be read as the JSON file of a run"),
    ],
)
def test_bad_options_are_usage_errors(option: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--quick", *option])
    assert reason in capsys.readouterr().err


def test_each_operator_has_a_benchmark() -> None:
    # Those of the other norms are in the file of the one whose kernels they share.
    assert set(operators()) >= {
        "attention",
        "batch_norm",
        "deform_conv2d",
        "layer_norm",
        "linear",
        "my_add",
        "transformer",
    }


def test_functions_take_turns() -> None:
    order = []

    def function(name: str) -> torch.Tensor:
        order.append(name)
        assert len(order) < 1000 or min(order.count("a"), order.count("b")) > 1, f"only {name} is called"
        return torch.empty(0)

    functions = {name: lambda name=name: function(name) for name in ("a", "b")}
    timing = harness.interleave(functions, Settings(CPU, seconds=0.01, quick=True))
    assert order[:4] == ["a", "b", "a", "b"]  # the warm-up, then each once
    assert min(len(samples) for samples in timing.samples.values()) > 1


def test_disturbed_batches_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = iter([0.0, 1.0, 1.0, 2.0] + [2.0] * 1000)  # read before and after each batch: the first two are disturbed
    monkeypatch.setattr(harness, "seconds_of_other_processes", lambda: next(busy))
    timing = harness.interleave({OURS: lambda: torch.empty(0)}, Settings(CPU, seconds=0.001))
    assert timing.dropped_batches == 2
    assert not timing.noisy


def test_a_machine_that_never_rests_is_said_to_be_noisy(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = iter(range(1000))
    monkeypatch.setattr(harness, "seconds_of_other_processes", lambda: next(busy))
    settings = Settings(CPU, seconds=0.001)
    timing = harness.interleave({OURS: lambda: torch.empty(0)}, settings)
    assert timing.dropped_batches == settings.max_dropped_batches
    assert timing.noisy


def test_limit_is_the_larger_of_operations_and_bytes() -> None:
    limits = harness.Limits(flops=100, bandwidth=10, read_bandwidth=20, flops_from="")
    assert limits.seconds(flops=100, moved_bytes=1) == 1
    assert limits.seconds(flops=1, moved_bytes=100) == 10


@pytest.mark.parametrize(("peer", "milliseconds"), [(harness.FMA_PEAK, 40), (harness.READ_BANDWIDTH, 50)])
def test_a_limit_case_has_one_of_the_limits_for_a_peer(peer: str, milliseconds: float) -> None:
    limits = harness.Limits(flops=100, bandwidth=10, read_bandwidth=20, flops_from="")
    case = harness.TimeCase("group", "case", lambda: {OURS: lambda: torch.empty(0)}, flops=4, moved_bytes=1)
    (row,) = harness.LimitCase(case, peer).measure(Settings(CPU, seconds=0.001, quick=True), limits)
    assert (row.limit, row.peers) == (milliseconds, [peer])
    assert row.figures[peer] == milliseconds


@pytest.mark.parametrize(("summary", "expected"), [(max, 4), (None, 2)])
def test_bar_sums_up_its_group(summary: object, expected: float) -> None:
    bar = Bar("group", "peer", 1, **({"summary": summary} if summary else {}))
    rows = [result(1, 1), result(4, 1), result(100, 1, group="other")]
    assert math.isclose(bar.measured(rows), expected)
    assert Bar("group", "absent peer", 1).measured(rows) is None
    assert Bar("other", None, 1, summary=max).measured(rows) == 100


def test_summary_says_which_bars_are_met() -> None:
    rows = [result(1, 1, "fast"), result(3, 1, "slow")]
    lines = report.summary_table(rows, [Bar("fast", "peer", 1.5), Bar("slow", "peer", 2)]).splitlines()
    assert [line.endswith("NOT MET") for line in lines if "<=" in line] == [False, True]


def test_regressions_are_those_beside_the_peer(tmp_path: Path) -> None:
    old = [result(1, 2, name="slower"), result(1, 2, name="machine slower"), result(1, 2, name="gone")]
    new = [result(1.5, 2, name="slower"), result(3, 6, name="machine slower"), result(9, 1, name="new")]
    report.save_json(tmp_path / "old.json", {}, old, [])
    found = report.regressions(report.load_json(tmp_path / "old.json"), new, tolerance=0.15)
    assert found == ["group, slower: 0.500 x peer before, 0.750 x now"]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_are_what_the_counts_assume(shape: Shape) -> None:
    problem = Problem(Shape(1, 8 * shape.offset_groups, 9, 8, shape.kernel, shape.stride, shape.offset_groups), CPU)
    outputs = {name: function() for name, function in problem.forward().items()}
    assert {output.shape for output in outputs.values()} == {(1, 8, problem.shape.out_size, problem.shape.out_size)}
    elements = sum(tensor.numel() for tensor in problem.tensors()) - 8 + outputs[OURS].numel()  # without the bias
    assert problem.moved_bytes == 4 * elements


@pytest.mark.skipif(not harness.can_measure_memory(CPU), reason="the system does not tell a process's peak memory")
def test_extra_memory_is_what_a_call_holds_beside_its_result() -> None:
    code = """
import torch
from benchmarks.harness import extra_memory
def run(size):
    temporary = torch.ones(16 * size)
    return temporary[:size] + 1
run(1 << 15)  # wakes torch's threads and reads its code into memory
print(extra_memory(lambda: run(1 << 20), torch.device("cpu")))
"""
    assert 60e6 < int(run_python(code)) < 80e6


def test_peak_is_measured_without_a_compiler_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    limits = harness.measure_limits(CPU, quick=True)
    assert limits.flops_from == "sgemm"
    assert limits.flops > 0
