"""Who is how, as the seed sees it: the last bulletin of every member beside who is gone, and why. Pure.

Law: a member is *lost* from the moment in which its line breaks or its launcher tells of its end, until it comes back
on another line; who is no longer in the membership is gone for good. Whatever bulletins say, the seed's own word about
that stands.
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

SILENT: Final = 3.5
"""Seconds without a bulletin after which a member that is connected counts as stuck: three are missing."""
PATIENT: Final = 2.0
"""Seconds without a step after which a call counts as waiting."""
_ERROR: Final = re.compile(r"[A-Za-z_][\w.]*: ")
KEPT: Final = 256
"""Of those that are gone for good: the newest."""


@dataclass(slots=True)
class _BoardRow:
    """One member, or who was one."""

    node: NodeId
    rank: Rank
    host: str
    since: float
    """Heard of in one way or another."""
    bulletin: StatusReport | None = None
    gone: float | None = None
    left: bool = False
    cause: str = ""
    told: bool = False
    """The cause is its launcher's word, which knows best."""


class StatusBoard:
    """Of one cluster. One thread at a time."""

    def __init__(self, cluster: str, size: int) -> None:
        """`size`: how many are awaited."""
        self._cluster = cluster
        self._size = size
        self._epoch = 0
        self._places: dict[NodeId, _BoardRow] = {}  # of the membership, by rank
        self._former: dict[NodeId, _BoardRow] = {}  # the oldest first

    def moved(self, membership: Membership, now: float, willing: Container[NodeId] = ()) -> None:
        """These are the members from now on; `willing`: who left of its own will. Told again, it changes nothing."""
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

    def news(self, node: NodeId, bulletin: StatusReport, now: float) -> None:
        """A bulletin has come; of who is no member, or is gone, it means nothing."""
        place = self._places.get(node)
        if place is not None and place.gone is None:
            place.bulletin, place.since = bulletin, now

    def returned(self, node: NodeId, now: float) -> None:
        """A member is connected again."""
        place = self._places.get(node)
        if place is not None:
            place.gone, place.left, place.cause, place.told, place.since = None, False, "", False, now

    def went(self, node: NodeId, cause: str, now: float, *, left: bool = False, told: bool = False) -> None:
        """A member, or who was one until now, is gone; `left`: of its own will; `told`: by who started it."""
        place = self._places.get(node) or self._former.get(node)
        if place is None:
            return
        first = place.gone is None
        if first:
            place.gone, place.left = now, left
        if first or (told and not place.told):
            place.cause, place.told = line(_essence(cause), MAX_CAUSE_CHARACTERS), told
            place.left = place.left and not told

    def page(self, now: float, *, first: int = 0, joined: int = 0) -> StatusPage:
        """What to show, from this row on. `joined`: who has come, while the cluster forms."""
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


def _essence(cause: str) -> str:
    """One line of it: of a traceback that which names the error, and not what was noted below it."""
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
