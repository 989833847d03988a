"""The clocks of several hosts, brought together by what their ranks did. Pure.

Ranks of one host share a clock; those of two hosts have clocks that began at different moments, and run apart by some
millionths. But where every rank needs something of every other, nobody ends before all have begun. So for ranks a and b
of hosts A and B in such a call, with d as what B's clock is ahead then:

    begin(b) - d ≤ end(a)    and    begin(a) ≤ end(b) - d    hence    begin(b) - end(a) ≤ d ≤ end(b) - begin(a)

So each call gives a floor and a ceiling to d, and the line over time that leaves most room to both kinds is in the
middle of what is possible. Where the clocks did not run evenly no line fits: then the run is halved, and each half has
one of its own. Before the first such call and after the last, d is what it was then. Where two hosts had no such call
in common, the clocks on their walls must do.

All is taken for the moment in which b ends. That is right for the ceiling; and the floor is low where b stayed long, by
so much more than what clocks run apart meanwhile.

From the parts of all ranks to one trace, for ui.perfetto.dev and chrome://tracing. Pure.

A node is a process of the trace, a communicator one of its threads, a call a slice. Each call says when every rank came
to it; where that made others wait, the wait is a slice inside theirs, and an arrow leads from who came last to them.

Ranks are told as the world has them, also in other communicators: a node is called as its process is.

Parts of a trace in a directory, and the trace they make in a file.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, TypeAlias

from nexar.cluster.membership import WORLD
from nexar.collectives.fingerprint import Fingerprint, OperationCode, operation_name
from nexar.collectives.trace_writer import SUFFIX, Called, TracePart, decode_trace_part
from nexar.errors import UsageError
from nexar.observe.rank_files import WorldNode, read_rank_files, world_ranks
from nexar.security.storage import private_file
from nexar.types import NodeId, Rank

MAX_SPREAD: Final = frozenset(
    {
        OperationCode.BARRIER,
        OperationCode.ALL_REDUCE,
        OperationCode.ALL_GATHER,
        OperationCode.ALL_GATHER_V,
        OperationCode.ALL_TO_ALL,
        OperationCode.ALL_GATHER_OBJECT,
    }
)
"""Collectives in which nobody ends before all have begun."""
STEEPEST: Final = 1e-3
"""Seconds that two clocks run apart in one: more than crystals do, and than daemons slew."""
_EVEN: Final = 1e-6  # seconds by which a line may miss what is possible: clocks are read one after the other

Key: TypeAlias = tuple[int, int, int]
"""Communicator, generation, sequence."""
Point: TypeAlias = tuple[float, float]
"""A time, and a height."""


class CommonCall(NamedTuple):
    """A call of both hosts."""

    when: float
    """By the other clock, as everything."""
    floor: float
    """That clock is not less ahead."""
    ceiling: float
    """Nor more."""


class ClockSegment(NamedTuple):
    """A part of the run in which the other clock ran evenly. All by that clock."""

    first: float
    last: float
    ahead: float
    """At `first`."""
    slope: float
    """What is added in a second."""


class HostClock:
    """Of one host, from its ranks' point of view."""

    def __init__(self, stretches: Sequence[ClockSegment]) -> None:
        """One at least, in the order of time."""
        self._stretches = stretches
        self._lasts = [each.last for each in stretches[:-1]]

    def ahead(self, shown: float) -> float:
        """Of the common clock, in seconds, when it shows this."""
        first, last, ahead, slope = self._stretches[bisect_left(self._lasts, shown)]
        return ahead + slope * (min(max(shown, first), last) - first)

    def common(self, shown: float) -> float:
        """What the common clock shows then."""
        return shown - self.ahead(shown)


class _CallInterval(NamedTuple):
    """Of the ranks of one host in one call: the first end, and the last beginning."""

    last_begin: float
    first_end: float


