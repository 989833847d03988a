"""Who watches whom: everybody in a small world, three others in a large one, neighbours in a sparse one. Pure.

In a large world a rank is watched by the next two and by the one opposite on the ring: neighbours often share a host
and may die with it, the one opposite hardly does. Three are enough to notice, because what they notice is checked by
everybody before anybody is removed; and what a node spends on watching does not grow with the world. Where not all
ranks are neighbours, watching needs no link that is not there anyway; and who relays over somebody hears of its end
first.

Law: `a` watches `b` exactly if `b` is watched by `a`; every rank watches as many as it is watched by.

How much slower this node runs than it would on an idle machine. Pure.

A node that gets too little CPU reads answers late, and peers on its host are as slow as it is. A deadline for a peer
must therefore extend by this node's own delay. Two measurements show it: how late timers run, and how long threads
wait for a CPU compared with how long they have one.

Law: the delay is 0 while the machine has CPU to spare, follows the measurements within seconds, and never exceeds
`longest`. So a dead peer is found without loss of time on an idle machine, and is found in bounded time on any other.

One node's view of those it watches: who is alive, who is stuck, who is silent. Pure.

Heard    Two signs of life are kept apart. A *packet* is anything that the peer's transport sent; a *beat* is what its
         Python code sent. QUIC answers and keeps alive on a thread of its own, so packets without beats mean a process
         that runs while its Python code does not (a held GIL, an endless loop in C). Elsewhere nothing comes without
         Python, so a process that is stuck looks like one that is stopped.
States   alive    nothing to complain of
         stuck    it lives, but its beats stopped, or one of its calls does not move: told by name, costs nothing
         silent   nothing at all for `timeout`: a loss
         hung     packets, but no beat for `stuck_timeout`: a loss
         A call that does not move while beats come is never a loss: it may wait for somebody else.
Pauses   Time in which this node itself did not run does not count against the others: who was suspended, stopped or
         without the GIL comes late to its own tick, and finds what came meanwhile still unread.
Delay    A node that gets too little CPU is told its own delay, and waits longer by so much before it calls a loss.

Each finding is told once, and `alive` when it is over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from nexar.cluster.decisions.refusals import brief
from nexar.topology import FULL_MESH, neighbors
from nexar.types import NodeId, Rank, format_seconds
from nexar.wire.control import Beat, CurrentCall

SMALL_WORLD: Final = 8
"""Up to this size everybody watches everybody."""


def watchers(size: int, rank: Rank, topology: str = FULL_MESH) -> tuple[Rank, ...]:
    """The ranks that watch this one, ascending."""
    return _others(size, rank, +1, topology)


def watched(size: int, rank: Rank, topology: str = FULL_MESH) -> tuple[Rank, ...]:
    """The ranks that this one watches, ascending."""
    return _others(size, rank, -1, topology)


def _others(size: int, rank: Rank, direction: int, topology: str) -> tuple[Rank, ...]:
    if topology != FULL_MESH or size <= SMALL_WORLD:
        return neighbors(topology, size, rank)
    steps = (1, 2, size // 2)
    return tuple(sorted((rank + direction * step) % size for step in steps))


LONGEST: Final = 20.0
"""Seconds, whatever the settings are."""
_FORMATION_SHARE: Final = 1 / 3
_MEMORY: Final = 3.0
"""Seconds after which a measurement counts for about a third of its value."""
_STEPS: Final = 10.0
"""Turns of threads, here and at the peer, that one answer takes: a connection, its handshake, a question."""
_LATEST: Final = LONGEST / _STEPS
"""Seconds of lateness that count: a longer pause is a suspension, which says nothing about the time after it."""
_PUNCTUAL: Final = 0.05
"""Seconds of lateness that timers show on an idle machine."""
_LEAST_SHARE: Final = 0.05
"""CPU seconds per second: with less a thread's wait for a CPU says little about what work would take."""
_UNDISTURBED: Final = 0.5
"""Seconds by which a second of work may take longer before that counts: other processes run, too."""


def longest_extension(formation_timeout: float) -> float:
    """Seconds by which a seed that runs slowly extends the time for forming at most. Members wait that much longer for
    its answer.
    """
    return min(LONGEST, formation_timeout * _FORMATION_SHARE)


