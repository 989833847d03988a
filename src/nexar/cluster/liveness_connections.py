"""One idle connection whose end is the news.

Idle connections whose end is the news that a process has ended.

QUIC says nothing when a process dies: its peers hear less and less. The system closes a TCP connection at once. So two
nodes of which one watches the other keep a TLS connection between them on which nothing is said but the introduction;
where shared memory or TLS connects them already, that one tells as much and there is no other. The lower rank dials,
and dials again, with pauses, for as long as the membership holds.

The end of a line is a hint and no proof: whoever is told of it looks for itself. A line that was closed politely is no
hint.
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

from nexar.cluster.control_threads import TimerThread
from nexar.cluster.decisions.failure_detector import watched, watchers
from nexar.cluster.decisions.peering import PeerDirectory
from nexar.cluster.handshake import AnsweringHandshake, DialSuperseded, PeerDial, PeerDialFailed, send_control
from nexar.cluster.membership import Member, Membership
from nexar.cluster.node import Node
from nexar.errors import UsageError
from nexar.links.link import Link
from nexar.transport.base import Carrier, CarrierLost
from nexar.types import NodeId, format_node
from nexar.wire.control import Introduce, Introduced
from nexar.wire.frame import Frame


class LivenessConnection:
    """The sink of its carrier from the moment it is made: inside a call of the sink that the carrier had before.

    `over` is called once, on the driving thread: with how it ended, or None if the peer closed it politely. After an
    `abort` it is not called.
    """

    def __init__(self, carrier: Carrier, over: Callable[[LivenessConnection, str | None], None]) -> None:
        self._carrier = carrier
        self._over = over
        self._told = False  # the driving thread writes
        self.peer: Final[NodeId] = carrier.peer.node
        carrier.attach(self)

    def finish(self) -> None:
        """Close it politely; `over` is called when the peer has agreed. Any thread."""
        try:
            self._carrier.finish()
        except CarrierLost:
            return  # it ended by itself meanwhile, and `over` is or was called

    def abort(self, reason: str) -> None:
        """End it now. Any thread."""
        self._carrier.abort(reason)

    def frame_arrived(self, carrier: Carrier, frame: Frame, body: memoryview) -> None:
        """See Sink. Who speaks here has a use for it that we do not know."""
        carrier.abort("nothing is said on a death line")
        self._tell("it spoke on a line where nothing is said")

    def payload_arrived(self, carrier: Carrier, transfer: int) -> None:
        """See Sink. None is expected."""

    def carrier_finished(self, carrier: Carrier) -> None:
        """See Sink."""
        self.finish()
        self._tell(None)

    def carrier_lost(self, carrier: Carrier, error: CarrierLost) -> None:
        """See Sink."""
        self._tell(f"its connection ended: {error.reason}")

    def _tell(self, cause: str | None) -> None:
        if not self._told:
            self._told = True
            self._over(self, cause)


_log = logging.getLogger(__name__)

_TLS: Final = "tls"
_MEMORY: Final = "shm"
_TELLING: Final = frozenset({_TLS, _MEMORY, "memory"})
"""Schemes whose carriers end at once with the process of the peer."""
_LONGEST_DIAL: Final = 10.0
_LONGEST_CLOSE: Final = 1.0
_FIRST_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 30.0
_MEMORY_GRACE: Final = 2.0
"""Seconds that shared memory has to join a link between two nodes of one host, before it is not counted on."""
_MOST_DIALS: Final = 4  # at the same time


class LivenessDial(PeerDial):
    """One dial of a member to which there is a link. `run` it once."""

    def __init__(
        self, node: Node, member: Member, link: Link, directory: PeerDirectory, take: Callable[[Carrier], None]
    ) -> None:
        """`take` gets the carrier inside the call of its sink."""
        introduce = replace(directory.introduction(), death_line=True)
        super().__init__(node, member, link, introduce, directory.why_not_accepted)
        self._line_taken = take

    def _reach(self, deadline: float) -> Carrier:
        return self._node.connect_line(self._member, deadline)

    def _adopt(self, carrier: Carrier) -> None:
        self._line_taken(carrier)

    def _go_on(self, answer: Introduced, deadline: float) -> None:
        """There is nothing more to say."""


@dataclass(slots=True)
class _WantedConnection:
    """A peer to which this node is to keep a line."""

    member: Member
    since: float
    """When it was first wanted."""
    due: float
    """When to look again whether there is one."""
    pause: float = _FIRST_PAUSE
    dialing: bool = False


class LivenessConnections:
    """Of one node. Nothing happens before a membership is adopted. Close it before the mesh."""

    def __init__(
        self,
        node: Node,
        links: Callable[[], Mapping[NodeId, Link]],
        ended: Callable[[NodeId, str], None],
    ) -> None:
        """`links` are those that are, or were, open. `ended` is told, on the driving thread, when a line to a member
        ended without a farewell, and how; it must not block.
        """
        self._node = node
        self._links = links
        self._ended = ended
        self._changed = threading.Condition()  # over everything below
        self._directory: PeerDirectory | None = None
        self._goals: dict[NodeId, _WantedConnection] = {}
        self._lines: dict[NodeId, LivenessConnection] = {}
        self._parting: set[LivenessConnection] = set()  # closed politely by this side, and the peer has not agreed yet
        self._closed = False
        self._timer = TimerThread(self._on_timer)
        if _TLS not in node.capabilities:
            _log.debug("no death lines: this node has no tls, so silence alone tells of a death")

    # -- any thread --------------------------------------------------------------------------------------

    def adopt(self, membership: Membership) -> None:
        """From now on these are the members. Lines to who stays a neighbour stay, the others are closed."""
        directory = PeerDirectory(self._node.id, membership)
        if membership.rank_of(self._node.id) is None:
            raise UsageError("this node is not in the membership that it is given")
        wanted = _neighbours(directory, self._node.config.topology)
        now = time.monotonic()
        with self._changed:
            self._directory = directory
            self._goals = {node: self._goal(member, now) for node, member in wanted.items() if self._dials(node)}
            gone = [self._lines.pop(node) for node in list(self._lines) if node not in wanted]
            self._parting.update(line for line in gone if directory.find(line.peer) is not None)
        for line in gone:
            if directory.find(line.peer) is None:
                line.abort("you are no member any more")
            else:
                line.finish()
        self._timer.wake_by(now)

    def _goal(self, member: Member, now: float) -> _WantedConnection:
        """Who was reached, or not, under the last membership is tried anew under this one."""
        old = self._goals.get(member.node)
        if old is None:
            return _WantedConnection(member, since=now, due=now)
        old.due, old.pause = now, _FIRST_PAUSE
        return old

    def _dials(self, node: NodeId) -> bool:
        """The lower rank does, if it can at all. Under the lock."""
        directory = self._directory
        return directory is not None and directory.rank < directory.rank_of(node) and _TLS in self._node.capabilities

    @property
    def peers(self) -> frozenset[NodeId]:
        """To whom there is a line now."""
        with self._changed:
            return frozenset(self._lines)

    def close(self) -> None:
        """Every line politely; who has not agreed within a moment is left. Not on the driving thread. Idempotent."""
        with self._changed:
            self._closed = True
            lines = list(self._lines.values())
            self._lines.clear()
            self._parting.update(lines)
        self._timer.close()
        for line in lines:
            line.finish()
        with self._changed:
            self._changed.wait_for(lambda: not self._parting, _LONGEST_CLOSE)
            silent = list(self._parting)
            self._parting.clear()
        for line in silent:
            line.abort("this node is closed")

    # -- lines that others dial: the driving thread, inside the sink of the introduction -------------------

    def why_not(self, carrier: Carrier, introduce: Introduce) -> str | None:
        """Why a connection that introduces itself so is not wanted; None if it is, or is no death line."""
        if introduce.death_line and carrier.scheme != _TLS:
            return f"a death line is a tls connection, not a {carrier.scheme} one"
        return None

    def take(self, dialer: AnsweringHandshake, answer: Introduced) -> None:
        """A member has dialed for a line: it is one from now on, and the dialer is told `answer`."""
        self._use(dialer.carrier)
        try:
            send_control(dialer.carrier, answer)
        except CarrierLost:
            return  # the line hears of it

    # -- lines that this node dials ------------------------------------------------------------------------

    def _on_timer(self, now: float) -> float | None:
        links = self._links()
        with self._changed:
            dials = [
                self._begin(goal, links[node]) for node, goal in self._goals.items() if self._needs(node, links, now)
            ]
            due = min((goal.due for goal in self._goals.values() if not goal.dialing), default=None)
        for dial in dials:
            self._node.dialer.run_in_thread(dial)
        return due

    def _needs(self, node: NodeId, links: Mapping[NodeId, Link], now: float) -> bool:
        """Whether to dial now. Under the lock; sets when to look again."""
        goal, link = self._goals[node], links.get(node)
        if goal.dialing or goal.due > now or self._closed:
            return False
        goal.due, goal.pause = now + goal.pause, min(2 * goal.pause, _LONGEST_PAUSE)
        if node in self._lines or link is None or link.failure is not None or not _TELLING.isdisjoint(link.schemes):
            return False
        if now < goal.since + _MEMORY_GRACE and self._may_share_memory(goal.member):
            return False
        return sum(other.dialing for other in self._goals.values()) < _MOST_DIALS

    def _may_share_memory(self, member: Member) -> bool:
        return member.host == self._node.host and _MEMORY in member.capabilities & self._node.capabilities

    def _begin(self, goal: _WantedConnection, link: Link) -> Callable[[], None]:
        """Under the lock."""
        assert self._directory is not None
        goal.dialing = True
        dial = LivenessDial(self._node, goal.member, link, self._directory, self._use)
        return partial(self._run, dial, goal)

    def _run(self, dial: LivenessDial, goal: _WantedConnection) -> None:
        try:
            dial.run(time.monotonic() + _LONGEST_DIAL)
        except (PeerDialFailed, DialSuperseded) as failed:
            _log.debug("no death line to node %s: %s", format_node(goal.member.node), failed)
        finally:
            with self._changed:
                goal.dialing = False
                goal.due = time.monotonic() + goal.pause
            self._timer.wake_by(goal.due)

    # -- lines of both kinds: the driving thread -------------------------------------------------------------

    def _use(self, carrier: Carrier) -> None:
        """Inside a call of the sink that the carrier has."""
        line = LivenessConnection(carrier, self._over)
        with self._changed:
            closed = self._closed
            old = None if closed else self._lines.get(line.peer)
            if not closed:
                self._lines[line.peer] = line
        if closed:
            line.abort("this node is closed")
        elif old is not None:
            old.abort("you have dialed anew")

    def _over(self, line: LivenessConnection, cause: str | None) -> None:
        """It has ended; without a cause: politely."""
        with self._changed:
            self._parting.discard(line)
            mine = self._lines.get(line.peer) is line
            if mine:
                del self._lines[line.peer]
                self._look_again(line.peer)
            self._changed.notify_all()
        if mine and cause is not None:
            self._ended(line.peer, cause)

    def _look_again(self, node: NodeId) -> None:
        """Under the lock."""
        goal = self._goals.get(node)
        if goal is not None:
            goal.due, goal.pause = time.monotonic() + _FIRST_PAUSE, _FIRST_PAUSE
            self._timer.wake_by(goal.due)


def _neighbours(directory: PeerDirectory, topology: str) -> dict[NodeId, Member]:
    """Whom this node watches, and who watches it."""
    membership, rank = directory.membership, directory.rank
    size = membership.size
    ranks = {*watchers(size, rank, topology), *watched(size, rank, topology)}
    return {membership.members[other].node: membership.members[other] for other in sorted(ranks)}
