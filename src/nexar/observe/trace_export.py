"""From the parts of all ranks to one trace, for ui.perfetto.dev and chrome://tracing. Pure.

A node is a process of the trace, a communicator one of its threads, a call a slice. Each call says when every rank came
to it; where that made others wait, the wait is a slice inside theirs, and an arrow leads from who came last to them.

Ranks are told as the world has them, also in other communicators: a node is called as its process is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from nexar.cluster.change import WORLD
from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.operations import name_of
from nexar.collectives.trace_part import Called, Part
from nexar.observe.one_clock import HostClock, Key, clocks
from nexar.observe.world_ranks import Seen, world_ranks
from nexar.types import NodeId, Rank

WORTH_AN_ARROW: Final = 100.0
"""Microseconds of waiting; less would be arrows everywhere."""
_MOST_RANKS: Final = 64  # whose arrivals one call lists
Event: TypeAlias = dict[str, Any]


class _Came(NamedTuple):
    """One node's arrival in one call, in microseconds."""

    node: NodeId
    who: Rank | str
    """Its rank in the world; where no part says that one, `0 of communicator 5`."""
    when: float


def events(parts: Sequence[Part]) -> Iterator[Event]:
    """All of the trace: names first, then every call, part by part. Times begin at the first call."""
    parts = sorted(parts, key=lambda part: (part.generation, part.communicator, part.rank))
    clock = clocks(parts)
    zero = min((clock[part.host].common(call[2]) for part in parts for call in part.calls), default=0.0)
    seats = _Seats(parts)
    yield from seats.names()
    arrivals = _arrivals(parts, seats, clock, zero)
    for part in parts:
        yield from _calls(part, seats, arrivals, clock[part.host], zero)


class _Seats:
    """Which process and thread of the trace stands for whom."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._nodes: dict[NodeId, list[Part]] = {}
        for part in parts:
            self._nodes.setdefault(part.node, []).append(part)
        self._processes = {node: number for number, node in enumerate(self._nodes)}
        communicators = sorted({part.communicator for part in parts})
        self._threads = {communicator: number for number, communicator in enumerate(communicators)}
        seen = [Seen(part.generation, part.node, part.rank) for part in parts if part.communicator == WORLD]
        self._ranks = {each: world_ranks(seen, each) for each in {part.generation for part in parts}}

    def of(self, part: Part) -> dict[str, int]:
        """The place of a part's events."""
        return {"pid": self._processes[part.node], "tid": self._threads[part.communicator]}

    def who(self, part: Part) -> Rank | str:
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


def _arrivals(parts: Sequence[Part], seats: _Seats, clock: dict[str, HostClock], zero: float) -> dict[Key, list[_Came]]:
    found: dict[Key, list[_Came]] = {}
    for part in parts:
        common, who = clock[part.host].common, seats.who(part)
        for sequence, _, began, *_ in part.calls:
            key = part.communicator, part.generation, sequence
            found.setdefault(key, []).append(_Came(part.node, who, (common(began) - zero) * 1e6))
    return found


def _calls(
    part: Part, seats: _Seats, arrivals: dict[Key, list[_Came]], clock: HostClock, zero: float
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
            "name": name_of(call[1][0]),
            "ts": round(start, 3),
            "dur": round(max(0.0, stop - start), 3),
            "args": _facts(call, came, part.generation),
        }
        first, last = min(came, key=_when), max(came, key=_when)
        if last.when - first.when >= WORTH_AN_ARROW:
            wait = min(last.when, stop) - start
            about = {**place, "cat": "arrival", "name": "came last", "id": f"{key[0]:x}.{key[1]}.{key[2]}"}
            if part.node == last.node:
                yield {**about, "ph": "s", "ts": round(start, 3)}
            elif wait >= WORTH_AN_ARROW:
                yield _waiting(place, start, wait, last.who)
                yield {**about, "ph": "f", "bp": "e", "ts": round(start + wait, 3)}


def _when(came: _Came) -> float:
    return came.when


def _facts(call: Called, came: list[_Came], epoch: int) -> dict[str, Any]:
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
