"""Merges the trace parts of all ranks into one trace for ui.perfetto.dev and chrome://tracing.

In the trace, a node is a process, a communicator a thread, a call a slice. A wait for the last rank is a slice inside
the call, with an arrow from that rank.

Hosts' clocks are aligned by calls in which no rank ends before all have begun. For ranks a and b of hosts A and B in
such a call, let B's clock be d ahead:

    begin(b) - d ≤ end(a)    and    begin(a) ≤ end(b) - d    hence    begin(b) - end(a) ≤ d ≤ end(b) - begin(a)

The estimate of d is the line over time with the largest distance to all bounds. If no line fits, each half of the run
gets its own. Before the first and after the last such call, d is constant. Hosts without such a call use wall clocks.

Bounds are placed at the end of b. That is exact for the upper bound; the lower one is loose by b's time in the call,
far more than clocks drift meanwhile.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, TypeAlias

from nexar.cluster.membership import WORLD
from nexar.collectives.fingerprint import Fingerprint, operation_name
from nexar.collectives.operations import COLLECTIVES
from nexar.collectives.trace_writer import SUFFIX, Called, TracePart, decode_trace_part
from nexar.errors import UsageError
from nexar.observe.rank_files import WorldNode, read_rank_files, world_ranks
from nexar.security.storage import private_file
from nexar.types import NodeId, Rank

SYNCHRONOUS_OPERATIONS: Final = frozenset(code for code, row in COLLECTIVES.items() if row.synchronous)
"""Collectives in which no rank ends before all have begun."""
MAX_DRIFT: Final = 1e-3
"""Largest drift in seconds per second: more than crystals drift and daemons slew."""
_TOLERANCE: Final = 1e-6  # seconds by which a line may violate the bounds: clocks are read one after the other

Key: TypeAlias = tuple[int, int, int]
"""Communicator, generation, sequence number."""
Point: TypeAlias = tuple[float, float]
"""A time and a bound."""


class CommonCall(NamedTuple):
    """Bounds from one call, in the other host's time."""

    when: float
    floor: float
    """The other clock is at least this far ahead."""
    ceiling: float
    """The other clock is at most this far ahead."""


class ClockSegment(NamedTuple):
    """A part of the run with even drift, in the other host's time."""

    first: float
    last: float
    ahead: float
    """Seconds ahead at `first`."""
    slope: float
    """Seconds gained per second."""


class HostClock:
    """Converts times of one host to the common clock."""

    def __init__(self, segments: Sequence[ClockSegment]) -> None:
        self._segments = segments
        self._lasts = [each.last for each in segments[:-1]]

    def ahead(self, shown: float) -> float:
        """Seconds ahead of the common clock when this one shows `shown`."""
        first, last, ahead, slope = self._segments[bisect_left(self._lasts, shown)]
        return ahead + slope * (min(max(shown, first), last) - first)

    def common(self, shown: float) -> float:
        return shown - self.ahead(shown)


class _CallInterval(NamedTuple):
    last_begin: float
    first_end: float


def clocks(parts: Sequence[TracePart]) -> dict[str, HostClock]:
    """Clocks by host. The first part's host has the common clock."""
    by_host: dict[str, list[TracePart]] = {}
    for part in parts:
        by_host.setdefault(part.host, []).append(part)
    intervals = {host: _call_intervals(each) for host, each in by_host.items()}
    found: dict[str, HostClock] = {}
    for host, each in by_host.items():
        if host == parts[0].host:
            found[host] = _constant(0.0)
        else:
            shared = sorted(_common_calls(intervals[parts[0].host], intervals[host]))
            found[host] = HostClock(fit(shared)) if shared else _constant(_by_wall_clock(parts[0], each[0]))
    return found


def _constant(ahead: float) -> HostClock:
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
            if outcome or fingerprint[0] not in SYNCHRONOUS_OPERATIONS:
                continue
            key = part.communicator, part.generation, sequence
            interval = found.get(key, _CallInterval(began, ended))
            found[key] = _CallInterval(max(interval.last_begin, began), min(interval.first_end, ended))
    return found


def fit(calls: Sequence[CommonCall]) -> list[ClockSegment]:
    """Return segments within all bounds. `calls` and segments are in order of time."""
    first, last = calls[0].when, calls[-1].when
    floors = _upper_hull((each.when - first, each.floor) for each in calls)
    ceilings = _upper_hull((each.when - first, -each.ceiling) for each in calls)  # negated

    def margin(slope: float) -> float:
        """Distance between the touching lines of this slope; negative: they cross."""
        return -_highest(ceilings, -slope) - _highest(floors, slope)

    slope = _best_slope(margin)
    if margin(slope) < -_TOLERANCE and len(calls) > 1:
        half = len(calls) // 2
        return [*fit(calls[:half]), *fit(calls[half:])]
    return [ClockSegment(first, last, (_highest(floors, slope) - _highest(ceilings, -slope)) / 2, slope)]


def _highest(points: Iterable[Point], slope: float) -> float:
    """Height at time 0 of the lowest line of this slope above all points."""
    return max(height - slope * when for when, height in points)


def _upper_hull(points: Iterable[Point]) -> list[Point]:
    """The points that a line from above can touch."""
    hull: list[Point] = []
    for when, height in points:
        while len(hull) > 1 and not _is_corner(hull[-2], hull[-1], (when, height)):
            hull.pop()
        hull.append((when, height))
    return hull


def _is_corner(before: Point, point: Point, after: Point) -> bool:
    rise, run = after[1] - before[1], after[0] - before[0]
    return (point[1] - before[1]) * run > rise * (point[0] - before[0])


