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
    bulletin: StatusReport | None = None
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
        self._places: dict[NodeId, _BoardRow] = {}  # members, by rank
        self._former: dict[NodeId, _BoardRow] = {}  # oldest first

    def moved(self, membership: Membership, now: float, willing: Container[NodeId] = ()) -> None:
        """`willing`: members that asked to leave. Idempotent."""
        if membership.epoch <= self._epoch:
            return
        before, self._places = self._places, {}
        self._epoch, self._size = membership.epoch, membership.size
        for rank, member in enumerate(membership.members):
            place = before.pop(member.node, None) or _BoardRow(member.node, rank, member.host, now)
            place.rank = rank
            self._places[member.node] = place
        for place in before.values():
            if place.gone is None:
                place.gone, place.left = now, place.node in willing
                verb = "it left" if place.left else "the others went on without it"
                place.cause = f"{verb} in epoch {membership.epoch}"
            self._former[place.node] = place
        while len(self._former) > KEPT:
            del self._former[next(iter(self._former))]

    def report_received(self, node: NodeId, bulletin: StatusReport, now: float) -> None:
        place = self._places.get(node)
        if place is not None and place.gone is None:
            place.bulletin, place.since = bulletin, now

    def returned(self, node: NodeId, now: float) -> None:
        place = self._places.get(node)
        if place is not None:
            place.gone, place.left, place.cause, place.told, place.since = None, False, "", False, now

    def went(self, node: NodeId, cause: str, now: float, *, left: bool = False, told: bool = False) -> None:
        """`left`: willingly. `told`: by its launcher."""
        place = self._places.get(node) or self._former.get(node)
        if place is None:
            return
        first = place.gone is None
        if first:
            place.gone, place.left = now, left
        if first or (told and not place.told):
            place.cause, place.told = line(_main_line(cause), MAX_CAUSE_CHARACTERS), told
            place.left = place.left and not told

    def page(self, now: float, *, first: int = 0, joined: int = 0) -> StatusPage:
        """The rows from `first` on. `joined`: nodes admitted while the cluster forms."""
        gone = sorted(self._former.values(), key=lambda place: -(place.gone or 0.0))
        places = [*self._places.values(), *gone]
        here = sum(place.gone is None for place in self._places.values()) if self._epoch else joined
        return StatusPage(
            cluster=self._cluster,
            size=self._size,
            joined=here,
            epoch=self._epoch,
            rows=tuple(
                _row(place, now, former=place.node in self._former) for place in places[first : first + ROWS_PER_PAGE]
            ),
            first=first,
            total=len(places),
        )


def _main_line(cause: str) -> str:
    # One line of the cause: of a traceback, the line that names the error and not a note below it.
    lines = cause.strip().splitlines() or [""]
    named = [each for each in lines if _ERROR.match(each)] if len(lines) > 1 else []
    return (named or lines)[-1]


def _row(place: _BoardRow, now: float, *, former: bool) -> StatusRow:
    return StatusRow(
        node=place.node,
        rank=place.rank,
        state=_state(place, now),
        host=place.host,
        former=former,
        cause=place.cause,
        gone=None if place.gone is None else now - place.gone,
        heard=None if place.bulletin is None else now - place.since,
        bulletin=place.bulletin,
    )


def _state(place: _BoardRow, now: float) -> State:
    if place.gone is not None:
        return "left" if place.left else "lost"
    age, bulletin = now - place.since, place.bulletin
    if age > SILENT:
        return "stuck"
    if bulletin is not None and bulletin.operation and bulletin.moved + age > PATIENT:
        return "waiting"
    return "running"
