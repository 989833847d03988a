"""Failure detection at one node: which ranks it watches, its own delay, and the state of each watched node. Pure.

Invariant: `b in watched(size, a)` if and only if `a in watchers(size, b)`. Every rank watches as many ranks as watch
it.

Own delay: a node short of CPU reads answers late, and peers on its host are as slow. So every deadline for a peer
extends by this node's own delay, measured by how late timers run and how long threads wait for a CPU. Invariant: it is
0 while the machine has CPU to spare, follows the measurements within seconds, and never exceeds `longest`.

States. A *packet* is anything the peer's transport sent; a *heartbeat* is sent by its Python code. QUIC answers on its
own thread, so packets without heartbeats mean that Python code does not run (a held GIL, an endless loop in C). Other
transports send nothing without Python.
- alive: no complaint.
- stuck: heartbeats stopped, or a call does not move. Not a loss: a call may wait for another rank.
- silent: nothing for `timeout`. A loss.
- hung: packets, but no heartbeat for `stuck_timeout`. A loss.

Time in which this node did not run does not count against peers: what arrived meanwhile is unread. Each state is
reported once, and `alive` when it ends.
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

WATCH_ALL_UP_TO: Final = 8  # up to this size every rank watches every other


def watchers(size: int, rank: Rank, topology: str = FULL_MESH) -> tuple[Rank, ...]:
    """The ranks that watch this one, ascending."""
    return _others(size, rank, +1, topology)


def watched(size: int, rank: Rank, topology: str = FULL_MESH) -> tuple[Rank, ...]:
    """The ranks that this one watches, ascending."""
    return _others(size, rank, -1, topology)


def _others(size: int, rank: Rank, direction: int, topology: str) -> tuple[Rank, ...]:
    if topology != FULL_MESH or size <= WATCH_ALL_UP_TO:
        # Neighbours in a sparse topology: watching needs no additional link, and a rank that relays through another
        # notices its end first. In a small world all ranks are neighbours.
        return neighbors(topology, size, rank)
    # In a large world the next two ranks and the one opposite on the ring watch a rank. Neighbours often share a host
    # and fail with it, the opposite one rarely does. Three are enough because every voter checks before a removal, and
    # their cost does not grow with the world.
    steps = (1, 2, size // 2)
    return tuple(sorted((rank + direction * step) % size for step in steps))


LONGEST: Final = 20.0  # seconds, whatever the settings are
_FORMATION_SHARE: Final = 1 / 3
_AVERAGE_TIME: Final = 3.0  # seconds after which a measurement counts for about a third of its value
# Thread switches, here and at the peer, that one answer takes: a connection, its handshake, a question.
STEPS_PER_ANSWER: Final = 10.0
# Seconds of lateness that count. A longer pause is a suspension, which does not predict the time after it.
_MAX_LATENESS: Final = LONGEST / STEPS_PER_ANSWER
_IDLE_LATENESS: Final = 0.05  # seconds of lateness of timers on an idle machine
# CPU seconds per second. With less, the wait of a thread says little about the duration of work.
_LEAST_SHARE: Final = 0.05
# Seconds by which a second of work may take longer before it counts: other processes run too.
_IDLE_SLOWDOWN: Final = 0.5


def longest_extension(formation_timeout: float) -> float:
    """Seconds by which a slow seed extends the formation timeout at most."""
    return min(LONGEST, formation_timeout * _FORMATION_SHARE)


class OwnDelay:
    """This node's own delay."""

    def __init__(self, longest: float = LONGEST) -> None:
        self._longest = min(longest, LONGEST)
        self._lateness = _Average()
        self._slowdown = _Average()
        self._totals: tuple[float, float, float] | None = None  # cpu, waited, when

    @property
    def seconds(self) -> float:
        late = self._lateness.value if self._lateness.value >= _IDLE_LATENESS else 0.0
        slow = self._slowdown.value if self._slowdown.value >= _IDLE_SLOWDOWN else 0.0
        return min(self._longest, max(STEPS_PER_ANSWER * late, slow))

    def timer_ran(self, due: float, now: float) -> None:
        self._lateness.add(min(_MAX_LATENESS, max(0.0, now - due)), now)

    def threads_used(self, cpu: float, waited: float, now: float) -> None:
        """Totals: CPU seconds, and seconds that threads were ready without a CPU."""
        # A total decreases when a thread ends; such a period is ignored.
        before, self._totals = self._totals, (cpu, waited, now)
        if before is None or now <= before[2]:
            return
        seconds = now - before[2]
        ran, lacked = (cpu - before[0]) / seconds, (waited - before[1]) / seconds
        if ran >= 0 and lacked >= 0:
            self._slowdown.add(min(LONGEST, lacked / max(ran, _LEAST_SHARE)), now)


