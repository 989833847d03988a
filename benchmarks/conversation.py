"""The message exchange of a transport benchmark, the same for every kind of connection.

The left side asks and measures, the right side answers. They agree only on sizes: the left side marks its last message,
so no number of rounds is fixed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Protocol

GOES_ON, LAST = 1, 2
FEWEST_ROUNDS = 20
ROUND_TRIP, ONE_WAY, BOTH_WAYS = "round trip", "one way", "both ways"


class Talker(Protocol):
    """One end of a connection. `outgoing` and `incoming` are reused for every message."""

    outgoing: memoryview
    incoming: memoryview

    def prepare(self, size: int) -> None:
        """Sets the message size."""

    def expect(self) -> None:
        """Prepares for a message."""

    def say(self) -> None:
        """Sends `outgoing`."""

    def hear(self) -> None:
        """Blocks until the expected message is in `incoming`."""

    def stream(self, size: int, out: int, into: int) -> None:
        """Sends `out` large messages and receives `into`; blocks until all have arrived on both sides."""


def ask(node: Any, line: Any, plan: dict[str, Any]) -> list[dict[str, Any]]:
    """The left side: measures everything in the plan."""
    talker = _make_talker(node, line, plan)
    return [_measure(talker, kind, size, plan) for kind, size in plan["questions"]]


def answer(node: Any, line: Any, plan: dict[str, Any]) -> None:
    """The right side: answers."""
    talker = _make_talker(node, line, plan)
    for kind, size in plan["questions"]:
        if kind == ROUND_TRIP:
            _echo(talker, size)
        else:
            for count in _counts(size, plan):
                talker.stream(size, count if kind == BOTH_WAYS else 0, count)


def _make_talker(node: Any, line: Any, plan: dict[str, Any]) -> Talker:
    module, _, name = plan["talker"].partition(":")
    talker: Talker = getattr(import_module(module), name)(node, line)
    return talker


def _measure(talker: Talker, kind: str, size: int, plan: dict[str, Any]) -> dict[str, Any]:
    if kind == ROUND_TRIP:
        return {"kind": kind, "size": size, **_round_trips(talker, size, plan)}
    for count in _counts(size, plan):
        begin = time.perf_counter()
        talker.stream(size, count, count if kind == BOTH_WAYS else 0)
        seconds = time.perf_counter() - begin
    moved = size * count * (2 if kind == BOTH_WAYS else 1)
    return {"kind": kind, "size": size, "value": moved / seconds / 1e9}


def _counts(size: int, plan: dict[str, Any]) -> tuple[int, int]:
    """Number of messages to warm up with, and to measure."""
    count = max(4, plan["stream_bytes"] // size)
    return max(2, count // 4), count


# -- round trips -----------------------------------------------------------------------------------------------------


def _round_trips(talker: Talker, size: int, plan: dict[str, Any]) -> dict[str, float]:
    """Measures for `seconds` from `begin` on. It continues before and after, so that other pairs always compete."""
    talker.prepare(size)
    talker.outgoing[0] = GOES_ON
    _ping(talker)  # the other side may still be connecting
    begin = plan["begin"] or time.monotonic() + plan["warm_up"]
    _ping_until(talker, begin)
    times = _ping_until(talker, time.monotonic() + plan["seconds"])
    if plan["begin"]:
        _ping_until(talker, time.monotonic() + plan["warm_up"])
    talker.outgoing[0] = LAST
    _ping(talker)
    ordered = sorted(times)
    return {
        "value": statistics.median(ordered) / 1e3,
        "mean": statistics.fmean(ordered) / 1e3,
        "p99": ordered[len(ordered) * 99 // 100] / 1e3,
        "rounds": len(ordered),
    }


def _ping(talker: Talker) -> None:
    talker.expect()
    talker.say()
    talker.hear()


def _ping_until(talker: Talker, end: float) -> list[int]:
    expect, say, hear, clock = talker.expect, talker.say, talker.hear, time.perf_counter_ns
    times = []
    stop = clock() + int((end - time.monotonic()) * 1e9)
    before = clock()
    while before < stop or len(times) < FEWEST_ROUNDS:
        expect()
        say()
        hear()
        after = clock()
        times.append(after - before)
        before = after
    return times


def _echo(talker: Talker, size: int) -> None:
    talker.prepare(size)
    for mark in _heard(talker):
        if mark != LAST:
            talker.expect()  # before the answer, so that the next message finds its receive
        talker.say()


def _heard(talker: Talker) -> Iterator[int]:
    talker.expect()
    mark = GOES_ON
    while mark != LAST:
        talker.hear()
        mark = talker.incoming[0]
        yield mark
