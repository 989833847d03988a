"""The deadline of a call has come: is somebody missing, or is it only slow? The others are asked.

Each answers at once, on the thread that drives its node, so that it does so while its user computes. Who does not is
stopped, or holds the GIL, or its machine is gone.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from nexar.collectives.entry import Entry
from nexar.links.operation import Operation
from nexar.types import AwaitedPeer, Rank, format_seconds
from nexar.wire.messages import Report

USER_CODE: Final = "user code"
"""Where a rank is that is in no call of ours."""
_LONGEST: Final = 1e9  # seconds that a rank can say it has been somewhere; a peer may write anything


class Inquiry(Operation):
    """Done when all have answered."""

    __slots__ = ("asked", "reports")

    def __init__(self, lock: threading.Lock, asked: Mapping[Rank, AwaitedPeer]) -> None:
        """`asked`: with what is known of each."""
        super().__init__(lock)
        self.asked = asked
        self.reports: dict[Rank, Report] = {}

    @property
    def name(self) -> str:
        """As errors call it."""
        return "asking the other ranks"

    def awaited(self) -> AwaitedPeer:
        """One that has not answered."""
        return next((peer for rank, peer in self.asked.items() if rank not in self.reports), AwaitedPeer())

    def cancel(self) -> None:
        """Nothing is borrowed."""

    def answer(self, rank: Rank, report: Report) -> None:
        """Under the node's lock."""
        if rank in self.asked:
            self.reports[rank] = report
            if len(self.reports) == len(self.asked):
                self.finish()


def verdict(
    entry: Entry, asked: Mapping[Rank, AwaitedPeer], reports: Mapping[Rank, Report], *, now: float, timeout: float
) -> float | tuple[AwaitedPeer, ...]:
    """Pure. A later deadline, if this rank or another has made a step of the call within the timeout; else those to
    blame. Empty: all who were asked are in it, so whoever is missing is known to somebody else.

    Coming to the call is a step of it. Being alive is none, nor having finished it.
    """
    ages = [report.progress_age for report in reports.values() if report.state == "in"]
    newest = max([entry.moved_at, *(now - age for age in ages if age >= 0)])
    if newest + timeout > now:
        return newest + timeout
    blamed = [_blame(entry.name, known, reports.get(rank)) for rank, known in asked.items()]
    return tuple(each for each in blamed if each is not None)


def _blame(call: str, known: AwaitedPeer, report: Report | None) -> AwaitedPeer | None:
    if report is None:
        return replace(known, missing=f"{call} and any answer")
    if report.state in ("in", "done"):
        return None
    missing = f"{call} (it gave it up)" if report.state == "failed" else call
    return replace(explained(known, report), missing=missing)


def explained(known: AwaitedPeer, report: Report) -> AwaitedPeer:
    """With what it has just said of itself: so it is alive, wherever it is."""
    return replace(known, last_heard=0.0, last_operation=report.finished, current_operation=_place(report))


def _place(report: Report) -> str:
    doing = report.doing or USER_CODE
    return f"{doing} for {format_seconds(report.since)}" if 0 < report.since < _LONGEST else doing