class _Average:
    """Exponentially weighted over time."""

    def __init__(self) -> None:
        self.value = 0.0
        self._at: float | None = None

    def add(self, value: float, now: float) -> None:
        weight = 1.0 if self._at is None else 1.0 - math.exp(-(now - self._at) / _AVERAGE_TIME)
        self.value += weight * (value - self.value)
        self._at = now


LivenessState: TypeAlias = Literal["alive", "stuck", "silent", "hung"]

_LATE_INTERVALS: Final = 2.0  # Intervals by which a tick may be late before that counts as a pause of this node.
_NAME_CHARACTERS: Final = 60
# end of every cause that rests on a timeout
IF_SLOW: Final = "; if it was only slow, raise NEXAR_HEARTBEAT_TIMEOUT_SECS"


@dataclass(frozen=True, slots=True)
class LivenessReport:
    """A change of a node's state."""

    node: NodeId
    state: LivenessState
    since: float  # clock time at which it was last heard or its call last moved, not a duration
    doing: CurrentCall | None  # by its last heartbeat: the call that has not moved for longest
    cause: str  # text for people

    @property
    def is_loss(self) -> bool:
        return self.state in ("silent", "hung")


@dataclass(frozen=True, slots=True)
class PeerLiveness:
    """What is known of a node."""

    age: float  # seconds since anything arrived from it
    heartbeat: Beat | None
    heartbeat_age: (
        float  # Seconds since that heartbeat; without one, since it is watched or is heard again after a silence.
    )
    state: LivenessState  # as last reported


@dataclass(slots=True)
class _Watched:
    last_packet_at: float
    last_heartbeat_at: float
    received: float | None = None
    sends_when_stuck: bool = True
    heartbeat: Beat | None = None
    reported: LivenessState = "alive"
    reported_subject: object = None  # subject of the last "stuck" report


