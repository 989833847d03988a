"""Shows a run while it goes on, and all of it at its end: a table, JSON, a picture."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from nexar.cli.bench import page
from nexar.cli.bench.comparison import Ranks, Row, Wishes, counts, rows
from nexar.cli.bench.drawing import draw
from nexar.cli.bench.measures import MEASURES
from nexar.cli.progress import Advance, advancing


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be measured and how it is to be shown, checked."""

    measures: tuple[str, ...]
    sizes: tuple[int, ...]
    wishes: Wishes
    as_json: bool
    plot: Path | None
    artist: str | None
    """The interpreter that draws the plot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """A system that takes part."""

    name: str
    version: str
    flags: str


class Report:
    """Of one run, with these systems in this world."""

    def __init__(self, request: Request, *, ranks: int, where: str, systems: list[About]) -> None:
        self._request = request
        self._ranks = ranks
        self._where = where
        self._systems = systems
        self._rivals = [system.name for system in systems if system.name != page.OURS]

    def measure(self, systems: Mapping[str, Ranks]) -> bool:
        """Measure and show everything. Whether all results of nexar were right."""
        self._print(*(f"# {line}" for line in self._introduction()))
        with advancing("measuring", self._row_count()) as advance:
            found = list(self._measured(systems, advance))
        if self._request.as_json:
            print(page.as_json(self._facts(), found))
        if self._request.plot is not None and self._request.artist is not None:
            draw(self._request.artist, page.as_json(self._facts(), found), self._request.plot)
        return not any(row.figures[page.OURS].wrong for row in found if page.OURS in row.figures)

    def _row_count(self) -> int:
        request = self._request
        measures = [MEASURES[name] for name in request.measures]
        return sum(len(counts(each, request.sizes, request.wishes, self._ranks)) for each in measures)

    def _measured(self, systems: Mapping[str, Ranks], advance: Advance) -> Iterator[Row]:
        request = self._request
        for name in request.measures:
            self._print(page.head(name, self._rivals))
            shown = []
            for row in rows(systems, MEASURES[name], request.sizes, request.wishes, self._ranks):
                shown.append(row)
                self._print(page.line(row, self._rivals))
                advance(name)
                yield row
            self._print(*page.notes(shown))

    def _print(self, *lines: str) -> None:
        if not self._request.as_json:
            for line in lines:
                print(line, flush=True)

    def _introduction(self) -> list[str]:
        lines = [f"{self._ranks} ranks on {self._where}; {machine()}"]
        lines += [f"{each.name}: {each.version}; flags: {each.flags}" for each in self._systems]
        lines.append("time: median of calls, on the slowest rank; systems take turns")
        if self._rivals:
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
    """This one, in a few words."""
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    return f"{_processor()}, {os.cpu_count()} cores, {system}"


def _processor() -> str:
    facts = Path("/proc/cpuinfo")
    models = facts.read_text().splitlines() if facts.exists() else []
    named = [line.partition(":")[2].strip() for line in models if line.startswith("model name")]
    return named[0] if named else platform.machine()
