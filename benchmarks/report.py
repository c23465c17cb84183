"""What a run found: a table, a JSON file, a plot, and the comparison with an earlier run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from .harness import OURS, Bar, Result

PICTURE_COLOURS = ("#1f77b4", "#bbbbbb", "#888888", "#ffbb78")
BAR_COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c")


def groups(results: Sequence[Result]) -> list[tuple[str, list[Result]]]:
    """The results by group, in the order in which they were measured."""
    return [(group, list(rows)) for group, rows in groupby(results, key=lambda row: row.group)]


def header(row: Result, width: int) -> str:
    """The two lines above a group's rows, of which `row` is one; names take `width` columns."""
    peers = " ".join(f"{peer:>24}" for peer in row.peers)
    return f"{row.group}\n  {'':{width}} {OURS:>14} {'limit':>6} {peers}"


def line(row: Result, width: int) -> str:
    """Ours, its share of the machine's limit, each peer with the ratio of ours to it."""
    share = f"{row.limit / row.figures[OURS]:6.0%}" if row.limit else " " * 6
    peers = " ".join(f"{_figure(row.figures[peer], row.unit):>14} ({row.ratio(peer):5.2f} x)" for peer in row.peers)
    noisy = "  noisy" if row.noisy else ""
    return f"  {row.name:{width}} {_figure(row.figures[OURS], row.unit):>14} {share} {peers}{noisy}"


def _figure(value: float, unit: str) -> str:
    if unit == "ms" and value < 0.1:
        return f"{value * 1e3:.2f} us"
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def summary_table(results: Sequence[Result], bars: Sequence[Bar]) -> str:
    """For each group and peer the geometric mean and the worst of ours / peer, and whether its bar is met."""
    wanted = {(bar.group, bar.peer): bar for bar in bars}
    width = max(len(row.group) for row in results)
    lines = [f"{'ours / peer':{width + 20}} {'geometric mean':>16} {'worst':>8}"]
    for group, rows in groups(results):
        for peer in rows[0].peers:
            ratios = [row.ratio(peer) for row in rows]
            means = f"{statistics.geometric_mean(ratios):14.3f} x {max(ratios):6.3f} x"
            lines.append(f"{group:{width}} {peer:19} {means}  {_verdict(wanted.get((group, peer)), results)}".rstrip())
        if verdict := _verdict(wanted.get((group, None)), results):
            lines.append(f"{group:{width}} {'':38}  {verdict}")
        if all(row.limit for row in rows):
            share = statistics.geometric_mean([row.limit / row.figures[OURS] for row in rows if row.limit])
            lines.append(f"{group:{width}} {'share of the limit':19} {share:16.0%}")
    return "\n".join(lines)


def _verdict(bar: Bar | None, results: Sequence[Result]) -> str:
    measured = bar.measured(results) if bar else None
    if bar is None or measured is None:
        return ""
    what = f"{'worst' if bar.summary is max else 'mean'} <= {bar.limit:g} x" if bar.peer else f"<= {bar.limit:g}"
    return f"{what}: {'met' if measured <= bar.limit else 'NOT MET'}"


def save_json(path: Path, environment: dict[str, Any], results: Sequence[Result], bars: Sequence[Bar]) -> None:
    """Everything that was measured, for reading and for `regressions`."""
    measured_bars = [
        {"group": bar.group, "peer": bar.peer, "limit": bar.limit, "measured": measured, "met": measured <= bar.limit}
        for bar in bars
        if (measured := bar.measured(results)) is not None
    ]
    content = {"environment": environment, "results": [asdict(row) for row in results], "bars": measured_bars}
    path.write_text(json.dumps(content, indent=1) + "\n")


def load_json(path: Path) -> list[Result]:
    """The results of an earlier run."""
    return [Result(**row) for row in json.loads(path.read_text())["results"]]


def regressions(old: Sequence[Result], new: Sequence[Result], tolerance: float) -> list[str]:
    """The cases that became slower beside their first peer, which was measured in the same run as ours."""
    old_rows = {(row.group, row.name): row for row in old}
    found = []
    for row in new:
        before = old_rows.get((row.group, row.name))
        peer = next((peer for peer in row.peers if before and peer in before.figures), None)
        if before and peer and row.ratio(peer) > before.ratio(peer) * (1 + tolerance):
            found.append(
                f"{row.group}, {row.name}: {before.ratio(peer):.3f} x {peer} before, {row.ratio(peer):.3f} x now"
            )
    return found


