"""Results of the transport benchmark as tables and JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from candidates import REFERENCE, SOCKETS
from conversation import ROUND_TRIP
from rich.table import Table

FOUR_RANKS = "round trip, four ranks"


class Row(NamedTuple):
    """One row of a table."""

    transport: str
    layer: str


class Question(NamedTuple):
    """One column of a table."""

    kind: str
    size: int

    @property
    def unit(self) -> str:
        return "µs" if self.kind in (ROUND_TRIP, FOUR_RANKS) else "GB/s"

    @property
    def title(self) -> str:
        kind = self.kind.removeprefix(ROUND_TRIP).removeprefix(", ")
        return f"{show_size(self.size)}\n{kind}" if kind else show_size(self.size)


class Results:
    """All samples; a figure is the median of its samples."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, Row, Question], list[dict[str, Any]]] = {}

    def add(self, place: str, row: Row, sample: dict[str, Any]) -> None:
        question = Question(sample["kind"], sample["size"])
        self._samples.setdefault((place, row, question), []).append(sample)

    def figure(self, place: str, row: Row, question: Question) -> float | None:
        """The median; None if it was not measured."""
        samples = self._samples.get((place, row, question))
        return statistics.median(sample["value"] for sample in samples) if samples else None

    def table(self, place: str, rows: Sequence[Row], questions: Sequence[Question]) -> Table:
        """In parentheses: the factor to TLS sockets."""
        table = Table(pad_edge=False)
        for heading in ("transport", "layer", "unit"):
            table.add_column(heading)
        for question in questions:
            table.add_column(question.title, justify="right")
        for row in rows:
            cells = [self._cell(place, row, question) for question in questions]
            if any(cells):
                table.add_row(*row, questions[0].unit, *cells)
        return table

    def _cell(self, place: str, row: Row, question: Question) -> str:
        figure = self.figure(place, row, question)
        if figure is None:
            return ""
        time = question.unit == "µs"
        text = f"{figure:.1f}" if time else f"{figure:.2f}"
        reference = self.figure(place, Row(REFERENCE, SOCKETS), question)
        if not reference:
            return text
        return f"{text} ({reference / figure if time else figure / reference:.2f}×)"

    def save(self, path: Path, facts: dict[str, Any]) -> None:
        """With every sample."""
        rows = [
            {"place": place, **row._asdict(), **question._asdict(), "unit": question.unit}
            | {"median": self.figure(place, row, question), "samples": samples}
            for (place, row, question), samples in self._samples.items()
        ]
        path.write_text(json.dumps({**facts, "results": rows}, indent=1) + "\n")


def show_size(size: int) -> str:
    """`8 B`, `64 KB`, `16 MB`."""
    for factor, unit in ((1 << 20, "MB"), (1 << 10, "KB")):
        if size >= factor:
            return f"{size // factor} {unit}"
    return f"{size} B"
