"""Idle connections whose end is the news that a process has ended.

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

from nexar.cluster.alarm import Alarm
from nexar.cluster.circle import Circle
from nexar.cluster.death_line import DeathLine
from nexar.cluster.decisions.watchers import watched, watchers
from nexar.cluster.dial import Dial, DialFailed, Superseded
from nexar.cluster.introduction import Answering, say
from nexar.cluster.membership import Member, Membership
from nexar.cluster.node import Node
from nexar.errors import UsageError
from nexar.links.link import Link
from nexar.transport.base import Carrier, CarrierLost
from nexar.types import NodeId, format_node
from nexar.wire.messages import Introduce, Introduced

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


class LineDial(Dial):
    """One dial of a member to which there is a link. `run` it once."""

    def __init__(self, node: Node, member: Member, link: Link, circle: Circle, take: Callable[[Carrier], None]) -> None:
        """`take` gets the carrier inside the call of its sink."""
        introduce = replace(circle.introduction(), death_line=True)
        super().__init__(node, member, link, introduce, circle.fault_of)
        self._line_taken = take

    def _reach(self, deadline: float) -> Carrier:
        return self._node.connect_line(self._member, deadline)

    def _adopt(self, carrier: Carrier) -> None:
        self._line_taken(carrier)

    def _go_on(self, answer: Introduced, deadline: float) -> None:
        """There is nothing more to say."""


@dataclass(slots=True)
class _Goal:
    """A peer to which this node is to keep a line."""

    member: Member
    since: float
    """When it was first wanted."""
    due: float
    """When to look again whether there is one."""
    pause: float = _FIRST_PAUSE
    dialing: bool = False


class DeathLines:
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
        self._circle: Circle | None = None
        self._goals: dict[NodeId, _Goal] = {}
        self._lines: dict[NodeId, DeathLine] = {}
        self._parting: set[DeathLine] = set()  # closed politely by this side, and the peer has not agreed yet
        self._closed = False
        self._alarm = Alarm(self._ring)
        if _TLS not in node.capabilities:
            _log.debug("no death lines: this node has no tls, so silence alone tells of a death")

    # -- any thread --------------------------------------------------------------------------------------

    def adopt(self, membership: Membership) -> None:
        """From now on these are the members. Lines to who stays a neighbour stay, the others are closed."""
        circle = Circle(self._node.id, membership)
        if membership.rank_of(self._node.id) is None:
            raise UsageError("this node is not in the membership that it is given")
        wanted = _neighbours(circle, self._node.config.topology)
        now = time.monotonic()
        with self._changed:
            self._circle = circle
            self._goals = {node: self._goal(member, now) for node, member in wanted.items() if self._dials(node)}
            gone = [self._lines.pop(node) for node in list(self._lines) if node not in wanted]
            self._parting.update(line for line in gone if circle.find(line.peer) is not None)
        for line in gone:
            if circle.find(line.peer) is None:
                line.abort("you are no member any more")
            else:
                line.finish()
        self._alarm.ring_by(now)

    def _goal(self, member: Member, now: float) -> _Goal:
        """Who was reached, or not, under the last membership is tried anew under this one."""
        old = self._goals.get(member.node)
        if old is None:
            return _Goal(member, since=now, due=now)
        old.due, old.pause = now, _FIRST_PAUSE
        return old

    def _dials(self, node: NodeId) -> bool:
        """The lower rank does, if it can at all. Under the lock."""
        circle = self._circle
        return circle is not None and circle.rank < circle.rank_of(node) and _TLS in self._node.capabilities

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
        self._alarm.close()
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

    def take(self, dialer: Answering, answer: Introduced) -> None:
        """A member has dialed for a line: it is one from now on, and the dialer is told `answer`."""
        self._use(dialer.carrier)
        try:
            say(dialer.carrier, answer)
        except CarrierLost:
            return  # the line hears of it

    # -- lines that this node dials ------------------------------------------------------------------------

    def _ring(self, now: float) -> float | None:
        links = self._links()
        with self._changed:
            dials = [
                self._begin(goal, links[node]) for node, goal in self._goals.items() if self._needs(node, links, now)
            ]
            due = min((goal.due for goal in self._goals.values() if not goal.dialing), default=None)
        for dial in dials:
            self._node.dialer.aside(dial)
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

    def _begin(self, goal: _Goal, link: Link) -> Callable[[], None]:
        """Under the lock."""
        assert self._circle is not None
        goal.dialing = True
        dial = LineDial(self._node, goal.member, link, self._circle, self._use)
        return partial(self._run, dial, goal)

    def _run(self, dial: LineDial, goal: _Goal) -> None:
        try:
            dial.run(time.monotonic() + _LONGEST_DIAL)
        except (DialFailed, Superseded) as failed:
            _log.debug("no death line to node %s: %s", format_node(goal.member.node), failed)
        finally:
            with self._changed:
                goal.dialing = False
                goal.due = time.monotonic() + goal.pause
            self._alarm.ring_by(goal.due)

    # -- lines of both kinds: the driving thread -------------------------------------------------------------

    def _use(self, carrier: Carrier) -> None:
        """Inside a call of the sink that the carrier has."""
        line = DeathLine(carrier, self._over)
        with self._changed:
            closed = self._closed
            old = None if closed else self._lines.get(line.peer)
            if not closed:
                self._lines[line.peer] = line
        if closed:
            line.abort("this node is closed")
        elif old is not None:
            old.abort("you have dialed anew")

    def _over(self, line: DeathLine, cause: str | None) -> None:
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
            self._alarm.ring_by(goal.due)


def _neighbours(circle: Circle, topology: str) -> dict[NodeId, Member]:
    """Whom this node watches, and who watches it."""
    membership, rank = circle.membership, circle.rank
    size = membership.size
    ranks = {*watchers(size, rank, topology), *watched(size, rank, topology)}
    return {membership.members[other].node: membership.members[other] for other in sorted(ranks)}