def _best_slope(margin: Callable[[float], float]) -> float:
    """Prefers 0. Ternary search: margin is concave in the slope."""
    low, high = -MAX_DRIFT, MAX_DRIFT
    for _ in range(64):
        third = (high - low) / 3
        if margin(low + third) < margin(high - third):
            low += third
        else:
            high -= third
    best = (low + high) / 2
    return best if margin(best) > margin(0.0) + _TOLERANCE / 1000 else 0.0


ARROW_MICROSECONDS: Final = 100.0
"""Microseconds of waiting below which no arrow is drawn."""
_MAX_RANKS: Final = 64  # whose arrivals one call lists
Event: TypeAlias = dict[str, Any]


class _Arrival(NamedTuple):
    node: NodeId
    who: Rank | str
    """In the world, or `0 of communicator 5` if unknown."""
    when: float


def events(parts: Sequence[TracePart]) -> Iterator[Event]:
    """Names first, then calls. Time 0 is the first call."""
    parts = sorted(parts, key=lambda part: (part.generation, part.communicator, part.rank))
    clock = clocks(parts)
    zero = min((clock[part.host].common(call[2]) for part in parts for call in part.calls), default=0.0)
    rows = _TraceRows(parts)
    yield from rows.names()
    arrivals = _arrivals(parts, rows, clock, zero)
    for part in parts:
        yield from _calls(part, rows, arrivals, clock[part.host], zero)


class _TraceRows:
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
        return {"pid": self._processes[part.node], "tid": self._threads[part.communicator]}

    def who(self, part: TracePart) -> Rank | str:
        found = self._ranks[part.generation].get(part.node)
        return f"{part.rank} of {_name(part.communicator)}" if found is None else found

    def names(self) -> Iterator[Event]:
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
    parts: Sequence[TracePart], rows: _TraceRows, clock: dict[str, HostClock], zero: float
) -> dict[Key, list[_Arrival]]:
    found: dict[Key, list[_Arrival]] = {}
    for part in parts:
        common, who = clock[part.host].common, rows.who(part)
        for sequence, _, began, *_ in part.calls:
            key = part.communicator, part.generation, sequence
            found.setdefault(key, []).append(_Arrival(part.node, who, (common(began) - zero) * 1e6))
    return found


def _calls(
    part: TracePart, rows: _TraceRows, arrivals: dict[Key, list[_Arrival]], clock: HostClock, zero: float
) -> Iterator[Event]:
    place = rows.of(part)
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
        if last.when - first.when >= ARROW_MICROSECONDS:
            wait = min(last.when, stop) - start
            about = {**place, "cat": "arrival", "name": "came last", "id": f"{key[0]:x}.{key[1]}.{key[2]}"}
            if part.node == last.node:
                yield {**about, "ph": "s", "ts": round(start, 3)}
            elif wait >= ARROW_MICROSECONDS:
                yield _waiting(place, start, wait, last.who)
                yield {**about, "ph": "f", "bp": "e", "ts": round(start + wait, 3)}


def _when(came: _Arrival) -> float:
    return came.when


def _facts(call: Called, came: list[_Arrival], epoch: int) -> dict[str, Any]:
    sequence, fingerprint, _, _, size_bytes, outcome = call
    first = min(map(_when, came))
    facts: dict[str, Any] = {
        "sequence": sequence,
        "what": Fingerprint(*fingerprint).describe(with_algorithm=True),
        "bytes": size_bytes,
        "epoch": epoch,
        "arrivals_us": {f"rank {each.who}": round(each.when - first, 1) for each in came[:_MAX_RANKS]},
        "last": max(came, key=_when).who,
    }
    return {**facts, "error": outcome} if outcome else facts


def _waiting(place: dict[str, int], start: float, wait: float, last: Rank | str) -> Event:
    name = f"waiting for rank {last}"
    return {**place, "ph": "X", "cat": "wait", "name": name, "ts": round(start, 3), "dur": round(wait, 3), "args": {}}


_LARGEST_BYTES: Final = 1 << 30  # for one part


class TraceParts(NamedTuple):
    """Parts of one run."""

    parts: tuple[TracePart, ...]
    """Of the last run."""
    unreadable: dict[str, str]
    """File → reason."""
    earlier: int = 0
    """Ignored parts of other runs, whose numbers mean other ranks and calls."""


class TraceSummary(NamedTuple):
    """Totals."""

    ranks: int
    calls: int
    missed: int
    """Calls dropped because the buffer was full."""


def read_parts(directories: Iterable[Path]) -> TraceParts:
    """Ignores subdirectories. Raises UsageError for a missing directory."""
    parts: list[TracePart] = []
    unreadable: dict[str, str] = {}
    for directory in directories:
        if not directory.is_dir():
            raise UsageError(f"{directory} is not a directory; pass the directories of NEXAR_TRACE_DIR")
        found = read_rank_files(directory, SUFFIX, decode_trace_part, _LARGEST_BYTES)
        parts += found.read
        unreadable |= {str(directory / name): reason for name, reason in found.unreadable.items()}
    last = max(parts, key=lambda part: part.wall, default=None)
    ours = tuple(part for part in parts if last is not None and part.cluster == last.cluster)
    return TraceParts(ours, unreadable, len(parts) - len(ours))


def write_trace(path: Path, parts: Sequence[TracePart]) -> TraceSummary:
    """Writes event by event in bounded memory. Raises UsageError if writing fails.

    Replaces a file only when complete, readable by its owner only. A pipe gets data at once.
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
    place = path.resolve()  # a symbolic link stays one
    place.parent.stat()  # raises OSError if it is missing: a missing directory is a typing error, so it is not created
    return private_file(place)


def _lines(found: Iterable[Event]) -> Iterable[bytes]:
    for number, event in enumerate(found):
        text = json.dumps(event, allow_nan=False)
        yield f",\n{text}".encode() if number else text.encode()