class OwnDelay:
    """The measurements of one node, as two averages that forget exponentially."""

    def __init__(self, longest: float = LONGEST) -> None:
        """`longest`: seconds that the delay has at most."""
        self._longest = min(longest, LONGEST)
        self._lateness = _Average()
        self._slowdown = _Average()
        self._totals: tuple[float, float, float] | None = None  # cpu, waited, when

    @property
    def seconds(self) -> float:
        """By which every deadline for a peer extends now."""
        late = self._lateness.value if self._lateness.value >= _PUNCTUAL else 0.0
        slow = self._slowdown.value if self._slowdown.value >= _UNDISTURBED else 0.0
        return min(self._longest, max(_STEPS * late, slow))

    def timer_ran(self, due: float, now: float) -> None:
        """A timer that was set to `due` has run at `now`."""
        self._lateness.add(min(_LATEST, max(0.0, now - due)), now)

    def threads_used(self, cpu: float, waited: float, now: float) -> None:
        """So many seconds this process has run in all, and so many its threads were ready and had no CPU. Totals may
        go down: a thread that ends takes its share with it. Such a period says nothing.
        """
        before, self._totals = self._totals, (cpu, waited, now)
        if before is None or now <= before[2]:
            return
        seconds = now - before[2]
        ran, lacked = (cpu - before[0]) / seconds, (waited - before[1]) / seconds
        if ran >= 0 and lacked >= 0:
            self._slowdown.add(min(LONGEST, lacked / max(ran, _LEAST_SHARE)), now)


class _Average:
    """Of values that hold for the time since the one before."""

    def __init__(self) -> None:
        self.value = 0.0
        self._at: float | None = None

    def add(self, value: float, now: float) -> None:
        weight = 1.0 if self._at is None else 1.0 - math.exp(-(now - self._at) / _MEMORY)
        self.value += weight * (value - self.value)
        self._at = now


LivenessState: TypeAlias = Literal["alive", "stuck", "silent", "hung"]

_LATE: Final = 2.0
"""Intervals by which a tick may come late before that is a pause of our own."""
_NAME_CHARACTERS: Final = 60
IF_SLOW: Final = "; if it was only slow, raise NEXAR_HEARTBEAT_TIMEOUT_SECS"
"""How a cause ends that is a matter of time."""


@dataclass(frozen=True, slots=True)
class LivenessReport:
    """News of a node."""

    node: NodeId
    state: LivenessState
    since: float
    """When it was heard last, or its call moved last: the clock's time, not a duration."""
    doing: CurrentCall | None
    """The call that it was in, by its last beat: the one that has not moved for longest."""
    cause: str
    """For people."""

    @property
    def is_loss(self) -> bool:
        """It should be removed if the others find the same."""
        return self.state in ("silent", "hung")


@dataclass(frozen=True, slots=True)
class PeerLiveness:
    """What is known of a node at some moment."""

    age: float
    """Seconds since anything came from it."""
    beat: Beat | None
    beat_age: float
    """Seconds since that beat; since it is watched, if there was none, or since it is heard again after a silence."""
    state: LivenessState
    """As it was told last."""


@dataclass(slots=True)
class _Watched:
    """One node that is watched."""

    heard: float
    beaten: float
    count: float | None = None
    tells_apart: bool = True
    beat: Beat | None = None
    told: LivenessState = "alive"
    told_of: object = None  # what it was told to be stuck in


