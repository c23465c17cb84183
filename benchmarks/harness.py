"""Times ours and the peers on the same tensors, interleaved in one run, and measures what the machine can do."""

from __future__ import annotations

import ctypes
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

import torch

OURS = "myvision"
EAGER = "torch eager"
COMPILED = "torch.compile"
FMA_PEAK = "FMA peak"
READ_BANDWIDTH = "read bandwidth"
BATCH_SECONDS = 0.3
LIMIT_TRIES = 30

Function = Callable[[], torch.Tensor | tuple[torch.Tensor, ...]]


def beside_torch(ours: Callable[..., Any], plain: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Ours and the same in plain torch, as it is and compiled: anew for each case, or torch stops after a few."""
    torch.compiler.reset()
    return {OURS: ours, EAGER: plain, COMPILED: torch.compile(plain, dynamic=False)}


@dataclass(frozen=True)
class Settings:
    """What every case of a run shares."""

    device: torch.device
    seconds: float  # a case, at least
    quick: bool = False

    @property
    def min_samples(self) -> int:
        return 1 if self.quick else 3

    @property
    def max_dropped_batches(self) -> int:
        """Of a case; past it the machine is taken as it is, and the result marked as noisy. A GPU works undisturbed."""
        return 0 if self.quick or self.device.type == "cuda" else 20


@dataclass(frozen=True)
class Limits:
    """The machine's own limits, measured in the same run."""

    flops: float
    bandwidth: float  # of copies
    read_bandwidth: float
    flops_from: str

    def seconds(self, flops: float, moved_bytes: float) -> float:
        """The least time for that many operations and that many bytes."""
        return max(flops / self.flops, moved_bytes / self.bandwidth)


@dataclass
class Result:
    """One row of the table: a figure for ours and for each peer, less is better."""

    group: str
    name: str
    unit: str
    figures: dict[str, float]
    limit: float | None = None  # the least that the machine's limits allow, in the same unit
    dropped_batches: int = 0
    noisy: bool = False

    def ratio(self, peer: str) -> float:
        """Ours over the peer's."""
        return self.figures[OURS] / self.figures[peer]

    @property
    def peers(self) -> list[str]:
        return [name for name in self.figures if name != OURS]


@dataclass(frozen=True)
class Bar:
    """What a group should reach: ours at most `limit` times the peer, or, without a peer, at most `limit` itself."""

    group: str
    peer: str | None
    limit: float
    summary: Callable[[Sequence[float]], float] = statistics.geometric_mean

    def measured(self, results: Sequence[Result]) -> float | None:
        """The group's figure, None where nothing was measured."""
        rows = [row for row in results if row.group == self.group and (self.peer is None or self.peer in row.figures)]
        return (
            self.summary([row.ratio(self.peer) if self.peer else row.figures[OURS] for row in rows]) if rows else None
        )


class Case(Protocol):
    """Rows still to be measured: mostly one, of the same group and name."""

    @property
    def group(self) -> str: ...

    @property
    def name(self) -> str: ...

    def measure(self, settings: Settings, limits: Limits) -> list[Result]: ...


@dataclass(frozen=True)
class TimeCase:
    """`prepare` makes the tensors and returns the functions to time, ours under the name OURS."""

    group: str
    name: str
    prepare: Callable[[], Mapping[str, Function]]
    flops: float = 0
    moved_bytes: float = 0
    calls: int = 1  # in one sample
    mode: Callable[[], AbstractContextManager[object]] = torch.no_grad

    def measure(self, settings: Settings, limits: Limits) -> list[Result]:
        functions = self.prepare()
        with self.mode():
            timing = interleave(functions, settings, self.calls)
        row = Result(
            group=self.group,
            name=self.name,
            unit="ms",
            figures={name: statistics.median(samples) * 1e3 for name, samples in timing.samples.items()},
            limit=limits.seconds(self.flops, self.moved_bytes) * 1e3 or None,
            dropped_batches=timing.dropped_batches,
            noisy=timing.noisy,
        )
        return [row]


@dataclass(frozen=True)
class LimitCase:
    """A case with one of the machine's limits, `FMA_PEAK` or `READ_BANDWIDTH`, as one more peer."""

    case: TimeCase
    peer: str

    @property
    def group(self) -> str:
        return self.case.group

    @property
    def name(self) -> str:
        return self.case.name

    def measure(self, settings: Settings, limits: Limits) -> list[Result]:
        (row,) = self.case.measure(settings, limits)
        seconds = {
            FMA_PEAK: self.case.flops / limits.flops,
            READ_BANDWIDTH: self.case.moved_bytes / limits.read_bandwidth,
        }
        limit = seconds[self.peer] * 1e3
        return [replace(row, figures={**row.figures, self.peer: limit}, limit=limit)]


@dataclass(frozen=True)
class MemoryCase:
    """Memory that a call takes beyond its inputs and its results, each function in a process of its own.

    `prepare` is as for `TimeCase`; `warm_up` prepares a small call, which loads and allocates what is needed once.
    """

    group: str
    name: str
    prepare: Callable[[], Mapping[str, Function]]
    warm_up: Callable[[], Mapping[str, Function]]

    def measure(self, settings: Settings, limits: Limits) -> list[Result]:
        figures = {name: self._megabytes(name, settings.device) for name in self.warm_up()}
        return [Result(self.group, self.name, "MB", figures)]

    def _megabytes(self, name: str, device: torch.device) -> float:
        if device.type == "cuda":
            return extra_megabytes(self, name, device, torch.get_num_threads())
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh_process:
            return fresh_process.submit(extra_megabytes, self, name, device, torch.get_num_threads()).result()


def extra_megabytes(case: MemoryCase, name: str, device: torch.device, threads: int) -> float:
    """The figure of one function."""
    torch.set_num_threads(threads)
    case.warm_up()[name]()
    return extra_memory(case.prepare()[name], device) / 1e6


def output_and_gradients(
    function: Callable[[], torch.Tensor], tensors: Sequence[torch.Tensor], grad_output: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Forward and backward; for memory all of it, as what a call returns is not extra."""
    output = function()
    return (output, *torch.autograd.grad(output, tensors, grad_output))


@dataclass
class Timing:
    """Seconds a call, sample by sample."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    dropped_batches: int = 0
    noisy: bool = False  # holds disturbed batches


def interleave(functions: Mapping[str, Function], settings: Settings, calls: int = 1) -> Timing:
    """Gives every function the same share of the time, in turns; a batch that other processes disturbed is dropped."""
    timing = Timing({name: [] for name in functions})
    for function in functions.values():
        function()
    accepted = 0.0
    while accepted < settings.seconds or min(map(len, timing.samples.values())) < settings.min_samples:
        others, start = seconds_of_other_processes(), time.perf_counter()
        batch = _batch(functions, timing.samples, min(BATCH_SECONDS, settings.seconds), calls, settings.device)
        elapsed = time.perf_counter() - start
        calm = seconds_of_other_processes() - others <= 0.1 * elapsed + 0.02
        if not calm and timing.dropped_batches < settings.max_dropped_batches:
            timing.dropped_batches += 1
            continue
        timing.noisy |= not calm
        accepted += elapsed
        for name, samples in batch.items():
            timing.samples[name] += samples
    return timing


def _batch(
    functions: Mapping[str, Function],
    before: Mapping[str, Sequence[float]],
    seconds: float,
    calls: int,
    device: torch.device,
) -> dict[str, list[float]]:
    batch: dict[str, list[float]] = {name: [] for name in functions}
    spent = {name: sum(samples) for name, samples in before.items()}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        name = min(spent, key=lambda candidate: spent[candidate])
        sample = _seconds_a_call(functions[name], calls, device)
        batch[name].append(sample)
        spent[name] += sample
    return batch


def _seconds_a_call(function: Function, calls: int, device: torch.device) -> float:
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            function()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / calls
    begin = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - begin) / calls


def seconds_of_other_processes() -> float:
    """CPU time that other processes (and a hypervisor) have taken so far; 0 where the system does not tell."""
    try:
        user, nice, system, _, _, _, _, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    except OSError:
        return 0.0
    own = os.times()
    return (user + nice + system + steal) / os.sysconf("SC_CLK_TCK") - own.user - own.system


def measure_limits(device: torch.device, quick: bool = False) -> Limits:
    """The peak of multiply-adds and the bandwidths of copies and of reads, best of several tries."""
    megabytes = 16 if quick else 256
    bandwidths = _copy_bandwidth(device, megabytes), _read_bandwidth(device, megabytes)
    peak = _fma_peak(torch.get_num_threads()) if device.type == "cpu" else None
    if peak is not None:
        return Limits(peak, *bandwidths, "FMA probe")
    return Limits(_sgemm_peak(device, size=256 if quick else 2048), *bandwidths, "sgemm")


def _copy_bandwidth(device: torch.device, megabytes: int) -> float:
    source = torch.ones(megabytes << 18, device=device)
    target = torch.empty_like(source)
    seconds = min(_seconds_a_call(lambda: target.copy_(source), 1, device) for _ in range(LIMIT_TRIES))
    return 2 * source.nbytes / seconds


def _read_bandwidth(device: torch.device, megabytes: int) -> float:
    source = torch.ones(megabytes << 18, device=device)
    return source.nbytes / min(_seconds_a_call(source.sum, 1, device) for _ in range(LIMIT_TRIES))


def _sgemm_peak(device: torch.device, size: int) -> float:
    a = torch.rand(size, size, device=device)
    return 2 * size**3 / min(_seconds_a_call(lambda: a @ a, 1, device) for _ in range(LIMIT_TRIES))


def _fma_peak(threads: int, iterations: int = 4_000_000) -> float | None:
    """FLOP/s of a small C probe on every thread at once, None without a C compiler that takes it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        library = Path(directory, "fma_peak.so")
        source = Path(__file__).with_name("fma_peak.c")
        command = [
            os.environ.get("CC", "cc"),
            "-O3",
            "-march=native",
            "-shared",
            "-fPIC",
            str(source),
            "-o",
            str(library),
        ]
        try:
            subprocess.run(command, check=True, capture_output=True)
            probe = ctypes.CDLL(str(library))
        except (OSError, subprocess.CalledProcessError):
            return None
    probe.run_fma_chains.argtypes = [ctypes.c_long, ctypes.c_float, ctypes.c_float]
    probe.run_fma_chains.restype = ctypes.c_float
    flops = threads * iterations * ctypes.c_int.in_dll(probe, "flops_per_iteration").value
    with ThreadPoolExecutor(threads) as pool:
        return flops / min(_seconds_of_round(pool, probe, threads, iterations) for _ in range(LIMIT_TRIES))


def _seconds_of_round(pool: ThreadPoolExecutor, probe: ctypes.CDLL, threads: int, iterations: int) -> float:
    start = time.perf_counter()
    list(pool.map(lambda _: probe.run_fma_chains(iterations, 0.5, 1.0), range(threads)))
    return time.perf_counter() - start


def cpu_name() -> str:
    """As Linux tells it; elsewhere what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


PAGE = 4096


def can_measure_memory(device: torch.device) -> bool:
    """Whether `extra_memory` has figures to read: on a GPU always, on the CPU under Linux."""
    return device.type == "cuda" or Path("/proc/self/clear_refs").exists()


def extra_memory(function: Function, device: torch.device) -> int:
    """Peak bytes of one call beyond its results, a page at least; on the CPU of the whole process: use a fresh one."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")
    before = _peak_memory(device)
    results = function()
    returned = sum(tensor.nbytes for tensor in (results if isinstance(results, tuple) else (results,)))
    return max(_peak_memory(device) - before - returned, PAGE)


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
