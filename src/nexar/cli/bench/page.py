"""What `nexar bench` shows: nccl-tests' table, with a few columns for each system beside ours; JSON for programs. Pure.

The ratio is ours to theirs: of busbw, or of 1/time, which is the same. Above 1, nexar is faster.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from nexar.cli.bench.comparison import Row
from nexar.cli.bench.figures import Figure

OURS = "nexar"
_COLUMNS = (("size", 12), ("count", 12), ("type", 9), ("redop", 6), ("root", 5))
_FIGURES = (("time", 10), ("algbw", 8), ("busbw", 8), ("#wrong", 7))
_BESIDE = (("time", 10), ("busbw", 8), ("ratio", 7))


def head(measure: str, rivals: Sequence[str]) -> str:
    """The lines above a table."""
    names = _line(_COLUMNS, [name for name, _ in _COLUMNS]) + _line(_FIGURES, [name for name, _ in _FIGURES])
    units = _line(_COLUMNS, ["(B)", "(elements)", "", "", ""]) + _line(_FIGURES, ["(us)", "(GB/s)", "(GB/s)", ""])
    above = " " * len(_line(_COLUMNS, [""] * len(_COLUMNS))) + _titled(OURS, _FIGURES)
    for rival in rivals:
        above += " |" + _titled(rival, _BESIDE)
        names += " |" + _line(_BESIDE, [name for name, _ in _BESIDE])
        units += " |" + _line(_BESIDE, ["(us)", "(GB/s)", ""])
    return "\n".join(("", f"# {measure}", *(f"#{text[1:].rstrip()}" for text in (above, names, units))))


def line(row: Row, rivals: Sequence[str]) -> str:
    """One size."""
    ours = row.figures.get(OURS)
    facts = [str(row.size_bytes), str(row.count), row.dtype or "-", row.op or "-", str(row.root)]
    text = _line(_COLUMNS, facts) + _line(_FIGURES, _shown(ours))
    for rival in rivals:
        theirs = row.figures.get(rival)
        cells = ["-", "-", "-"] if theirs is None else [_time(theirs.time_us), f"{theirs.busbw:.3f}", ratio(row, rival)]
        text += " |" + _line(_BESIDE, cells)
    return text.rstrip()


def notes(rows: Sequence[Row]) -> list[str]:
    """What the table could not say: who could not do what, and whose results were wrong."""
    problems = {f"# {row.measure}: {name}: {why}" for row in rows for name, why in row.problems.items()}
    wrong = {
        f"# {row.measure} of {row.size_bytes} B: {found.wrong} elements of {found.system} are wrong"
        for row in rows
        for found in row.figures.values()
        if found.wrong
    }
    return sorted(problems) + sorted(wrong)


def ratio(row: Row, rival: str) -> str:
    """How many times faster ours is."""
    ours, theirs = row.figures.get(OURS), row.figures.get(rival)
    return "-" if ours is None or theirs is None else f"{theirs.time_us / ours.time_us:.2f}"


def as_json(facts: Mapping[str, object], rows: Sequence[Row]) -> str:
    """Everything."""
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
