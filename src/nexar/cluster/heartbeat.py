"""Sends heartbeats to the watchers of this node and checks the nodes it watches.

The control loop sends without blocking, so a peer that does not read delays no other. A node is watched from its first
link until it leaves the membership.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Mapping
from typing import Final

from nexar.cluster.control_loop import ControlLoop
from nexar.cluster.decisions.failure_detector import FailureDetector, LivenessReport, PeerLiveness, watched, watchers
from nexar.cluster.delay_meter import DelayMeter
from nexar.cluster.membership import Membership
from nexar.cluster.node import Node
from nexar.errors import NexarError, UsageError
from nexar.links.carrier_selection import shows_life
from nexar.links.link import Link
from nexar.types import NodeId
from nexar.wire.control import Beat, CurrentCall

_MAX_CALLS: Final = 16  # in one heartbeat


class Heartbeat:
    """Idle until `adopt`. Do not close it inside `report`."""

    def __init__(
        self,
        node: Node,
        links: Callable[[], Mapping[NodeId, Link]],
        doing: Callable[[], tuple[tuple[CurrentCall, ...], str]],
        report: Callable[[LivenessReport], None],
        *,
        control_loop: ControlLoop,
        meter: DelayMeter | None = None,
    ) -> None:
        """`links` are or were open. `doing` returns the current calls and the last finished one. `report` may concern
        nodes that have just left. The control loop calls all three, any thread `links`; they must not block.
        """
        config = node.config
        self._me = node.id
        self._topology: Final[str] = config.topology
        self._links = links
        self._doing = doing
        self._report = report
        self._loop = control_loop
        self._interval = config.heartbeat_interval
        self._lock = threading.Lock()  # guards everything below
        self._detector = FailureDetector(config.heartbeat_interval, config.heartbeat_timeout, config.stuck_timeout)
        self._epoch = 0
        self._watchers: tuple[NodeId, ...] = ()
        self._watched: tuple[NodeId, ...] = ()
        self._next_sending = 0.0
        self._meter = meter
        self._next_timer: float | None = None  # when the next timer is due; written by the control loop
        self._timer = control_loop.call_at(None, self._on_timer)

    # -- any thread --------------------------------------------------------------------------------------

    def adopt(self, membership: Membership) -> None:
        """Known members stay known. New ones cause a heartbeat at once."""
        rank = membership.rank_of(self._me)
        if rank is None:
            raise UsageError("this node is not in the membership that it is given")
        members, size, now = membership.members, membership.size, self._loop.now()
        with self._lock:
            known = {*self._watchers, *self._watched}
            self._epoch = membership.epoch
            self._watchers = tuple(members[other].node for other in watchers(size, rank, self._topology))
            self._watched = tuple(members[other].node for other in watched(size, rank, self._topology))
            self._detector.watch(self._detector.watched & frozenset(self._watched), now)
            has_new = not known.issuperset((*self._watchers, *self._watched))
            if has_new:
                self._next_sending = now
        if has_new:  # otherwise the control loop would disturb the thread that builds the next communicator
            self._timer.wake_by(now)

    def arrived(self, peer: NodeId, heartbeat: Beat) -> None:
        """Never blocks."""
        with self._lock:
            self._detector.record_heartbeat(peer, heartbeat, self._loop.now())

    def known(self, node: NodeId) -> PeerLiveness | None:
        """None if the node is not watched, or has no link yet."""
        links, now = self._links(), self._loop.now()
        with self._lock:
            self._watch_linked(links, now)  # the link may be newer than the last timer
            return self._detector.known(node, now)

    def close(self) -> None:
        """Nothing is sent or reported afterwards. Idempotent."""
        self._timer.close()

    # -- control loop ------------------------------------------------------------------------------------

    def _on_timer(self, now: float) -> float | None:
        self._measure(now)
        links = self._links()
        with self._lock:
            epoch, receivers, wanted = self._epoch, self._due_receivers(now), self._watched
        if receivers:
            self._send(links, receivers, epoch)
        counts = {node: _received(links[node]) for node in wanted if node in links}
        with self._lock:
            reports = self._check(links, counts, now)
            due = self._due(now)
        for each in reports:
            self._report(each)
        self._next_timer = due
        return due

    def _measure(self, now: float) -> None:
        # An early timer, for a new membership, measures nothing.
        if self._meter is not None and self._next_timer is not None and now >= self._next_timer:
            self._meter.timer_ran(self._next_timer, now)

    def _due_receivers(self, now: float) -> tuple[NodeId, ...]:
        """Under the lock."""
        if now < self._next_sending:
            return ()
        self._next_sending = now + self._interval
        return self._watchers

    def _send(self, links: Mapping[NodeId, Link], nodes: tuple[NodeId, ...], epoch: int) -> None:
        doing, finished = self._doing()
        heartbeat = Beat(epoch, doing[:_MAX_CALLS], finished)
        for node in nodes:
            link = links.get(node)
            if link is not None and link.failure is None:
                _send_or_ignore(link, heartbeat)

    def _check(
        self, links: Mapping[NodeId, Link], counts: Mapping[NodeId, float | None], now: float
    ) -> list[LivenessReport]:
        """Under the lock. Skips nodes that left since the counts were taken."""
        detector = self._detector
        self._watch_linked(counts, now)
        for node, count in counts.items():
            if count is not None:
                detector.record_traffic(node, count, now, sends_when_stuck=shows_life(links[node].schemes))
        detector.own_delay = 0.0 if self._meter is None else self._meter.seconds
        return detector.tick(now)

    def _watch_linked(self, linked: Container[NodeId], now: float) -> None:
        """Under the lock."""
        detector = self._detector
        detector.watch([node for node in self._watched if node in linked or node in detector.watched], now)

    def _due(self, now: float) -> float | None:
        """Under the lock."""
        sending = self._next_sending if self._watchers else None
        return min((due for due in (self._detector.due(now), sending) if due is not None), default=None)


def _received(link: Link) -> float | None:
    # For a lost link None: the end of its carriers is no sign of life.
    count = link.heard_bytes()
    return count if link.failure is None else None


def _send_or_ignore(link: Link, heartbeat: Beat) -> None:
    # The failure detector notices the silence.
    try:
        link.send_control(heartbeat)
    except NexarError:
        return