def clocks(parts: Sequence[TracePart]) -> dict[str, HostClock]:
    """By host. The common clock is that of the first part's host."""
    by_host: dict[str, list[TracePart]] = {}
    for part in parts:
        by_host.setdefault(part.host, []).append(part)
    stays = {host: _call_intervals(each) for host, each in by_host.items()}
    found: dict[str, HostClock] = {}
    for host, each in by_host.items():
        if host == parts[0].host:
            found[host] = _even(0.0)
        else:
            met = sorted(_common_calls(stays[parts[0].host], stays[host]))
            found[host] = HostClock(fit(met)) if met else _even(_by_wall_clock(parts[0], each[0]))
    return found


def _even(ahead: float) -> HostClock:
    return HostClock([ClockSegment(0.0, 0.0, ahead, 0.0)])


def _by_wall_clock(ours: TracePart, theirs: TracePart) -> float:
    return (theirs.monotonic - theirs.wall) - (ours.monotonic - ours.wall)


def _common_calls(ours: dict[Key, _CallInterval], theirs: dict[Key, _CallInterval]) -> Iterable[CommonCall]:
    for key in ours.keys() & theirs.keys():
        (our_begin, our_end), (begin, end) = ours[key], theirs[key]
        yield CommonCall(end, begin - our_end, end - our_begin)


def _call_intervals(parts: Iterable[TracePart]) -> dict[Key, _CallInterval]:
    found: dict[Key, _CallInterval] = {}
    for part in parts:
        for sequence, fingerprint, began, ended, _, outcome in part.calls:
            if outcome or fingerprint[0] not in MAX_SPREAD:
                continue
            key = part.communicator, part.generation, sequence
            stay = found.get(key, _CallInterval(began, ended))
            found[key] = _CallInterval(max(stay.last_begin, began), min(stay.first_end, ended))
    return found


def fit(meetings: Sequence[CommonCall]) -> list[ClockSegment]:
    """What fits them all, in the order of time, in which they are given; one at least."""
    first, last = meetings[0].when, meetings[-1].when
    floors = _upper_hull((each.when - first, each.floor) for each in meetings)
    ceilings = _upper_hull((each.when - first, -each.ceiling) for each in meetings)  # upside down

    def room(slope: float) -> float:
        """Between the lines of this slope that touch the floors and the ceilings; below 0: they have changed places."""
        return -_highest(ceilings, -slope) - _highest(floors, slope)

    slope = _best(room)
    if room(slope) < -_EVEN and len(meetings) > 1:
        half = len(meetings) // 2
        return [*fit(meetings[:half]), *fit(meetings[half:])]
    return [ClockSegment(first, last, (_highest(floors, slope) - _highest(ceilings, -slope)) / 2, slope)]


def _highest(points: Iterable[Point], slope: float) -> float:
    """At time 0, the line of this slope that no point is above."""
    return max(height - slope * when for when, height in points)


def _upper_hull(points: Iterable[Point]) -> list[Point]:
    """Of points in the order of time, those that a line from above can touch: of a long run a few."""
    hull: list[Point] = []
    for when, height in points:
        while len(hull) > 1 and not _is_corner(hull[-2], hull[-1], (when, height)):
            hull.pop()
        hull.append((when, height))
    return hull


def _is_corner(before: Point, point: Point, after: Point) -> bool:
    """It is above the line between the others."""
    rise, run = after[1] - before[1], after[0] - before[0]
    return (point[1] - before[1]) * run > rise * (point[0] - before[0])


def _best(room: Callable[[float], float]) -> float:
    """The slope with most room; 0 if none has more. The room falls to both sides of the best one, ever more steeply: so
    of two slopes the one with less room is further off.
    """
    low, high = -STEEPEST, STEEPEST
    for _ in range(64):
        third = (high - low) / 3
        if room(low + third) < room(high - third):
            low += third
        else:
            high -= third
    best = (low + high) / 2
    return best if room(best) > room(0.0) + _EVEN / 1000 else 0.0


ARROW_SECONDS: Final = 100.0
"""Microseconds of waiting; less would be arrows everywhere."""
_MOST_RANKS: Final = 64  # whose arrivals one call lists
Event: TypeAlias = dict[str, Any]


class _Arrival(NamedTuple):
    """One node's arrival in one call, in microseconds."""

    node: NodeId
    who: Rank | str
    """Its rank in the world; where no part says that one, `0 of communicator 5`."""
    when: float


