"""The status board as one line per rank, with rates, straggler and text. Pure.

Rates compare a node's last two status reports, however often the board is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from nexar.types import NodeId, Rank, format_node, format_seconds
from nexar.wire.status import State, StatusPage, StatusReport, StatusRow

_STRAGGLER_SHARE: Final = 0.4  # of all lateness: a rank with a larger share is the straggler
_MIN_LATENESS: Final = 0.001  # seconds; a smaller lateness is ignored


@dataclass(frozen=True, slots=True)
class RankLine:
    """One member or former member."""

    rank: Rank
    former: bool
    """`rank` is the one it had."""
    state: State
    cause: str
    node: str
    host: str
    """Its name, or its id."""
    pid: int
    epoch: int
    operation: str
    """For example `all_reduce #12`; empty: user code."""
    seconds: float
    """In that call."""
    waiting_for: tuple[Rank, ...]
    awaited_by: int
    """Number of ranks."""
    finished: str
    calls: int
    call_bytes: int
    seconds_waiting: float
    errors: int
    bytes_sent: int
    bytes_received: int
    calls_rate: float
    call_bytes_rate: float
    sent_rate: float
    """Bytes per second over links."""
    received_rate: float
    carriers: dict[str, tuple[Rank, ...]]
    """By carrier."""
    lateness: float
    """Seconds: the mean of what the other ranks measured."""
    share: float
    """Of all lateness."""
    heard: float | None
    """Seconds ago."""
    gone: float | None
    """Seconds ago."""


@dataclass(frozen=True, slots=True)
class Overview:
    """The board."""

    cluster: str
    epoch: int
    """0: the cluster has not formed."""
    size: int
    joined: int
    lines: tuple[RankLine, ...]
    straggler: Rank | None

    @property
    def title(self) -> str:
        if not self.epoch:
            return f"forming: {self.joined} of {self.size} members have joined"
        return f"{self.joined} of {self.size} members are present, epoch {self.epoch}"

    def facts(self) -> dict[str, Any]:
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
    report: StatusReport
    when: float


class OverviewBuilder:
    """Keeps earlier reports for the rates. Not thread-safe."""

    def __init__(self) -> None:
        self._last: dict[NodeId, tuple[_Reading | None, _Reading]] = {}  # the two newest of each node

    def see(self, board: StatusPage, now: float) -> Overview:
        """`now`: time of any monotonic clock."""
        self._last = {row.node: found for row in board.rows if (found := self._read(row, now)) is not None}
        awaited = Counter(rank for row in board.rows if not _is_gone(row) for rank in _awaited(row))
        late = _lateness(row.bulletin for row in board.rows if row.bulletin is not None and not _is_gone(row))
        lines = tuple(self._line(row, 0 if _is_gone(row) else awaited[row.rank], late) for row in board.rows)
        return Overview(board.cluster, board.epoch, board.size, board.joined, lines, _straggler(late))

    def _read(self, row: StatusRow, now: float) -> tuple[_Reading | None, _Reading] | None:
        if row.bulletin is None or row.heard is None:
            return None
        before = self._last.get(row.node)
        if before is not None and before[1].report == row.bulletin:
            return before
        return (None if before is None else before[1]), _Reading(row.bulletin, now - row.heard)

    def _line(self, row: StatusRow, awaited_by: int, late: dict[Rank, tuple[float, float]]) -> RankLine:
        report = row.bulletin or StatusReport(row.rank, 0)
        gone = _is_gone(row)
        lateness, share = (0.0, 0.0) if gone else late.get(row.rank, (0.0, 0.0))
        in_call = bool(report.operation) and not gone
        return RankLine(
            rank=row.rank,
            former=row.former,
            state=row.state,
            cause=row.cause,
            node=format_node(row.node),
            host=report.host or row.host,
            pid=report.pid,
            epoch=report.epoch,
            operation=report.operation if in_call else "",
            seconds=_seconds(row) if in_call else 0.0,
            waiting_for=report.waiting_for if in_call else (),
            awaited_by=awaited_by,
            finished=report.finished,
            calls=report.calls,
            call_bytes=report.call_bytes,
            seconds_waiting=report.seconds_waiting,
            errors=report.errors,
            bytes_sent=report.bytes_sent,
            bytes_received=report.bytes_received,
            calls_rate=self._rate(row, "calls"),
            call_bytes_rate=self._rate(row, "call_bytes"),
            sent_rate=self._rate(row, "bytes_sent"),
            received_rate=self._rate(row, "bytes_received"),
            carriers=_ranks_by_carrier(report),
            lateness=lateness,
            share=share,
            heard=row.heard,
            gone=row.gone,
        )

    def _rate(self, row: StatusRow, name: str) -> float:
        """0 if it is unknown or the counters restarted."""
        before, last = self._last.get(row.node, (None, None))
        if before is None or last is None or _is_gone(row) or row.state == "stuck" or last.when <= before.when:
            return 0.0
        return float(max(0, getattr(last.report, name) - getattr(before.report, name)) / (last.when - before.when))


def _seconds(row: StatusRow) -> float:
    """Running rank: the reported time, as it may be in another call by now."""
    if row.bulletin is None:
        return 0.0
    return row.bulletin.began if row.state == "running" else row.bulletin.began + (row.heard or 0.0)


def _is_gone(row: StatusRow) -> bool:
    return row.state in ("lost", "left")


def _awaited(row: StatusRow) -> tuple[Rank, ...]:
    return () if row.bulletin is None else row.bulletin.waiting_for


def _ranks_by_carrier(report: StatusReport) -> dict[str, tuple[Rank, ...]]:
    found: dict[str, tuple[Rank, ...]] = {}
    for peer in report.peers:
        if peer.carriers:
            found[peer.carriers] = (*found.get(peer.carriers, ()), peer.rank)
    return found


def _lateness(reports: Iterable[StatusReport]) -> dict[Rank, tuple[float, float]]:
    """Rank → (mean lateness, share), averaged over the ranks that report it."""
    seen: dict[Rank, list[tuple[float, float]]] = {}
    for report in reports:
        for each in report.late:
            seen.setdefault(each.rank, []).append((each.mean, each.share))
    return {
        rank: (sum(mean for mean, _ in each) / len(each), sum(share for _, share in each) / len(each))
        for rank, each in seen.items()
    }


def _straggler(late: dict[Rank, tuple[float, float]]) -> Rank | None:
    worst = max(late, key=lambda rank: late[rank][1], default=None)
    if worst is None or late[worst][0] < _MIN_LATENESS or late[worst][1] < _STRAGGLER_SHARE:
        return None
    return worst


Cells: TypeAlias = dict[str, str]
"""Text by heading."""
_UNITS: Final = ("B", "kB", "MB", "GB", "TB", "PB")


def format_bytes(count: float) -> str:
    """Example: `1.5 MB`."""
    for unit in _UNITS:
        if count < 999.5 or unit == _UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.5 else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("the last unit takes all")


def cells_of(line: RankLine, *, rates: bool) -> Cells:
    """By heading. `rates`: per second, else totals."""
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
    if len(line.carriers) == 1:
        return next(iter(line.carriers))
    return ", ".join(f"{kind}: {_ranks(ranks)}" for kind, ranks in sorted(line.carriers.items()))


def _ranks(ranks: tuple[int, ...]) -> str:
    return ",".join(map(str, ranks)) if len(ranks) <= 4 else f"{len(ranks)} ranks"


def straggler_text(overview: Overview) -> str:
    """One sentence about the straggler."""
    found = next((line for line in overview.lines if line.rank == overview.straggler and line.gone is None), None)
    if found is None:
        return f"rank {overview.straggler} kept the others waiting"
    return (
        f"rank {found.rank} keeps the others waiting: {format_seconds(found.lateness)} a call, "
        f"{found.share:.0%} of all lateness"
    )
