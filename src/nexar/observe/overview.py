"""What a board says to people: one line for each rank, with rates, and who keeps the others waiting. Pure.

A rate is the difference between the last two bulletins of a node, which come a second apart. So it does not depend on
who looks, or how often.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

from nexar.types import NodeId, Rank, format_node
from nexar.wire.bulletin import Board, Bulletin, Row, State

_SHARE: Final = 0.4  # of all lateness: who has more of it is the straggler
_LATE: Final = 0.001  # seconds: below that nobody is


@dataclass(frozen=True, slots=True)
class Line:
    """One rank, or who had one."""

    rank: Rank
    former: bool
    """It is no member any more: this was its rank."""
    state: State
    cause: str
    """Why it is gone."""
    node: str
    host: str
    """Its name, or its id where the name is not known."""
    pid: int
    epoch: int
    operation: str
    """What it is in: `all_reduce #12`; empty: its own code."""
    seconds: float
    """It has been in that for so long."""
    waiting_for: tuple[Rank, ...]
    awaited_by: int
    """So many others wait for it."""
    finished: str
    calls: int
    call_bytes: int
    seconds_waiting: float
    errors: int
    bytes_sent: int
    bytes_received: int
    calls_rate: float
    call_bytes_rate: float
    """Of the arrays of collectives."""
    sent_rate: float
    """Bytes per second, through links."""
    received_rate: float
    carriers: dict[str, tuple[Rank, ...]]
    """Which peers are connected by what: `shm` → ranks."""
    lateness: float
    """Seconds: how late it comes to collectives, in the mean of what the others saw."""
    share: float
    """Of all lateness."""
    heard: float | None
    """Seconds since it last told of itself."""
    gone: float | None
    """Seconds since it is gone."""


@dataclass(frozen=True, slots=True)
class Overview:
    """All of it."""

    cluster: str
    epoch: int
    """0: it has not formed."""
    size: int
    joined: int
    lines: tuple[Line, ...]
    straggler: Rank | None
    """Who keeps the others waiting, if somebody does."""

    @property
    def title(self) -> str:
        """`3 of 4 members, epoch 2`."""
        if not self.epoch:
            return f"forming: {self.joined} of {self.size} members have come"
        return f"{self.joined} of {self.size} members are here, epoch {self.epoch}"

    def facts(self) -> dict[str, Any]:
        """For programs."""
        return {
            "cluster": self.cluster,
            "epoch": self.epoch,
            "size": self.size,
            "joined": self.joined,
            "title": self.title,
            "straggler": self.straggler,
            "ranks": [asdict(each) for each in self.lines],
        }


class _Reading(NamedTuple):
    """A bulletin, and when it was heard."""

    bulletin: Bulletin
    when: float


class Overseer:
    """Remembers what it saw before, for the rates. One thread at a time."""

    def __init__(self) -> None:
        self._last: dict[NodeId, tuple[_Reading | None, _Reading]] = {}  # the two newest of each

    def see(self, board: Board, now: float) -> Overview:
        """A board, looked at now (any clock that runs evenly)."""
        self._last = {row.node: found for row in board.rows if (found := self._read(row, now)) is not None}
        awaited = Counter(rank for row in board.rows if not _is_gone(row) for rank in _awaited(row))
        late = _lateness(row.bulletin for row in board.rows if row.bulletin is not None and not _is_gone(row))
        lines = tuple(self._line(row, 0 if _is_gone(row) else awaited[row.rank], late) for row in board.rows)
        return Overview(board.cluster, board.epoch, board.size, board.joined, lines, _straggler(late))

    def _read(self, row: Row, now: float) -> tuple[_Reading | None, _Reading] | None:
        if row.bulletin is None or row.heard is None:
            return None
        before = self._last.get(row.node)
        if before is not None and before[1].bulletin == row.bulletin:
            return before
        return (None if before is None else before[1]), _Reading(row.bulletin, now - row.heard)

    def _line(self, row: Row, awaited_by: int, late: dict[Rank, tuple[float, float]]) -> Line:
        bulletin = row.bulletin or Bulletin(row.rank, 0)
        gone = _is_gone(row)
        lateness, share = (0.0, 0.0) if gone else late.get(row.rank, (0.0, 0.0))
        in_call = bool(bulletin.operation) and not gone
        return Line(
            rank=row.rank,
            former=row.former,
            state=row.state,
            cause=row.cause,
            node=format_node(row.node),
            host=bulletin.host or row.host,
            pid=bulletin.pid,
            epoch=bulletin.epoch,
            operation=bulletin.operation if in_call else "",
            seconds=_seconds(row) if in_call else 0.0,
            waiting_for=bulletin.waiting_for if in_call else (),
            awaited_by=awaited_by,
            finished=bulletin.finished,
            calls=bulletin.calls,
            call_bytes=bulletin.call_bytes,
            seconds_waiting=bulletin.seconds_waiting,
            errors=bulletin.errors,
            bytes_sent=bulletin.bytes_sent,
            bytes_received=bulletin.bytes_received,
            calls_rate=self._rate(row, "calls"),
            call_bytes_rate=self._rate(row, "call_bytes"),
            sent_rate=self._rate(row, "bytes_sent"),
            received_rate=self._rate(row, "bytes_received"),
            carriers=_carriers(bulletin),
            lateness=lateness,
            share=share,
            heard=row.heard,
            gone=row.gone,
        )

    def _rate(self, row: Row, name: str) -> float:
        """0 where it is not known, and after the counters began anew."""
        before, last = self._last.get(row.node, (None, None))
        if before is None or last is None or _is_gone(row) or row.state == "stuck" or last.when <= before.when:
            return 0.0
        return float(max(0, getattr(last.bulletin, name) - getattr(before.bulletin, name)) / (last.when - before.when))


def _seconds(row: Row) -> float:
    """In its call. Of one that goes on it is what the bulletin said: by now it is in another."""
    if row.bulletin is None:
        return 0.0
    return row.bulletin.began if row.state == "running" else row.bulletin.began + (row.heard or 0.0)


def _is_gone(row: Row) -> bool:
    return row.state in ("lost", "left")


def _awaited(row: Row) -> tuple[Rank, ...]:
    return () if row.bulletin is None else row.bulletin.waiting_for


def _carriers(bulletin: Bulletin) -> dict[str, tuple[Rank, ...]]:
    found: dict[str, tuple[Rank, ...]] = {}
    for peer in bulletin.peers:
        if peer.carriers:
            found[peer.carriers] = (*found.get(peer.carriers, ()), peer.rank)
    return found


def _lateness(bulletins: Iterable[Bulletin]) -> dict[Rank, tuple[float, float]]:
    """By rank: how late it came and its share of all lateness, in the mean over those who tell of it."""
    seen: dict[Rank, list[tuple[float, float]]] = {}
    for bulletin in bulletins:
        for each in bulletin.late:
            seen.setdefault(each.rank, []).append((each.mean, each.share))
    return {
        rank: (sum(mean for mean, _ in each) / len(each), sum(share for _, share in each) / len(each))
        for rank, each in seen.items()
    }


def _straggler(late: dict[Rank, tuple[float, float]]) -> Rank | None:
    worst = max(late, key=lambda rank: late[rank][1], default=None)
    if worst is None or late[worst][0] < _LATE or late[worst][1] < _SHARE:
        return None
    return worst
