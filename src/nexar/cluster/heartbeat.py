"""Beats to those who watch this node, and what is heard of those it watches.

A thread of its own wakes at every interval: it says what this node does, looks how much has come from each peer that
it watches, and tells what the failure detector finds. It sends without ever waiting, so a peer that takes nothing
delays nobody. Who is watched follows from the membership (`decisions.watchers`), and needs a link: from the first
moment there is one, for as long as the membership holds, whatever becomes of the link.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from nexar.clock import Clock, SystemClock
from nexar.cluster.control_threads import TimerThread
from nexar.cluster.decisions.failure_detector import FailureDetector, LivenessReport, PeerLiveness, watched, watchers
from nexar.cluster.delay_meter import DelayMeter
from nexar.cluster.membership import Membership
from nexar.cluster.node import Node
from nexar.errors import NexarError, UsageError
from nexar.links.link import Link
from nexar.types import NodeId
from nexar.wire.control import Beat, CurrentCall

_MOST_CALLS: Final = 16
"""In one beat: who is in more at once has told enough."""
_QUIC: Final = "quic"
"""Whose packets come while the Python code of the peer does not run."""


class BeatTimer(Protocol):
    """An Alarm, or what stands in for one."""

    def wake_by(self, due: float | None) -> None:
        """See Alarm."""

    def close(self) -> None:
        """See Alarm."""


class Heartbeat:
    """Of one node. Quiet until a membership is adopted. Close it, but not from inside `found`."""

    def __init__(
        self,
        node: Node,
        links: Callable[[], Mapping[NodeId, Link]],
        doing: Callable[[], tuple[tuple[CurrentCall, ...], str]],
        found: Callable[[LivenessReport], None],
        *,
        meter: DelayMeter | None = None,
        clock: Clock | None = None,
        alarm: Callable[[Callable[[float], float | None]], BeatTimer] = TimerThread,
    ) -> None:
        """`links` are those that are, or were, open; `doing` is what this node does and the last call it finished;
        `found` is told what is new of a node, which may have left the membership meanwhile. All three are called by the
        thread of the heartbeat and must not wait. `meter` is told how late that thread runs, and says how much longer
        to wait for the others.
        """
        config = node.config
        self._me = node.id
        self._topology: Final[str] = config.topology
        self._links = links
        self._doing = doing
        self._found = found
        self._clock = clock or SystemClock()
        self._interval = config.heartbeat_interval
        self._lock = threading.Lock()  # over everything below
        self._detector = FailureDetector(config.heartbeat_interval, config.heartbeat_timeout, config.stuck_timeout)
        self._epoch = 0
        self._watchers: tuple[NodeId, ...] = ()
        self._watched: tuple[NodeId, ...] = ()
        self._next_beat = 0.0
        self._meter = meter
        self._ringing: float | None = None  # when the next ring is due; the thread of the heartbeat writes
        self._timer = alarm(self._on_timer)

    # -- any thread --------------------------------------------------------------------------------------

    def adopt(self, membership: Membership) -> None:
        """From now on these are the members; who stays is not forgotten. A beat goes out at once."""
        rank = membership.rank_of(self._me)
        if rank is None:
            raise UsageError("this node is not in the membership that it is given")
        members, size, now = membership.members, membership.size, self._clock.now()
        with self._lock:
            self._epoch = membership.epoch
            self._watchers = tuple(members[other].node for other in watchers(size, rank, self._topology))
            self._watched = tuple(members[other].node for other in watched(size, rank, self._topology))
            self._detector.watch(self._detector.watched & frozenset(self._watched), now)
            self._next_beat = now
        self._timer.wake_by(now)

    def arrived(self, peer: NodeId, beat: Beat) -> None:
        """A peer has said that it is alive. Never waits."""
        with self._lock:
            self._detector.beat(peer, beat, self._clock.now())

    def known(self, node: NodeId) -> PeerLiveness | None:
        """What is known of a node now. None: it is not watched from here."""
        with self._lock:
            return self._detector.known(node, self._clock.now())

    def close(self) -> None:
        """Nothing is said or told any more when this returns. Idempotent."""
        self._timer.close()

    # -- the thread --------------------------------------------------------------------------------------

    def _on_timer(self, now: float) -> float | None:
        self._measure(now)
        links = self._links()
        with self._lock:
            epoch, told, wanted = self._epoch, self._take_turn(now), self._watched
        if told:
            self._beat(links, told, epoch)
        counts = {node: _received(links[node]) for node in wanted if node in links}
        with self._lock:
            findings = self._look(links, counts, now)
            due = self._due(now)
        for finding in findings:
            self._found(finding)
        self._ringing = due
        return due

    def _measure(self, now: float) -> None:
        """How late this ring is. An earlier one than expected, for a new membership, measures nothing."""
        if self._meter is not None and self._ringing is not None and now >= self._ringing:
            self._meter.timer_ran(self._ringing, now)

    def _take_turn(self, now: float) -> tuple[NodeId, ...]:
        """Whom to tell now. Under the lock."""
        if now < self._next_beat:
            return ()
        self._next_beat = now + self._interval
        return self._watchers

    def _beat(self, links: Mapping[NodeId, Link], nodes: tuple[NodeId, ...], epoch: int) -> None:
        doing, finished = self._doing()
        beat = Beat(epoch, doing[:_MOST_CALLS], finished)
        for node in nodes:
            link = links.get(node)
            if link is not None and link.failure is None:
                _send_beat(link, beat)

    def _look(
        self, links: Mapping[NodeId, Link], counts: Mapping[NodeId, float | None], now: float
    ) -> list[LivenessReport]:
        """Under the lock. Whoever left the membership since the counts were taken is not watched any more."""
        detector = self._detector
        detector.watch([node for node in self._watched if node in counts or node in detector.watched], now)
        for node, count in counts.items():
            if count is not None:
                detector.packets(node, count, now, tells_apart=_QUIC in links[node].schemes)
        detector.own_delay = 0.0 if self._meter is None else self._meter.seconds
        return detector.tick(now)

    def _due(self, now: float) -> float | None:
        """Under the lock."""
        beats = self._next_beat if self._watchers else None
        return min((due for due in (self._detector.due(now), beats) if due is not None), default=None)


def _received(link: Link) -> float | None:
    """None for a link that is lost: that its carriers are gone is no sign of life."""
    count = link.heard_bytes()
    return count if link.failure is None else None


def _send_beat(link: Link, beat: Beat) -> None:
    """A peer that takes nothing, or a link that has just been lost, is found by what is not heard of it."""
    try:
        link.send_control(beat)
    except NexarError:
        return