def events(parts: Sequence[TracePart]) -> Iterator[Event]:
    """All of the trace: names first, then every call, part by part. Times begin at the first call."""
    parts = sorted(parts, key=lambda part: (part.generation, part.communicator, part.rank))
    clock = clocks(parts)
    zero = min((clock[part.host].common(call[2]) for part in parts for call in part.calls), default=0.0)
    seats = _TraceRows(parts)
    yield from seats.names()
    arrivals = _arrivals(parts, seats, clock, zero)
    for part in parts:
        yield from _calls(part, seats, arrivals, clock[part.host], zero)


class _TraceRows:
    """Which process and thread of the trace stands for whom."""

    def __init__(self, parts: Sequence[TracePart]) -> None:
        self._nodes: dict[NodeId, list[TracePart]] = {}
        for part in parts:
            self._nodes.setdefault(part.node, []).append(part)
        self._processes = {node: number for number, node in enumerate(self._nodes)}
        communicators = sorted({part.communicator for part in parts})
        self._threads = {communicator: number for number, communicator in enumerate(communicators)}
        seen = [WorldNode(part.generation, part.node, part.rank) for part in parts if part.communicator == WORLD]
        self._ranks = {each: world_ranks(seen, each) for each in {part.generation for part in parts}}

    def of(self, part: TracePart) -> dict[str, int]:
        """The place of a part's events."""
        return {"pid": self._processes[part.node], "tid": self._threads[part.communicator]}

    def who(self, part: TracePart) -> Rank | str:
        """Has written this part: see _Came."""
        found = self._ranks[part.generation].get(part.node)
        return f"{part.rank} of {_name(part.communicator)}" if found is None else found

    def names(self) -> Iterator[Event]:
        """What they are called."""
        for node, parts in self._nodes.items():
            ranks = dict.fromkeys(self.who(part) for part in parts)
            name = "rank " + ", then ".join(map(str, ranks))
            about = {"pid": self._processes[node], "tid": 0, "ph": "M"}
            yield {**about, "name": "process_name", "args": {"name": name}}
            yield {**about, "name": "process_labels", "args": {"labels": f"{parts[0].host_name}, pid {parts[0].pid}"}}
            yield {**about, "name": "process_sort_index", "args": {"sort_index": self._processes[node]}}
            for communicator in sorted({part.communicator for part in parts}):
                about = {"pid": self._processes[node], "tid": self._threads[communicator], "ph": "M"}
                yield {**about, "name": "thread_name", "args": {"name": _name(communicator)}}


def _name(communicator: int) -> str:
    return "world" if communicator == WORLD else f"communicator {communicator}"


def _arrivals(
    parts: Sequence[TracePart], seats: _TraceRows, clock: dict[str, HostClock], zero: float
) -> dict[Key, list[_Arrival]]:
    found: dict[Key, list[_Arrival]] = {}
    for part in parts:
        common, who = clock[part.host].common, seats.who(part)
        for sequence, _, began, *_ in part.calls:
            key = part.communicator, part.generation, sequence
            found.setdefault(key, []).append(_Arrival(part.node, who, (common(began) - zero) * 1e6))
    return found


def _calls(
    part: TracePart, seats: _TraceRows, arrivals: dict[Key, list[_Arrival]], clock: HostClock, zero: float
) -> Iterator[Event]:
    place = seats.of(part)
    for call in part.calls:
        key = part.communicator, part.generation, call[0]
        came = arrivals[key]
        start, stop = ((clock.common(when) - zero) * 1e6 for when in call[2:4])
        yield {
            **place,
            "ph": "X",
            "cat": "collective",
            "name": operation_name(call[1][0]),
            "ts": round(start, 3),
            "dur": round(max(0.0, stop - start), 3),
            "args": _facts(call, came, part.generation),
        }
        first, last = min(came, key=_when), max(came, key=_when)
        if last.when - first.when >= ARROW_SECONDS:
            wait = min(last.when, stop) - start
            about = {**place, "cat": "arrival", "name": "came last", "id": f"{key[0]:x}.{key[1]}.{key[2]}"}
            if part.node == last.node:
                yield {**about, "ph": "s", "ts": round(start, 3)}
            elif wait >= ARROW_SECONDS:
                yield _waiting(place, start, wait, last.who)
                yield {**about, "ph": "f", "bp": "e", "ts": round(start + wait, 3)}


