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
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias

from nexar.collectives.operations import OperationCode
from nexar.collectives.trace_part import Part

TOGETHER: Final = frozenset(
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


class Meeting(NamedTuple):
    """A call of both hosts."""

    when: float
    """By the other clock, as everything."""
    floor: float
    """That clock is not less ahead."""
    ceiling: float
    """Nor more."""


class Stretch(NamedTuple):
    """A part of the run in which the other clock ran evenly. All by that clock."""

    first: float
    last: float
    ahead: float
    """At `first`."""
    slope: float
    """What is added in a second."""


class HostClock:
    """Of one host, from its ranks' point of view."""

    def __init__(self, stretches: Sequence[Stretch]) -> None:
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


class _Stay(NamedTuple):
    """Of the ranks of one host in one call: the first end, and the last beginning."""

    last_begin: float
    first_end: float


def clocks(parts: Sequence[Part]) -> dict[str, HostClock]:
    """By host. The common clock is that of the first part's host."""
    by_host: dict[str, list[Part]] = {}
    for part in parts:
        by_host.setdefault(part.host, []).append(part)
    stays = {host: _stays(each) for host, each in by_host.items()}
    found: dict[str, HostClock] = {}
    for host, each in by_host.items():
        if host == parts[0].host:
            found[host] = _even(0.0)
        else:
            met = sorted(_meetings(stays[parts[0].host], stays[host]))
            found[host] = HostClock(fit(met)) if met else _even(_by_the_wall(parts[0], each[0]))
    return found


def _even(ahead: float) -> HostClock:
    return HostClock([Stretch(0.0, 0.0, ahead, 0.0)])


def _by_the_wall(ours: Part, theirs: Part) -> float:
    return (theirs.monotonic - theirs.wall) - (ours.monotonic - ours.wall)


def _meetings(ours: dict[Key, _Stay], theirs: dict[Key, _Stay]) -> Iterable[Meeting]:
    for key in ours.keys() & theirs.keys():
        (our_begin, our_end), (begin, end) = ours[key], theirs[key]
        yield Meeting(end, begin - our_end, end - our_begin)


def _stays(parts: Iterable[Part]) -> dict[Key, _Stay]:
    found: dict[Key, _Stay] = {}
    for part in parts:
        for sequence, fingerprint, began, ended, _, outcome in part.calls:
            if outcome or fingerprint[0] not in TOGETHER:
                continue
            key = part.communicator, part.generation, sequence
            stay = found.get(key, _Stay(began, ended))
            found[key] = _Stay(max(stay.last_begin, began), min(stay.first_end, ended))
    return found


def fit(meetings: Sequence[Meeting]) -> list[Stretch]:
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
    return [Stretch(first, last, (_highest(floors, slope) - _highest(ceilings, -slope)) / 2, slope)]


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