class FailureDetector:
    """Feed it what arrives and call `tick` when `due`."""

    def __init__(self, interval: float, timeout: float, stuck_timeout: float) -> None:
        self._interval = interval
        self._timeout = timeout
        self._stuck_timeout = stuck_timeout
        self._watched: dict[NodeId, _Watched] = {}
        self._ticked = float("-inf")  # when the last tick came
        self._expected: float | None = None  # when the next one should
        self._was_late = False  # the last tick
        # Seconds by which the limits of losses extend (`OwnDelay`). Written by the caller of `tick`.
        self.own_delay = 0.0

    def watch(self, nodes: Iterable[NodeId], now: float) -> None:
        """Watch exactly these nodes. New ones get a full timeout."""
        self._watched = {
            node: self._watched.get(node) or _Watched(last_packet_at=now, last_heartbeat_at=now) for node in nodes
        }
        if not self._watched:
            self._expected = None
        elif self._expected is None:
            self._expected = now + self._interval

    @property
    def watched(self) -> frozenset[NodeId]:
        return frozenset(self._watched)

    def record_traffic(self, node: NodeId, received: float, now: float, *, sends_when_stuck: bool = True) -> None:
        """`received`: the total so far, in any unit. `sends_when_stuck`: its transport sends even while its Python code
        is stuck.
        """
        seen = self._watched.get(node)
        if seen is not None:
            if seen.received is not None and received != seen.received:
                if now - seen.last_packet_at >= self._timeout:
                    seen.last_heartbeat_at = (
                        now  # it was cut off: neither heartbeats nor packets sent in that time say anything
                    )
                seen.last_packet_at = now
            seen.received, seen.sends_when_stuck = received, sends_when_stuck

    def record_heartbeat(self, node: NodeId, heartbeat: Beat, now: float) -> None:
        seen = self._watched.get(node)
        if seen is not None:
            seen.heartbeat, seen.last_heartbeat_at, seen.last_packet_at = heartbeat, now, now

    def known(self, node: NodeId, now: float) -> PeerLiveness | None:
        seen = self._watched.get(node)
        return (
            None
            if seen is None
            else PeerLiveness(now - seen.last_packet_at, seen.heartbeat, now - seen.last_heartbeat_at, seen.reported)
        )

    def due(self, now: float) -> float | None:
        if self._expected is None:
            return None
        limits = [limit for seen in self._watched.values() for limit in self._limits(seen) if limit > now]
        return min([self._expected, *limits])

    def _limits(self, seen: _Watched) -> tuple[float, ...]:
        delay = self.own_delay
        return (
            seen.last_packet_at + self._timeout + delay,
            seen.last_heartbeat_at + self._timeout,
            seen.last_heartbeat_at + self._stuck_timeout + delay,
        )

    def tick(self, now: float) -> list[LivenessReport]:
        """The changed states. Call `record_traffic` for the same moment first."""
        self._extend_for_own_pause(now)
        reports = [self._report_change(node, seen, now) for node, seen in self._watched.items()]
        self._ticked = now
        self._expected = now + self._interval if self._watched else None
        self._expected = self.due(now)
        return [report for report in reports if report is not None]

    # -- a pause of our own ------------------------------------------------------------------------------

    def _extend_for_own_pause(self, now: float) -> None:
        # What arrived during a pause may still be unread, so a node at its limit gets one more interval. Not twice in a
        # row: a node that is always late would never find a silent peer.
        late = 0.0 if self._expected is None else now - self._expected
        is_late = late > _LATE_INTERVALS * self._interval
        if is_late:
            least = now if self._was_late else now + self._interval
            for seen in self._watched.values():
                seen.last_packet_at = self._shifted(seen.last_packet_at, late, now, least)
                seen.last_heartbeat_at = self._shifted(seen.last_heartbeat_at, late, now, least)
        self._was_late = is_late

    def _shifted(self, moment: float, late: float, now: float, least: float) -> float:
        # `moment` moved on by the pause. A node past its limit before the pause stays past it.
        if moment + self._timeout <= self._ticked:
            return min(now, moment + late)
        return max(min(now, moment + late), least - self._timeout)

    # -- states ------------------------------------------------------------------------------------------

    def _report_change(self, node: NodeId, seen: _Watched, now: float) -> LivenessReport | None:
        report = self._state(node, seen, now)
        reported_subject = self._subject(report, seen) if report.state == "stuck" else None
        if (report.state, reported_subject) == (seen.reported, seen.reported_subject):
            return None
        seen.reported, seen.reported_subject = report.state, reported_subject
        return report

    def _state(self, node: NodeId, seen: _Watched, now: float) -> LivenessReport:
        # A packet that arrives after heartbeats were missing for long enough proves a live process that is stuck.
        # Without one the process may be dead, which is found a little later.
        doing = (
            max(seen.heartbeat.doing, key=lambda call: call.age, default=None) if seen.heartbeat is not None else None
        )
        silence, heartbeat_gap = now - seen.last_packet_at, seen.last_packet_at - seen.last_heartbeat_at
        if silence >= self._timeout + self.own_delay:
            return LivenessReport(node, "silent", seen.last_packet_at, doing, _silent_text(silence, seen, doing))
        if heartbeat_gap >= self._timeout:  # without own_delay: a "stuck" report removes nobody
            state: LivenessState = "stuck" if heartbeat_gap < self._stuck_timeout + self.own_delay else "hung"
            return LivenessReport(
                node, state, seen.last_heartbeat_at, doing, _stuck_text(now - seen.last_heartbeat_at, doing)
            )
        if doing is not None and doing.age >= self._timeout:
            age = doing.age + now - seen.last_heartbeat_at
            return LivenessReport(
                node, "stuck", now - age, doing, f"alive, stuck in {_name(doing)} for {format_seconds(age)}"
            )
        return LivenessReport(node, "alive", seen.last_packet_at, doing, "it is heard again")

    def _subject(self, report: LivenessReport, seen: _Watched) -> object:
        # Distinguishes the ways to be stuck: each one is reported.
        if seen.last_packet_at - seen.last_heartbeat_at >= self._timeout or report.doing is None:
            return "its heartbeats"
        return report.doing.communicator, report.doing.sequence


def _silent_text(silence: float, seen: _Watched, doing: CurrentCall | None) -> str:
    last = "" if doing is None else f", last seen in {_name(doing)}"
    if seen.sends_when_stuck:
        return f"no packet for {format_seconds(silence)}{last}: dead, stopped or cut off{IF_SLOW}"
    return f"nothing heard for {format_seconds(silence)}{last}: dead, stopped, stuck or cut off{IF_SLOW}"


def _stuck_text(heartbeat_gap: float, doing: CurrentCall | None) -> str:
    missing = f"no heartbeat for {format_seconds(heartbeat_gap)}"
    if doing is None:
        return f"alive but stuck, {missing}: its Python code does not run"
    return f"alive but stuck in {_name(doing)} for {format_seconds(doing.age + heartbeat_gap)}, {missing}"


def _name(doing: CurrentCall) -> str:
    # The operation as the peer wrote it, shortened.
    return f"{brief(doing.operation, _NAME_CHARACTERS)} #{doing.sequence}"
