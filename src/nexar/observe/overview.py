"""What a board says to people: one line for each rank, with rates, and who keeps the others waiting. Pure.

A rate is the difference between the last two bulletins of a node, which come a second apart. So it does not depend on
who looks, or how often.

What a line of an overview says in words: the same in a terminal and on the page. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from nexar.types import NodeId, Rank, format_node, format_seconds
from nexar.wire.status import State, StatusPage, StatusReport, StatusRow

_SHARE: Final = 0.4  # of all lateness: who has more of it is the straggler
_LATE: Final = 0.001  # seconds: below that nobody is


@dataclass(frozen=True, slots=True)
class RankLine:
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
    lines: tuple[RankLine, ...]
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

    bulletin: StatusReport
    when: float


class OverviewBuilder:
    """Remembers what it saw before, for the rates. One thread at a time."""

    def __init__(self) -> None:
        self._last: dict[NodeId, tuple[_Reading | None, _Reading]] = {}  # the two newest of each

    def see(self, board: StatusPage, now: float) -> Overview:
        """A board, looked at now (any clock that runs evenly)."""
        self._last = {row.node: found for row in board.rows if (found := self._read(row, now)) is not None}
        awaited = Counter(rank for row in board.rows if not _is_gone(row) for rank in _awaited(row))
        late = _lateness(row.bulletin for row in board.rows if row.bulletin is not None and not _is_gone(row))
        lines = tuple(self._line(row, 0 if _is_gone(row) else awaited[row.rank], late) for row in board.rows)
        return Overview(board.cluster, board.epoch, board.size, board.joined, lines, _straggler(late))

    def _read(self, row: StatusRow, now: float) -> tuple[_Reading | None, _Reading] | None:
        if row.bulletin is None or row.heard is None:
            return None
        before = self._last.get(row.node)
        if before is not None and before[1].bulletin == row.bulletin:
            return before
        return (None if before is None else before[1]), _Reading(row.bulletin, now - row.heard)

    def _line(self, row: StatusRow, awaited_by: int, late: dict[Rank, tuple[float, float]]) -> RankLine:
        bulletin = row.bulletin or StatusReport(row.rank, 0)
        gone = _is_gone(row)
        lateness, share = (0.0, 0.0) if gone else late.get(row.rank, (0.0, 0.0))
        in_call = bool(bulletin.operation) and not gone
        return RankLine(
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
            carriers=_ranks_by_carrier(bulletin),
            lateness=lateness,
            share=share,
            heard=row.heard,
            gone=row.gone,
        )

    def _rate(self, row: StatusRow, name: str) -> float:
        """0 where it is not known, and after the counters began anew."""
        before, last = self._last.get(row.node, (None, None))
        if before is None or last is None or _is_gone(row) or row.state == "stuck" or last.when <= before.when:
            return 0.0
        return float(max(0, getattr(last.bulletin, name) - getattr(before.bulletin, name)) / (last.when - before.when))


def _seconds(row: StatusRow) -> float:
    """In its call. Of one that goes on it is what the bulletin said: by now it is in another."""
    if row.bulletin is None:
        return 0.0
    return row.bulletin.began if row.state == "running" else row.bulletin.began + (row.heard or 0.0)


def _is_gone(row: StatusRow) -> bool:
    return row.state in ("lost", "left")


def _awaited(row: StatusRow) -> tuple[Rank, ...]:
    return () if row.bulletin is None else row.bulletin.waiting_for


def _ranks_by_carrier(bulletin: StatusReport) -> dict[str, tuple[Rank, ...]]:
    found: dict[str, tuple[Rank, ...]] = {}
    for peer in bulletin.peers:
        if peer.carriers:
            found[peer.carriers] = (*found.get(peer.carriers, ()), peer.rank)
    return found


def _lateness(bulletins: Iterable[StatusReport]) -> dict[Rank, tuple[float, float]]:
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


Cells: TypeAlias = dict[str, str]
"""By heading."""
_UNITS: Final = ("B", "kB", "MB", "GB", "TB", "PB")


def format_bytes(count: float) -> str:
    """`1.5 MB`."""
    for unit in _UNITS:
        if count < 999.5 or unit == _UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.5 else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("the last unit takes all")


def cells_of(line: RankLine, *, rates: bool) -> Cells:
    """One rank, as text: by heading. `rates`: per second, else since the start."""
    out, back = (line.sent_rate, line.received_rate) if rates else (line.bytes_sent, line.bytes_received)
    reduced = line.call_bytes_rate if rates else line.call_bytes
    per = "/s" if rates else ""
    return {
        "rank": f"was {line.rank}" if line.former else str(line.rank),
        "state": line.state,
        "host": line.host,
        "pid": str(line.pid or ""),
        "doing": _doing(line),
        "waits for": ", ".join(map(str, line.waiting_for)),
        f"sent{per}": format_bytes(out),
        f"received{per}": format_bytes(back),
        f"collectives{per}": f"{line.calls_rate if rates else line.calls:.0f}, {format_bytes(reduced)}",
        "carriers": _carrier_cell(line),
        "late by": format_seconds(line.lateness) if line.lateness >= 1e-6 else "",
    }


def _doing(line: RankLine) -> str:
    if line.state in ("lost", "left"):
        ago = "" if line.gone is None else f" ({format_seconds(line.gone)} ago)"
        return f"{line.cause}{ago}"
    if line.state == "stuck" and line.heard is not None:
        return f"silent for {format_seconds(line.heard)}; last in {line.operation or 'its own code'}"
    if line.operation:
        return f"{line.operation} for {format_seconds(line.seconds)}"
    return f"its own code; last {line.finished}" if line.finished else "its own code"


def _carrier_cell(line: RankLine) -> str:
    """The ranks only where there is more than one kind."""
    if len(line.carriers) == 1:
        return next(iter(line.carriers))
    return ", ".join(f"{kind}: {_ranks(ranks)}" for kind, ranks in sorted(line.carriers.items()))


def _ranks(ranks: tuple[int, ...]) -> str:
    return ",".join(map(str, ranks)) if len(ranks) <= 4 else f"{len(ranks)} ranks"


def straggler_text(overview: Overview) -> str:
    """One sentence on who keeps the others waiting."""
    found = next((line for line in overview.lines if line.rank == overview.straggler and line.gone is None), None)
    if found is None:
        return f"rank {overview.straggler} kept the others waiting"
    return (
        f"rank {found.rank} keeps the others waiting: {format_seconds(found.lateness)} a call, "
        f"{found.share:.0%} of all lateness"
    )
