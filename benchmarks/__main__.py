"""Runs the benchmarks: `python -m myvision bench`, or `python -m benchmarks` in the source tree."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import pkgutil
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from myvision import has_cuda_ops

from . import networks, report
from .harness import Bar, Case, Limits, Result, Settings, cpu_name, measure_limits

PREFIX = "bench_"


def operators() -> list[str]:
    """The operators that have a file bench_<op>.py here."""
    package = importlib.import_module(__package__)
    names = [module.name for module in pkgutil.iter_modules(package.__path__)]
    return sorted(name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX))


def benchmark(operator: str) -> ModuleType:
    """The module bench_<op>: `cases(settings)`, `BARS` and, for the README's picture, `HEADLINES` (peers by group)."""
    return importlib.import_module(f"{__package__}.{PREFIX}{operator}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--quick", action="store_true", help="small shapes, one pass: shows that everything runs")
    measured = parser.add_mutually_exclusive_group()
    measured.add_argument("--ops", nargs="+", choices=operators(), default=operators(), help="default: all of them")
    measured.add_argument("--networks", action="store_true", help="whole networks instead, needs torchvision")
    parser.add_argument("--filter", type=_regex, default="", help="regular expression: only cases that it matches")
    parser.add_argument("--threads", type=int, help="default: as torch has it")
    parser.add_argument("--seconds", type=float, help="for each case; default: 2, or 0.02 with --quick")
    parser.add_argument("--device", type=_device, default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--out", type=Path, default=Path("benchmarks", "results"), help="default: %(default)s")
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="FILE.svg",
        help="measure and draw what the README's picture shows",
    )
    parser.add_argument("--compare", type=_earlier_run, default=[], metavar="OLD.json", help="fail where one is slower")
    parser.add_argument("--tolerance", type=float, default=0.15, help="for --compare; default: %(default)s")


def _regex(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error


def _device(text: str) -> torch.device:
    if text not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"must be cpu or cuda, but is {text!r}")
    if text == "cuda" and not (torch.cuda.is_available() and has_cuda_ops()):
        raise argparse.ArgumentTypeError("cuda needs a GPU and myvision's GPU library, see python -m myvision env")
    return torch.device(text)


def _earlier_run(text: str) -> list[Result]:
    try:
        return report.load_json(Path(text))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be read as the JSON file of a run: {error!r}") from error


def run(args: argparse.Namespace) -> int:
    """Measures, prints, saves; 1 where --compare finds a case that became slower."""
    if args.threads:
        torch.set_num_threads(args.threads)
    seconds = args.seconds or (0.02 if args.quick else 2.0)
    settings = Settings(args.device, seconds, args.quick)
    if args.networks and importlib.util.find_spec("torchvision") is None:
        print("--networks needs torchvision: pip install torchvision")
        return 1
    modules = [networks] if args.networks else [benchmark(operator) for operator in args.ops]
    bars = [bar for module in modules for bar in module.BARS]
    cases = [case for module in modules for case in module.cases(settings)]
    cases = [case for case in cases if args.filter.search(f"{case.group} {case.name}")]
    chosen = {group: peers for module in modules for group, peers in getattr(module, "HEADLINES", {}).items()}
    if args.picture:
        cases = [case for case in cases if case.group in chosen]
    if not cases:
        print(f"no case matches {args.filter.pattern!r}")
        return 1

    limits = measure_limits(args.device, args.quick)
    print(
        f"{torch.get_num_threads()} threads, at most {limits.flops / 1e9:.0f} GFLOP/s ({limits.flops_from}), "
        f"copies at {limits.bandwidth / 1e9:.1f} GB/s, reads at {limits.read_bandwidth / 1e9:.1f} GB/s; medians; "
        "a case over its limit ran from the cache"
    )
    results = measure(cases, settings, limits)
    print(report.summary_table(results, bars))
    print(f"batches dropped because other processes were busy: {sum(row.dropped_batches for row in results)}")
    environment = _environment(args.device, limits)
    _save(args.out, environment, results, bars)
    if args.picture:
        headlines = report.headlines(results, chosen)
        print(report.headline_table(headlines))
        report.save_picture(args.picture, headlines, report.describe(environment))
    slower = report.regressions(args.compare, results, args.tolerance)
    print("\n".join(f"SLOWER {line}" for line in slower))
    return 1 if slower else 0


def measure(cases: Sequence[Case], settings: Settings, limits: Limits) -> list[Result]:
    """Measures the cases and prints each as soon as it is measured."""
    width = max(len(case.name) for case in cases)
    results: list[Result] = []
    for case in cases:
        for row in case.measure(settings, limits):
            if not results or results[-1].group != row.group:
                print(report.header(row, width))
            print(report.line(row, width), flush=True)
            results.append(row)
    return results


def _environment(device: torch.device, limits: Limits) -> dict[str, Any]:
    return {
        "date": datetime.now().isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "processor": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else torch.backends.cpu.get_cpu_capability(),
        "kernels": torch.ops.myvision._cpu_capability(),
        "threads": torch.get_num_threads(),
        "limits": asdict(limits),
    }


def _save(directory: Path, environment: dict[str, Any], results: Sequence[Result], bars: Sequence[Bar]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    report.save_json(directory / "results.json", environment, results, bars)
    try:
        report.save_plot(
            directory / "results.png", results, f"{environment['device']}, {environment['threads']} threads"
        )
    except ImportError:
        print("no plot: matplotlib is missing, pip install 'myvision[demo]' brings it")
    print(f"saved in {directory}")


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m benchmarks`."""
    parser = argparse.ArgumentParser(
        prog="benchmarks", description="Speed and memory of the operators beside their peers."
    )
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    raise SystemExit(main())