@dataclass(frozen=True)
class Headline:
    """A group in the README's picture: the speed of each peer, ours being 1, as the geometric mean over its cases."""

    group: str
    speeds: dict[str, float]


def headlines(results: Sequence[Result], chosen: Mapping[str, Sequence[str]]) -> list[Headline]:
    """Those of the chosen groups that were measured, beside the peers that are named for each and were there."""
    found = []
    for group in chosen:
        rows = [row for row in results if row.group == group]
        peers = [peer for peer in chosen[group] if rows and all(peer in row.figures for row in rows)]
        speeds = {peer: statistics.geometric_mean([row.ratio(peer) for row in rows]) for peer in peers}
        found += [Headline(group, speeds)] if speeds else []
    return found


def peers_of(found: Sequence[Headline]) -> list[str]:
    """Every peer of any headline, once."""
    return list(dict.fromkeys(peer for line in found for peer in line.speeds))


def headline_table(found: Sequence[Headline]) -> str:
    """In Markdown: how many times the speed of each peer ours has."""
    peers = peers_of(found)
    lines = [["times the speed of", *peers], ["---"] * (1 + len(peers))]
    for line in found:
        times = [f"{1 / line.speeds[peer]:.1f} ×" if peer in line.speeds else "" for peer in peers]
        lines.append([line.group, *times])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def describe(environment: Mapping[str, Any]) -> str:
    """The machine of a run, in a line."""
    return "{processor}, {threads} threads, {kernels}, torch {torch}".format_map(environment)


def save_picture(path: Path, found: Sequence[Headline], machine: str) -> None:
    """Bars of the peers' speeds beside ours, a block of them for each headline.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib import rcParams
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rcParams["svg.hashsalt"] = "myvision"  # the same run gives the same file
    colours = dict(zip([OURS, *peers_of(found)], PICTURE_COLOURS, strict=False))
    figure = Figure(figsize=(9, 1 + sum(0.36 + 0.2 * len(line.speeds) for line in found)), layout="constrained")
    axes = figure.subplots()
    place, middles = 0.0, []
    for line in found:
        speeds = {OURS: 1.0, **line.speeds}
        places = [place + bar for bar in range(len(speeds))]
        bars = axes.barh(places, list(speeds.values()), 0.9, color=[colours[name] for name in speeds])
        axes.bar_label(bars, [f"{speed:.2f}" for speed in speeds.values()], padding=3, fontsize=8)
        middles.append(statistics.mean(places))
        place += len(speeds) + 0.7
    axes.set_yticks(middles, [line.group.replace(", ", ",\n", 1) for line in found], fontsize=9)
    axes.set_ylim(place - 0.9, -0.8)
    axes.margins(x=0.1)  # for the figures beside the bars
    axes.set_xlabel("speed, myvision's being 1: longer is faster", fontsize=9)
    axes.set_title(machine, fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
    axes.legend(handles=handles, fontsize=9, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def save_plot(path: Path, results: Sequence[Result], title: str) -> None:
    """How many times faster, or smaller, ours is than each peer, one panel a group.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.figure import Figure

    panels = groups(results)
    heights = [1.2 + len(rows) for _, rows in panels]
    figure = Figure(figsize=(11, 1 + 0.3 * sum(heights)), layout="constrained")
    all_axes = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=heights)
    for axes, (group, rows) in zip(all_axes[:, 0], panels, strict=True):
        _plot_group(axes, group, rows)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _plot_group(axes: Any, group: str, rows: Sequence[Result]) -> None:
    lines = range(len(rows))
    for colour, peer in zip(BAR_COLOURS, rows[0].peers, strict=False):
        speedups = [1 / row.ratio(peer) for row in rows]
        axes.plot(speedups, lines, "o", color=colour, label=peer)
        for x, y in zip(speedups, lines, strict=True):
            axes.annotate(
                f"{x:.2f}" if x < 9.95 else f"{x:.0f}", (x, y), (0, 5), textcoords="offset points", fontsize=7
            )
    axes.axvline(1, color="grey", linewidth=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.tick_params(labelbottom=True)
    axes.set_yticks(lines, [row.name for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.3, -0.8)
    axes.grid(axis="x", alpha=0.3)
    axes.set_title(f"{group}: times {'smaller' if rows[0].unit == 'MB' else 'faster'} than", fontsize=10, loc="left")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