def _when(came: _Arrival) -> float:
    return came.when


def _facts(call: Called, came: list[_Arrival], epoch: int) -> dict[str, Any]:
    sequence, fingerprint, _, _, size_bytes, outcome = call
    first = min(map(_when, came))
    facts: dict[str, Any] = {
        "sequence": sequence,
        "what": Fingerprint(*fingerprint).describe(way=True),
        "bytes": size_bytes,
        "epoch": epoch,
        "arrivals_us": {f"rank {each.who}": round(each.when - first, 1) for each in came[:_MOST_RANKS]},
        "last": max(came, key=_when).who,
    }
    return {**facts, "error": outcome} if outcome else facts


def _waiting(place: dict[str, int], start: float, wait: float, last: Rank | str) -> Event:
    name = f"waiting for rank {last}"
    return {**place, "ph": "X", "cat": "wait", "name": name, "ts": round(start, 3), "dur": round(wait, 3), "args": {}}


_LARGEST_BYTES: Final = 1 << 30  # of one part


class TraceParts(NamedTuple):
    """What was found."""

    parts: tuple[TracePart, ...]
    """Of the last run that wrote any."""
    unreadable: dict[str, str]
    """Files that are none, and why."""
    earlier: int = 0
    """Parts of other runs, which are left out: their ranks and calls have the same numbers, and are others."""


class TraceSummary(NamedTuple):
    """What a trace has."""

    ranks: int
    calls: int
    missed: int
    """Calls for which there was no room while the program ran."""


def read_parts(directories: Iterable[Path]) -> TraceParts:
    """Of these directories, but not of those in them. UsageError if one of them is none."""
    parts: list[TracePart] = []
    unreadable: dict[str, str] = {}
    for directory in directories:
        if not directory.is_dir():
            raise UsageError(f"{directory} is no directory; give those that NEXAR_TRACE_DIR named")
        found = read_rank_files(directory, SUFFIX, decode_trace_part, _LARGEST_BYTES)
        parts += found.read
        unreadable |= {str(directory / name): reason for name, reason in found.unreadable.items()}
    last = max(parts, key=lambda part: part.wall, default=None)
    ours = tuple(part for part in parts if last is not None and part.cluster == last.cluster)
    return TraceParts(ours, unreadable, len(parts) - len(ours))


def write_trace(path: Path, parts: Sequence[TracePart]) -> TraceSummary:
    """As JSON: event by event, so that a long one needs no memory of its size. What the file held stays until all is
    written; what is no file, as a pipe, gets it as it comes. The file is its owner's alone, as the parts are.
    UsageError if it cannot be written.
    """
    calls = sum(len(part.calls) for part in parts)
    missed = sum(part.missed for part in parts)
    ranks = len({part.node for part in parts})
    about = {"program": "nexar", "ranks": ranks, "calls": calls, "calls_missed": missed}
    try:
        with _opened(path) as file:
            file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [\n'.encode())
            file.writelines(_lines(events(parts)))
            file.write(b"\n]}\n")
    except OSError as error:
        raise UsageError(f"the trace cannot be written to {path}: {error.strerror or error}") from error
    return TraceSummary(ranks, calls, missed)


def _opened(path: Path) -> AbstractContextManager[BinaryIO]:
    if path.exists() and not path.is_file():
        return path.open("wb")
    place = path.resolve()  # a link to a file stays one
    place.parent.stat()  # it is not made here: a directory that is missing is a slip of the pen
    return private_file(place)


def _lines(found: Iterable[Event]) -> Iterable[bytes]:
    for number, event in enumerate(found):
        text = json.dumps(event, allow_nan=False)
        yield f",\n{text}".encode() if number else text.encode()