class FailureDetector:
    """Feed it with what comes, `tick` it when it is due."""

    def __init__(self, interval: float, timeout: float, stuck_timeout: float) -> None:
        """`interval` is that of the beats, and of the ticks."""
        self._interval = interval
        self._timeout = timeout
        self._stuck_timeout = stuck_timeout
        self._watched: dict[NodeId, _Watched] = {}
        self._ticked = float("-inf")  # when the last tick came
        self._expected: float | None = None  # when the next one should
        self._was_late = False  # the last tick
        self.own_delay = 0.0
        """Seconds by which the limits of losses extend: see `own_delay`. Written by who ticks."""

    def watch(self, nodes: Iterable[NodeId], now: float) -> None:
        """These and no others from now on. Who is new has a whole timeout before it."""
        self._watched = {node: self._watched.get(node) or _Watched(heard=now, beaten=now) for node in nodes}
        if not self._watched:
            self._expected = None
        elif self._expected is None:
            self._expected = now + self._interval

    @property
    def watched(self) -> frozenset[NodeId]:
        """Who is watched."""
        return frozenset(self._watched)

    def packets(self, node: NodeId, count: float, now: float, *, tells_apart: bool = True) -> None:
        """What was received of it in all, in whatever unit: any change is life. `tells_apart`: some of it is sent while
        its Python code does not run.
        """
        seen = self._watched.get(node)
        if seen is not None:
            if seen.count is not None and count != seen.count:
                if now - seen.heard >= self._timeout:
                    seen.beaten = now  # cut off: what it sent in that time tells nothing, beats no more than packets
                seen.heard = now
            seen.count, seen.tells_apart = count, tells_apart

    def beat(self, node: NodeId, beat: Beat, now: float) -> None:
        """It says what it does."""
        seen = self._watched.get(node)
        if seen is not None:
            seen.beat, seen.beaten, seen.heard = beat, now, now

    def known(self, node: NodeId, now: float) -> PeerLiveness | None:
        """None: it is not watched."""
        seen = self._watched.get(node)
        return None if seen is None else PeerLiveness(now - seen.heard, seen.beat, now - seen.beaten, seen.told)

    def due(self, now: float) -> float | None:
        """When to tick next at the latest; None: nobody is watched."""
        if self._expected is None:
            return None
        limits = [limit for seen in self._watched.values() for limit in self._limits(seen) if limit > now]
        return min([self._expected, *limits])

    def _limits(self, seen: _Watched) -> tuple[float, ...]:
        delay = self.own_delay
        return (
            seen.heard + self._timeout + delay,
            seen.beaten + self._timeout,
            seen.beaten + self._stuck_timeout + delay,
        )

    def tick(self, now: float) -> list[LivenessReport]:
        """What is new. Feed it with the packets of the same moment first."""
        self._excuse(now)
        findings = [self._judge(node, seen, now) for node, seen in self._watched.items()]
        self._ticked = now
        self._expected = now + self._interval if self._watched else None
        self._expected = self.due(now)
        return [finding for finding in findings if finding is not None]

    # -- a pause of our own ------------------------------------------------------------------------------

    def _excuse(self, now: float) -> None:
        """What came during a pause may not have been read yet, so who is at its limit gets an interval more. Not twice
        in a row: a node that is late every time would never find anybody silent.
        """
        late = 0.0 if self._expected is None else now - self._expected
        is_late = late > _LATE * self._interval
        if is_late:
            least = now if self._was_late else now + self._interval
            for seen in self._watched.values():
                seen.heard = self._moved(seen.heard, late, now, least)
                seen.beaten = self._moved(seen.beaten, late, now, least)
        self._was_late = is_late

    def _moved(self, moment: float, late: float, now: float, least: float) -> float:
        """A moment, moved on by the pause. Who was past its limit before the pause stays past it."""
        if moment + self._timeout <= self._ticked:
            return min(now, moment + late)
        return max(min(now, moment + late), least - self._timeout)

    # -- judging -----------------------------------------------------------------------------------------

    def _judge(self, node: NodeId, seen: _Watched, now: float) -> LivenessReport | None:
        finding = self._look(node, seen, now)
        told_of = self._subject(finding, seen) if finding.state == "stuck" else None
        if (finding.state, told_of) == (seen.told, seen.told_of):
            return None
        seen.told, seen.told_of = finding.state, told_of
        return finding

    def _look(self, node: NodeId, seen: _Watched, now: float) -> LivenessReport:
        """A packet that came when beats had been missing for long enough proves a process that lives and is stuck;
        without one it may as well be dead, which is found a little later.
        """
        doing = max(seen.beat.doing, key=lambda call: call.age, default=None) if seen.beat is not None else None
        silence, mute = now - seen.heard, seen.heard - seen.beaten
        if silence >= self._timeout + self.own_delay:
            return LivenessReport(node, "silent", seen.heard, doing, _silent(silence, seen, doing))
        if mute >= self._timeout:  # without the own delay: to be reported as stuck costs nobody the place
            state: LivenessState = "stuck" if mute < self._stuck_timeout + self.own_delay else "hung"
            return LivenessReport(node, state, seen.beaten, doing, _mute(now - seen.beaten, doing))
        if doing is not None and doing.age >= self._timeout:
            age = doing.age + now - seen.beaten
            return LivenessReport(
                node, "stuck", now - age, doing, f"alive, stuck in {_name(doing)} for {format_seconds(age)}"
            )
        return LivenessReport(node, "alive", seen.heard, doing, "it is heard again")

    def _subject(self, finding: LivenessReport, seen: _Watched) -> object:
        """What tells one way to be stuck from another: each is told."""
        if seen.heard - seen.beaten >= self._timeout or finding.doing is None:
            return "its beats"
        return finding.doing.communicator, finding.doing.sequence


def _silent(silence: float, seen: _Watched, doing: CurrentCall | None) -> str:
    last = "" if doing is None else f", last seen in {_name(doing)}"
    if seen.tells_apart:
        return f"no packet for {format_seconds(silence)}{last}: dead, stopped or cut off{IF_SLOW}"
    return f"nothing heard for {format_seconds(silence)}{last}: dead, stopped, stuck or cut off{IF_SLOW}"


def _mute(mute: float, doing: CurrentCall | None) -> str:
    beats = f"no beat for {format_seconds(mute)}"
    if doing is None:
        return f"alive but stuck, {beats}: its Python code does not run"
    return f"alive but stuck in {_name(doing)} for {format_seconds(doing.age + mute)}, {beats}"


def _name(doing: CurrentCall) -> str:
    """What a peer wrote, cut to size."""
    return f"{brief(doing.operation, _NAME_CHARACTERS)} #{doing.sequence}"
