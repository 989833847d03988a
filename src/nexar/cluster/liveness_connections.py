"""Idle TLS connections whose end shows that a process has died.

QUIC is silent when a process dies; the system closes a TCP connection at once. So watcher and watched node keep an idle
TLS connection, unless shared memory or TLS connects them already. The lower rank dials. A broken connection is only a
hint of a death; a properly closed one is not.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from msgspec.structs import replace

from nexar.cluster.control_loop import ControlLoop
from nexar.cluster.decisions.failure_detector import watched, watchers
from nexar.cluster.decisions.peering import PeerDirectory
from nexar.cluster.handshake import AnsweringHandshake, DialSuperseded, PeerDial, PeerDialFailed, send_control
from nexar.cluster.membership import Member, Membership
from nexar.cluster.node import Node
from nexar.errors import UsageError
from nexar.links.carrier_selection import closes_on_death, shares_memory
from nexar.links.link import Link
from nexar.transport.base import Carrier, CarrierLost
from nexar.transport.registry import tcp_scheme
from nexar.types import NodeId, format_node
from nexar.wire.control import Introduce, Introduced
from nexar.wire.frame import Frame

_log = logging.getLogger(__name__)


class LivenessConnection:
    """The sink of an idle carrier, made inside a call of the previous sink. Unless aborted, the driver calls `over`
    once: with the cause, or None if the peer finished.
    """

    def __init__(self, carrier: Carrier, over: Callable[[LivenessConnection, str | None], None]) -> None:
        self._carrier = carrier
        self._over = over
        self._reported = False  # written by the driver
        self.peer: Final[NodeId] = carrier.peer.node
        carrier.attach(self)

    def finish(self) -> None:
        """`over` follows when the peer has finished too. Any thread."""
        try:
            self._carrier.finish()
        except CarrierLost:
            return  # ended meanwhile: `over` is called

    def abort(self, reason: str) -> None:
        """Any thread."""
        self._carrier.abort(reason)

    def frame_arrived(self, carrier: Carrier, frame: Frame, body: memoryview) -> None:
        carrier.abort("no data is allowed on a liveness connection")
        self._report("it sent data on a liveness connection")

    def payload_arrived(self, carrier: Carrier, transfer: int) -> None:
        """Not expected."""

    def carrier_finished(self, carrier: Carrier) -> None:
        self.finish()
        self._report(None)

    def carrier_lost(self, carrier: Carrier, error: CarrierLost) -> None:
        self._report(f"its connection ended: {error.reason}")

    def _report(self, cause: str | None) -> None:
        if not self._reported:
            self._reported = True
            self._over(self, cause)


_LONGEST_DIAL: Final = 10.0
_LONGEST_CLOSE: Final = 1.0
_FIRST_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 30.0
_MEMORY_GRACE: Final = 2.0
"""Seconds for shared memory to join a link before a connection is dialed."""
_MAX_DIALS: Final = 4  # at a time


class LivenessDial(PeerDial):
    """Dials a liveness connection beside a link."""

    def __init__(
        self, node: Node, member: Member, link: Link, directory: PeerDirectory, take: Callable[[Carrier], None]
    ) -> None:
        """`take` is called inside the sink call."""
        introduce = replace(directory.introduction(), death_line=True)
        super().__init__(node, member, link, introduce, directory.why_not_accepted)
        self._on_taken = take

    def _connect_carrier(self, deadline: float) -> Carrier:
        return self._node.connect_liveness(self._member, deadline)

    def _adopt(self, carrier: Carrier) -> None:
        self._on_taken(carrier)

    def _after_open(self, answer: Introduced, deadline: float) -> None:
        """Does nothing."""


@dataclass(slots=True)
class _WantedConnection:
    member: Member
    since: float  # first wanted
    due: float  # next check
    pause: float = _FIRST_PAUSE
    dialing: bool = False


class LivenessConnections:
    """Idle until `adopt`. Close it before the mesh."""

    def __init__(
        self,
        node: Node,
        links: Callable[[], Mapping[NodeId, Link]],
        ended: Callable[[NodeId, str], None],
        *,
        control_loop: ControlLoop,
    ) -> None:
        """`links` are or were open. The driver calls `ended` with the cause when a connection breaks; it must not
        block.
        """
        self._node = node
        self._links = links
        self._ended = ended
        self._changed = threading.Condition()  # guards everything below
        self._directory: PeerDirectory | None = None
        self._goals: dict[NodeId, _WantedConnection] = {}
        self._connections: dict[NodeId, LivenessConnection] = {}
        self._finishing: set[LivenessConnection] = set()  # finished by this side, not yet by the peer
        self._closed = False
        self._timer = control_loop.call_at(None, self._on_timer)
        if tcp_scheme(node.schemes) is None:
            _log.debug("no liveness connections without tls: only silence shows that a process died")

    # -- any thread --------------------------------------------------------------------------------------

    def adopt(self, membership: Membership) -> None:
        directory = PeerDirectory(self._node.id, membership)
        if membership.rank_of(self._node.id) is None:
            raise UsageError("this node is not in the membership that it is given")
        wanted = _neighbours(directory, self._node.config.topology)
        now = time.monotonic()
        with self._changed:
            self._directory = directory
            self._goals = {node: self._goal(member, now) for node, member in wanted.items() if self._dials(node)}
            gone = [self._connections.pop(node) for node in list(self._connections) if node not in wanted]
            self._finishing.update(connection for connection in gone if directory.find(connection.peer) is not None)
            due = min((goal.due for goal in self._goals.values()), default=None)
        for connection in gone:
            if directory.find(connection.peer) is None:
                connection.abort("you are no longer a member")
            else:
                connection.finish()
        self._timer.wake_by(due)

    def _goal(self, member: Member, now: float) -> _WantedConnection:
        """A new one is due now, or once memory could have joined the link; others soon, not while the next communicator
        is built.
        """
        old = self._goals.get(member.node)
        if old is None:
            return _WantedConnection(member, now, now + _MEMORY_GRACE if self._may_share_memory(member) else now)
        old.due, old.pause = min(old.due, now + _FIRST_PAUSE), _FIRST_PAUSE
        return old

    def _dials(self, node: NodeId) -> bool:
        """Whether this node dials: it has the lower rank and TLS. Under the lock."""
        directory = self._directory
        if directory is None or tcp_scheme(self._node.schemes) is None:
            return False
        return directory.rank < directory.rank_of(node)

    @property
    def peers(self) -> frozenset[NodeId]:
        with self._changed:
            return frozenset(self._connections)

    def close(self) -> None:
        """Finish all connections within _LONGEST_CLOSE. Not in the driver. Idempotent."""
        with self._changed:
            self._closed = True
            connections = list(self._connections.values())
            self._connections.clear()
            self._finishing.update(connections)
        self._timer.close()
        for connection in connections:
            connection.finish()
        with self._changed:
            self._changed.wait_for(lambda: not self._finishing, _LONGEST_CLOSE)
            silent = list(self._finishing)
            self._finishing.clear()
        for connection in silent:
            connection.abort("this node is closed")

    # -- connections dialed by peers: called by the driver, inside the sink of the introduction ------------

    def why_refused(self, carrier: Carrier, introduce: Introduce) -> str | None:
        if introduce.death_line and tcp_scheme([carrier.scheme]) is None:
            return f"a liveness connection uses tls, not {carrier.scheme}"
        return None

    def take(self, dialer: AnsweringHandshake, answer: Introduced) -> None:
        self._adopt_carrier(dialer.carrier)
        try:
            send_control(dialer.carrier, answer)
        except CarrierLost:
            return  # the connection is notified

    # -- connections dialed by this node -------------------------------------------------------------------

    def _on_timer(self, now: float) -> float | None:
        links = self._links()
        with self._changed:
            dials = [
                self._begin(goal, links[node]) for node, goal in self._goals.items() if self._needs(node, links, now)
            ]
            due = min((goal.due for goal in self._goals.values() if not goal.dialing), default=None)
        for goal, dial in dials:
            if not self._node.dialer.try_in_thread(dial, "a liveness connection is not dialed"):
                again = self._end_dial(goal)
                due = again if due is None else min(due, again)
        return due

    def _needs(self, node: NodeId, links: Mapping[NodeId, Link], now: float) -> bool:
        """Sets the next check. Under the lock."""
        goal, link = self._goals[node], links.get(node)
        if goal.dialing or goal.due > now or self._closed:
            return False
        goal.due, goal.pause = now + goal.pause, min(2 * goal.pause, _LONGEST_PAUSE)
        if node in self._connections or link is None or link.failure is not None or closes_on_death(link.schemes):
            return False
        if now < goal.since + _MEMORY_GRACE and self._may_share_memory(goal.member):
            return False
        return sum(other.dialing for other in self._goals.values()) < _MAX_DIALS

    def _may_share_memory(self, member: Member) -> bool:
        return member.host == self._node.host and shares_memory(member.capabilities & self._node.schemes)

    def _begin(self, goal: _WantedConnection, link: Link) -> tuple[_WantedConnection, Callable[[], None]]:
        """Under the lock."""
        assert self._directory is not None
        goal.dialing = True
        dial = LivenessDial(self._node, goal.member, link, self._directory, self._adopt_carrier)
        return goal, partial(self._run, dial, goal)

    def _run(self, dial: LivenessDial, goal: _WantedConnection) -> None:
        try:
            dial.run(time.monotonic() + _LONGEST_DIAL)
        except (PeerDialFailed, DialSuperseded) as failed:
            _log.debug("no liveness connection to node %s: %s", format_node(goal.member.node), failed)
        finally:
            self._timer.wake_by(self._end_dial(goal))

    def _end_dial(self, goal: _WantedConnection) -> float:
        """Returns when it is checked again."""
        with self._changed:
            goal.dialing = False
            goal.due = time.monotonic() + goal.pause
            return goal.due

    # -- both kinds: called by the driver --------------------------------------------------------------------

    def _adopt_carrier(self, carrier: Carrier) -> None:
        """Inside the carrier's sink call."""
        connection = LivenessConnection(carrier, self._over)
        with self._changed:
            closed = self._closed
            old = None if closed else self._connections.get(connection.peer)
            if not closed:
                self._connections[connection.peer] = connection
        if closed:
            connection.abort("this node is closed")
        elif old is not None:
            old.abort("you have reconnected")

    def _over(self, connection: LivenessConnection, cause: str | None) -> None:
        with self._changed:
            self._finishing.discard(connection)
            mine = self._connections.get(connection.peer) is connection
            if mine:
                del self._connections[connection.peer]
                self._schedule_check(connection.peer)
            self._changed.notify_all()
        if mine and cause is not None:
            self._ended(connection.peer, cause)

    def _schedule_check(self, node: NodeId) -> None:
        """Under the lock."""
        goal = self._goals.get(node)
        if goal is not None:
            goal.due, goal.pause = time.monotonic() + _FIRST_PAUSE, _FIRST_PAUSE
            self._timer.wake_by(goal.due)


def _neighbours(directory: PeerDirectory, topology: str) -> dict[NodeId, Member]:
    membership, rank = directory.membership, directory.rank
    size = membership.size
    ranks = {*watchers(size, rank, topology), *watched(size, rank, topology)}
    return {membership.members[other].node: membership.members[other] for other in sorted(ranks)}
