"""Runs the measurements, computes the figures, and prints them.

Systems take turns, block by block, so a disturbance hits all alike. A block's time is the median of its calls, on the
slowest rank: a root may finish before the others have its data. The figure is the median of the blocks.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median
from typing import Final, Protocol

from nexar.cli.bench import plot
from nexar.cli.bench.protocol import MEASURES, BenchOrder, BenchReply, Measure
from nexar.cli.progress_bar import Advance, advancing
from nexar.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Times in microseconds, bandwidths in 10⁹ bytes per second."""

    system: str
    time_us: float
    p10_us: float
    p99_us: float
    mean_us: float
    algbw: float
    busbw: float
    wrong: int
    calls: int


def figure(system: str, measure: Measure, count: int, itemsize: int, blocks: Sequence[Sequence[BenchReply]]) -> Figure:
    """Compute the figure from the replies, by block and rank."""
    ranks = len(blocks[0])
    messages = measure.messages(count, itemsize)
    slowest = [max((reply.nanoseconds for reply in block if reply.nanoseconds), key=median) for block in blocks]
    microseconds = sorted(time / messages / 1e3 for times in slowest for time in times)
    time_us = median(median(times) for times in slowest) / messages / 1e3
    algbw = measure.size_bytes(count, itemsize, ranks) / time_us / 1e3
    return Figure(
        system=system,
        time_us=time_us,
        p10_us=quantile(microseconds, 0.10),
        p99_us=quantile(microseconds, 0.99),
        mean_us=mean(microseconds),
        algbw=algbw,
        busbw=algbw * measure.busbw_factor(ranks),
        wrong=sum(reply.wrong for block in blocks for reply in block),
        calls=len(microseconds),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share does not exceed."""
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def iterations_for(call_seconds: float, seconds: float, least: int, most: int = 20_000) -> int:
    """Return how many calls take `seconds`, within bounds."""
    return max(least, min(most, round(seconds / max(call_seconds, 1e-9))))


_FIRST_CALLS: Final = 5
_SETTLE_SECONDS: Final = 0.05
"""Until ranks that woke up together run on cores of their own. Before, systems that spin suffer most."""


class Ranks(Protocol):
    """A system's ranks, waiting for orders."""

    def ask(self, order: BenchOrder, reply_timeout: float) -> list[BenchReply]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureOptions:
    """How to measure."""

    dtype: str
    itemsize: int
    op: str
    root: int
    algorithm: str | None
    warmups: int
    least_calls: int
    exactly: bool
    """`least_calls` is also the maximum."""
    rounds: int
    seconds: float
    reply_timeout: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """One size, all systems."""

    measure: str
    size_bytes: int
    count: int
    dtype: str
    op: str
    root: int
    figures: Mapping[str, Figure]
    problems: Mapping[str, str]
    """Why a system has no figure."""


def rows(
    systems: Mapping[str, Ranks], measure: Measure, sizes: Sequence[int], options: MeasureOptions, ranks: int
) -> Iterator[BenchRow]:
    """Yield each row once measured."""
    for count in counts(measure, sizes, options, ranks):
        yield row(systems, measure, count, options, ranks)


def counts(measure: Measure, sizes: Sequence[int], options: MeasureOptions, ranks: int) -> tuple[int, ...]:
    """Return the counts of all rows; sizes with the same count are measured once."""
    return tuple(dict.fromkeys(measure.count(size, options.itemsize, ranks) for size in sizes))


def row(systems: Mapping[str, Ranks], measure: Measure, count: int, options: MeasureOptions, ranks: int) -> BenchRow:
    """Measure each system once, to learn a call's duration; then in turns."""
    first = BenchOrder(
        measure=measure.name,
        count=count,
        dtype=options.dtype,
        op=options.op,
        root=options.root,
        algorithm=None,
        warmups=options.warmups,
        iterations=_FIRST_CALLS,
        check=True,
    )
    tried = {
        name: system.ask(_order_for(name, first, options), options.reply_timeout) for name, system in systems.items()
    }
    problems = {name: reason for name, replies in tried.items() if (reason := _problem(replies))}
    able = [name for name in systems if name not in problems]
    orders = {name: _block(_order_for(name, first, options), tried[name], options) for name in able}
    blocks: dict[str, list[list[BenchReply]]] = {name: [] for name in able}
    for number in range(options.rounds):
        for name in able[number % len(able) :] + able[: number % len(able)] if able else ():
            order = replace(orders[name], check=number == options.rounds - 1)
            blocks[name].append(systems[name].ask(order, options.reply_timeout))
    return BenchRow(
        measure=measure.name,
        size_bytes=measure.size_bytes(count, options.itemsize, ranks),
        count=count,
        dtype=options.dtype if measure.sized else "",
        op=options.op if measure.reduces else "",
        root=options.root if measure.rooted else -1,
        figures={
            name: _with_wrong(figure(name, measure, count, options.itemsize, blocks[name]), tried[name])
            for name in able
        },
        problems=problems,
    )


def _order_for(name: str, order: BenchOrder, options: MeasureOptions) -> BenchOrder:
    return replace(order, algorithm=options.algorithm) if name == "nexar" else order


def _block(first: BenchOrder, tried: Sequence[BenchReply], options: MeasureOptions) -> BenchOrder:
    seconds = max(median(reply.nanoseconds) for reply in tried if reply.nanoseconds) / 1e9
    if options.exactly:
        return replace(first, iterations=-(-options.least_calls // options.rounds))
    return replace(
        first,
        iterations=-(-iterations_for(seconds, options.seconds, options.least_calls) // options.rounds),
        warmups=iterations_for(seconds, _SETTLE_SECONDS, options.warmups),
    )


def _with_wrong(found: Figure, tried: Sequence[BenchReply]) -> Figure:
    return replace(found, wrong=found.wrong + sum(reply.wrong for reply in tried))


def _problem(replies: Sequence[BenchReply]) -> str:
    return next((reply.problem for reply in replies if reply.problem), "")


NEXAR = "nexar"
_COLUMNS = (("size", 12), ("count", 12), ("type", 9), ("redop", 6), ("root", 5))
_FIGURES = (("time", 10), ("algbw", 8), ("busbw", 8), ("#wrong", 7))
_OTHER_COLUMNS = (("time", 10), ("busbw", 8), ("ratio", 7))


def table_head(measure: str, others: Sequence[str]) -> str:
    """The lines above a table."""
    names = _line(_COLUMNS, [name for name, _ in _COLUMNS]) + _line(_FIGURES, [name for name, _ in _FIGURES])
    units = _line(_COLUMNS, ["(B)", "(elements)", "", "", ""]) + _line(_FIGURES, ["(us)", "(GB/s)", "(GB/s)", ""])
    above = " " * len(_line(_COLUMNS, [""] * len(_COLUMNS))) + _titled(NEXAR, _FIGURES)
    for other in others:
        above += " |" + _titled(other, _OTHER_COLUMNS)
        names += " |" + _line(_OTHER_COLUMNS, [name for name, _ in _OTHER_COLUMNS])
        units += " |" + _line(_OTHER_COLUMNS, ["(us)", "(GB/s)", ""])
    return "\n".join(("", f"# {measure}", *(f"#{text[1:].rstrip()}" for text in (above, names, units))))


def table_line(row: BenchRow, others: Sequence[str]) -> str:
    """One size."""
    ours = row.figures.get(NEXAR)
    facts = [str(row.size_bytes), str(row.count), row.dtype or "-", row.op or "-", str(row.root)]
    text = _line(_COLUMNS, facts) + _line(_FIGURES, _shown(ours))
    for other in others:
        theirs = row.figures.get(other)
        cells = (
            ["-", "-", "-"]
            if theirs is None
            else [_time(theirs.time_us), f"{theirs.busbw:.3f}", speed_ratio(row, other)]
        )
        text += " |" + _line(_OTHER_COLUMNS, cells)
    return text.rstrip()


def table_notes(rows: Sequence[BenchRow]) -> list[str]:
    """Return notes on unsupported orders and wrong results."""
    problems = {f"# {row.measure}: {name}: {why}" for row in rows for name, why in row.problems.items()}
    wrong = {
        f"# {row.measure} of {row.size_bytes} B: {found.wrong} elements of {found.system} are wrong"
        for row in rows
        for found in row.figures.values()
        if found.wrong
    }
    return sorted(problems) + sorted(wrong)


def speed_ratio(row: BenchRow, other: str) -> str:
    """Return how many times faster nexar is."""
    ours, theirs = row.figures.get(NEXAR), row.figures.get(other)
    return "-" if ours is None or theirs is None else f"{theirs.time_us / ours.time_us:.2f}"


def results_json(facts: Mapping[str, object], rows: Sequence[BenchRow]) -> str:
    """Return all rows and `facts`."""
    return json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=1)


def _shown(found: Figure | None) -> list[str]:
    if found is None:
        return ["-", "-", "-", "-"]
    return [_time(found.time_us), f"{found.algbw:.3f}", f"{found.busbw:.3f}", str(found.wrong)]


def _time(microseconds: float) -> str:
    return f"{microseconds:.2f}" if microseconds < 1000 else f"{microseconds:.0f}"


def _line(columns: Sequence[tuple[str, int]], cells: Sequence[str]) -> str:
    return "".join(f" {cell:>{width}}" for (_, width), cell in zip(columns, cells, strict=True))


def _titled(name: str, columns: Sequence[tuple[str, int]]) -> str:
    return name.center(sum(width + 1 for _, width in columns))


_PLOT_TIMEOUT = 120.0


def plot_interpreter(peers: Path) -> str:
    """Raises UsageError if no interpreter has matplotlib."""
    if importlib.util.find_spec("matplotlib") is not None:
        return sys.executable
    python = peers / "gloo" / "bin" / "python"
    if not python.exists():
        raise UsageError("--plot needs matplotlib: pip install matplotlib, or `make bench-peers`, which brings it")
    return str(python)


def draw_plot(python: str, results: str, path: Path) -> None:
    """The file's suffix selects the format. Raises UsageError."""
    program = [python, str(plot.__file__), str(path)]
    done = subprocess.run(program, input=results, capture_output=True, text=True, check=False, timeout=_PLOT_TIMEOUT)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UsageError(f"--plot {path} was not drawn: {last}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """Checked options."""

    measures: tuple[str, ...]
    sizes: tuple[int, ...]
    options: MeasureOptions
    as_json: bool
    plot: Path | None
    plot_python: str | None
    """The interpreter that draws the plot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemInfo:
    """A system that takes part."""

    name: str
    version: str
    flags: str


class BenchReport:
    """Measures and prints one run."""

    def __init__(self, request: BenchRequest, *, ranks: int, where: str, systems: list[SystemInfo]) -> None:
        self._request = request
        self._ranks = ranks
        self._where = where
        self._systems = systems
        self._others = [system.name for system in systems if system.name != NEXAR]

    def measure(self, systems: Mapping[str, Ranks]) -> bool:
        """Return whether all results of nexar were right."""
        self._print(*(f"# {line}" for line in self._introduction()))
        with advancing("measuring", self._row_count()) as advance:
            found = list(self._measured(systems, advance))
        if self._request.as_json:
            print(results_json(self._facts(), found))
        if self._request.plot is not None and self._request.plot_python is not None:
            draw_plot(self._request.plot_python, results_json(self._facts(), found), self._request.plot)
        return not any(row.figures[NEXAR].wrong for row in found if NEXAR in row.figures)

    def _row_count(self) -> int:
        request = self._request
        measures = [MEASURES[name] for name in request.measures]
        return sum(len(counts(each, request.sizes, request.options, self._ranks)) for each in measures)

    def _measured(self, systems: Mapping[str, Ranks], advance: Advance) -> Iterator[BenchRow]:
        request = self._request
        for name in request.measures:
            self._print(table_head(name, self._others))
            shown = []
            for row in rows(systems, MEASURES[name], request.sizes, request.options, self._ranks):
                shown.append(row)
                self._print(table_line(row, self._others))
                advance(name)
                yield row
            self._print(*table_notes(shown))

    def _print(self, *lines: str) -> None:
        if not self._request.as_json:
            for line in lines:
                print(line, flush=True)

    def _introduction(self) -> list[str]:
        lines = [f"{self._ranks} ranks on {self._where}; {machine()}"]
        lines += [f"{each.name}: {each.version}; flags: {each.flags}" for each in self._systems]
        lines.append("time: median of calls, on the slowest rank; systems take turns")
        if self._others:
            lines.append("ratio: ours to theirs, of busbw; above 1, nexar is faster")
        return lines

    def _facts(self) -> dict[str, object]:
        return {
            "title": self._introduction()[0],
            "machine": machine(),
            "numpy": version("numpy"),
            "ranks": self._ranks,
            "where": self._where,
            "systems": [{"name": each.name, "version": each.version, "flags": each.flags} for each in self._systems],
        }


def machine() -> str:
    """Describes this machine."""
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    return f"{_processor()}, {os.cpu_count()} cores, {system}"


def _processor() -> str:
    facts = Path("/proc/cpuinfo")
    models = facts.read_text().splitlines() if facts.exists() else []
    named = [line.partition(":")[2].strip() for line in models if line.startswith("model name")]
    return named[0] if named else platform.machine()
