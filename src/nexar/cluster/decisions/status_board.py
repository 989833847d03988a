"""The seed's status board: every member's last report, and which members are gone and why. Pure.

Invariant: a member is *lost* from the moment its session breaks or its launcher reports its end until it returns. The
seed's knowledge overrides reports.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass
from typing import Final

from nexar.cluster.membership import Membership
from nexar.types import NodeId, Rank
from nexar.wire.status import MAX_CAUSE_CHARACTERS, ROWS_PER_PAGE, State, StatusPage, StatusReport, StatusRow
from nexar.wire.text import line

# Seconds without a report after which a connected member counts as stuck: three reports are missing.
SILENT: Final = 3.5
PATIENT: Final = 2.0  # seconds without a step after which a call counts as waiting
_ERROR: Final = re.compile(r"[A-Za-z_][\w.]*: ")
KEPT: Final = 256  # former members kept, the newest


@dataclass(slots=True)
class _BoardRow:
    node: NodeId
    rank: Rank
    host: str
    since: float  # last sign of life
    report: StatusReport | None = None
    gone: float | None = None
    left: bool = False
    cause: str = ""
    told: bool = False  # the cause comes from its launcher, which knows best


class StatusBoard:
    """Not thread-safe."""

    def __init__(self, cluster: str, size: int) -> None:
        self._cluster = cluster
        self._size = size
        self._epoch = 0
        self._members: dict[NodeId, _BoardRow] = {}  # members, by rank
        self._former: dict[NodeId, _BoardRow] = {}  # oldest first

    def moved(self, membership: Membership, now: float, willing: Container[NodeId] = ()) -> None:
        """`willing`: members that asked to leave. Idempotent."""
        if membership.epoch <= self._epoch:
            return
        before, self._members = self._members, {}
        self._epoch, self._size = membership.epoch, membership.size
        for rank, member in enumerate(membership.members):
            row = before.pop(member.node, None) or _BoardRow(member.node, rank, member.host, now)
            row.rank = rank
            self._members[member.node] = row
        for row in before.values():
            if row.gone is None:
                row.gone, row.left = now, row.node in willing
                verb = "it left" if row.left else "the others went on without it"
                row.cause = f"{verb} in epoch {membership.epoch}"
            self._former[row.node] = row
        while len(self._former) > KEPT:
            del self._former[next(iter(self._former))]

    def report_received(self, node: NodeId, report: StatusReport, now: float) -> None:
        row = self._members.get(node)
        if row is not None and row.gone is None:
            row.report, row.since = report, now

    def returned(self, node: NodeId, now: float) -> None:
        row = self._members.get(node)
        if row is not None:
            row.gone, row.left, row.cause, row.told, row.since = None, False, "", False, now

    def went(self, node: NodeId, cause: str, now: float, *, left: bool = False, told: bool = False) -> None:
        """`left`: willingly. `told`: by its launcher."""
        row = self._members.get(node) or self._former.get(node)
        if row is None:
            return
        first = row.gone is None
        if first:
            row.gone, row.left = now, left
        if first or (told and not row.told):
            row.cause, row.told = line(_main_line(cause), MAX_CAUSE_CHARACTERS), told
            row.left = row.left and not told

    def page(self, now: float, *, first: int = 0, joined: int = 0) -> StatusPage:
        """The rows from `first` on. `joined`: nodes admitted while the cluster forms."""
        gone = sorted(self._former.values(), key=lambda row: -(row.gone or 0.0))
        rows = [*self._members.values(), *gone]
        here = sum(row.gone is None for row in self._members.values()) if self._epoch else joined
        return StatusPage(
            cluster=self._cluster,
            size=self._size,
            joined=here,
            epoch=self._epoch,
            rows=tuple(_row(row, now, former=row.node in self._former) for row in rows[first : first + ROWS_PER_PAGE]),
            first=first,
            total=len(rows),
        )


def _main_line(cause: str) -> str:
    # One line of the cause: of a traceback, the line that names the error and not a note below it.
    lines = cause.strip().splitlines() or [""]
    named = [each for each in lines if _ERROR.match(each)] if len(lines) > 1 else []
    return (named or lines)[-1]


def _row(row: _BoardRow, now: float, *, former: bool) -> StatusRow:
    return StatusRow(
        node=row.node,
        rank=row.rank,
        state=_state(row, now),
        host=row.host,
        former=former,
        cause=row.cause,
        gone=None if row.gone is None else now - row.gone,
        heard=None if row.report is None else now - row.since,
        bulletin=row.report,
    )


def _state(row: _BoardRow, now: float) -> State:
    if row.gone is not None:
        return "left" if row.left else "lost"
    age, report = now - row.since, row.report
    if age > SILENT:
        return "stuck"
    if report is not None and report.operation and report.moved + age > PATIENT:
        return "waiting"
    return "running"
