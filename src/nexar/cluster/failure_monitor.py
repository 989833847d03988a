"""Notices that members are gone: lost links, ended death lines, silence, their own goodbye, the word of a launcher.

Each is a hint, and each hint is looked into at once, aside: who answers is not gone, whatever broke. Not more than
`MOST_PROBES` at a time: in a starved cluster each probe takes CPU from those whose answers are awaited.
A member that lives and to which the link is lost is dialed anew; only if that fails too, it is lost to this node. What
the cluster makes of it, the others decide too: see recovery.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Literal, TypeAlias

from nexar.cluster.control_threads import DialCancelled
from nexar.cluster.decisions.failure_detector import LivenessReport, PeerLiveness
from nexar.cluster.decisions.formed_cluster import SEED_CONNECTION_BROKE
from nexar.cluster.decisions.membership_events import MembershipInput, PeerLossFound, PeerReachable, ProbeFinished
from nexar.cluster.membership import Member, Membership
from nexar.cluster.mesh import Mesh
from nexar.cluster.node import Node
from nexar.cluster.peer_probe import ENDED, PingTable, probe_peer
from nexar.errors import NexarError, PeerError
from nexar.links.carrier_selection import is_relayed
from nexar.links.link import Link
from nexar.types import NodeId, format_node, format_seconds
from nexar.wire.control import MAX_CAUSE_CHARACTERS, Goodbye, Message

_log = logging.getLogger(__name__)

NoticedState: TypeAlias = Literal["lost", "stuck", "left", "back"]
LEFT: Final = "it left"
_RAISED: Final = "it raised an exception and left:\n"
_LONGEST_DIAL: Final = 5.0
MOST_PROBES: Final = 8
"""Threads that look into hints; more hints wait for one of them."""


class FailureMonitor:
    """Of one node. Any thread. Its threads end with the node's dialer."""

    def __init__(
        self,
        node: Node,
        mesh: Mesh,
        pings: PingTable,
        *,
        tell: Callable[[MembershipInput], None],
        noticed: Callable[[NodeId, NoticedState, str], None],
        known: Callable[[NodeId], PeerLiveness | None],
        own_delay: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`tell` is recovery's; `noticed` hears of everything that is worth an event: node, state, cause. `known` is
        what the heartbeat knows of a node; None: it does not watch it. `own_delay`: seconds by which everybody has more
        time to answer, because this node runs slowly.
        """
        self._known = known
        self._own_delay = own_delay
        self._node = node
        self._mesh = mesh
        self._pings = pings
        self._tell = tell
        self._noticed = noticed
        self._timeout = min(1.0, node.config.heartbeat_timeout / 2)
        self._hung_after = node.config.stuck_timeout - min(node.config.heartbeat_timeout, node.config.stuck_timeout / 2)
        """Seconds without a beat after which it is agreed that a node hangs: not all notice at the same moment."""
        self._closed = False  # written by who closes
        self._lock = threading.Lock()
        self._examined: set[NodeId] = set()  # under the lock: those that are looked into now
        self._lost: set[NodeId] = set()  # found to be gone, and not found again; under the lock
        self._goodbyes: dict[NodeId, Goodbye] = {}  # said by members that are about to end their link; under the lock
        self._asked: set[NodeId] = set()  # under the lock: those that a Probed is to be told of
        self._waiting: deque[Callable[[], None]] = deque()  # for a thread; under the lock
        self._busy = 0  # threads; under the lock
        self._words: dict[NodeId, str] = {}  # of launchers and of the seed, about how a member ended; under the lock

    # -- hints -----------------------------------------------------------------------------------------------

    def goodbye_received(self, link: Link, message: Message) -> None:
        """A member leaves. One that raised is gone at once; one that simply closes still reads what is sent to it."""
        assert isinstance(message, Goodbye)
        with self._lock:
            self._goodbyes[link.peer] = message
        if message.traceback is not None:
            self._left(link.peer, message)

    def link_lost(self, link: Link, error: NexarError) -> None:
        """A link ended without this side's will."""
        with self._lock:
            goodbye = self._goodbyes.get(link.peer)
            known = link.peer in self._lost
        if known:
            return  # that is why its link ended
        if goodbye is not None:
            self._left(link.peer, goodbye)
        else:
            self._investigate(link.peer, _cause(error))

    def has_left(self, node: NodeId) -> bool:
        """Whether it needs nothing any more: it has said goodbye, or is found to be gone."""
        with self._lock:
            return node in self._goodbyes or node in self._lost

    def is_investigating(self, nodes: Iterable[NodeId]) -> bool:
        """Whether one of them is just being looked into."""
        with self._lock:
            return not self._examined.isdisjoint(nodes)

    def cut_off(self, node: NodeId, cause: str) -> None:
        """No way is left to a member over others: perhaps because it is gone itself. Never blocks."""
        self._investigate(node, cause)

    def liveness_ended(self, node: NodeId, cause: str) -> None:
        """A death line is gone."""
        self._investigate(node, cause)

    def report_dead(self, node: NodeId, cause: str) -> None:
        """A launcher, or the seed, has seen a member's end."""
        if not cause.startswith(SEED_CONNECTION_BROKE):
            with self._lock:
                self._words[node] = cause
        self._investigate(node, cause)

    def found(self, finding: LivenessReport) -> None:
        """The heartbeat's findings: silence is a loss, whatever the link looks like; who is stuck is reported."""
        if finding.is_loss:
            self._lose(finding.node, finding.cause)
        elif finding.state == "stuck":
            self._noticed(finding.node, "stuck", finding.cause)
        else:
            self._find(finding.node)
            self._noticed(finding.node, "back", finding.cause)

    def missed(self, node: NodeId, cause: str) -> None:
        """Somebody here needs a member that is gone: it does not matter that it left of its own will."""
        with self._lock:
            gone = node in self._goodbyes
        if gone:
            self._lose(node, LEFT)
        else:
            self._investigate(node, cause)

    def joiner_missed(self, joiner: Member) -> None:
        """The seed does not hear any more of somebody that wanted to join. It was no member, so nobody is told; but
        who hands it the state is not to wait until QUIC misses it. Never blocks.
        """
        self._test_link(joiner, self._timeout)

    def doubted(self, node: NodeId) -> None:
        """Others bring word that a member speaks over them, as if the connection to it were lost. If it is, its link
        is lost here too, before the member gives up; for it waits no longer than this node would. Never blocks.
        """
        member = self._mesh.directory.find(node)
        if member is not None:
            self._test_link(member, self._timeout / 2)

    def _test_link(self, member: Member, timeout: float) -> None:
        link = self._mesh.find(member.node)
        if link is not None and not self._closed:
            self._run_in_thread(lambda: self._end_if_gone(member, link, timeout))

    def _end_if_gone(self, member: Member, link: Link, timeout: float) -> None:
        cause = probe_peer(self._node, member, link, self._pings, time.monotonic() + timeout + self._own_delay())
        if cause is not None:
            link.lose(cause)

    def adopt(self, membership: Membership) -> None:
        """Who is no member any more is forgotten."""
        with self._lock:
            self._lost = {node for node in self._lost if membership.rank_of(node) is not None}
            for known in (self._goodbyes, self._words):
                for node in [each for each in known if membership.rank_of(each) is None]:
                    known.pop(node)

    # -- looking into them ---------------------------------------------------------------------------------

    def probe(self, node: NodeId) -> None:
        """Find out whether a member can be reached, and tell by Probed. Never blocks."""
        with self._lock:
            if self._closed or node in self._asked:
                return
            self._asked.add(node)
        self._run_in_thread(lambda: self._answer(node))

    def _answer(self, node: NodeId) -> None:
        """What is asked from the moment at which the answer is told, or at which there is none, wants another one."""
        try:
            cause = self._cause_of(node, self._look_once_more)
        finally:
            with self._lock:
                self._asked.discard(node)
        self._tell(ProbeFinished(node, cause))

    def close(self) -> None:
        """Nothing is looked into any more. Idempotent."""
        self._closed = True

    def _run_in_thread(self, task: Callable[[], None]) -> None:
        """Do it in one of a few threads. Never blocks."""
        with self._lock:
            self._waiting.append(task)
            if self._busy == MOST_PROBES:
                return
            self._busy += 1
        try:
            self._node.dialer.run_in_thread(self._work)
        except BaseException:  # no thread could be started: the others, if there are some, do what waits
            with self._lock:
                self._busy -= 1
            raise

    def _work(self) -> None:
        """Law: what a task raises ends neither this thread nor the tasks that wait for it."""
        while (task := self._next()) is not None:
            try:
                task()
            except DialCancelled:
                continue  # this node closes: nobody waits for what the task would have found
            except Exception:  # noqa: BLE001  # the boundary of the thread: whatever it is, the log has the traceback
                if not self._closed:
                    _log.exception("a task of the failure monitor raised; the monitor goes on")

    def _next(self) -> Callable[[], None] | None:
        """None: nothing is left, and this thread is free. What a closed node wanted to know nobody asks any more."""
        with self._lock:
            if self._waiting and not self._closed:
                return self._waiting.popleft()
            self._busy -= 1
            return None

    def _investigate(self, node: NodeId, hint: str) -> None:
        """Not into this node itself: others may have lost it, and it knows better."""
        if self._closed or node == self._node.id or self._mesh.directory.find(node) is None:
            return
        with self._lock:
            if node in self._examined:
                return
            self._examined.add(node)
        self._run_in_thread(lambda: self._follow(node, hint))

    def _follow(self, node: NodeId, hint: str) -> None:
        """It counts as looked into until what was found is told: whoever waits for that finds it then."""
        try:
            self._conclude(node, hint, self._cause_of(node, self._examine))
        finally:
            with self._lock:
                self._examined.discard(node)

    def _cause_of(self, node: NodeId, look: Callable[[NodeId], str | None]) -> str | None:
        """What `look` returns. If it raises, that is why this node cannot reach the member; the log has the traceback.
        A member is removed only if others cannot reach it either.
        """
        try:
            return look(node)
        except DialCancelled:
            raise
        except Exception as fault:
            if self._closed:
                raise
            cause = f"it cannot be probed: {type(fault).__name__}: {fault}"
            _log.exception("node %s: %s", format_node(node), cause)
            return cause

    def _conclude(self, node: NodeId, hint: str, cause: str | None) -> None:
        with self._lock:
            goodbye = self._goodbyes.get(node)
        if cause is not None and goodbye is not None:
            self._left(node, goodbye)  # whatever else hints at it: it has left, as it said
        elif cause is not None:
            self._lose(node, self._words.get(node) or (f"{hint}; {cause}" if hint != cause else cause))

    def _look_once_more(self, node: NodeId) -> str | None:
        """As `_examine`; but whom this node has lost, and is asked about again, others may reach: then only the way
        between the two is broken, and what they say to each other goes over others from now on.
        """
        with self._lock:
            lost = node in self._lost
        if not lost or not self._answers_over_others(node):
            return self._examine(node)
        self._find(node, severed=True)
        self._noticed(node, "back", "it is reached over other nodes now")
        return None

    def _answers_over_others(self, node: NodeId) -> bool:
        member = self._mesh.directory.find(node)
        try:
            link = self._mesh.relay_routes.detour(node)
        except NexarError:
            return False  # this node closes
        if member is None or link is None:
            return False
        deadline = time.monotonic() + self._timeout + self._own_delay()
        cause = probe_peer(self._node, member, link, self._pings, deadline, packets=False)
        if cause is not None:
            link.lose(f"it does not answer over other nodes: {cause}")
        return cause is None

    def _examine(self, node: NodeId) -> str | None:
        """Why it cannot be reached; None: it can, on the link that it has or on a new one. Blocks."""
        member = self._mesh.directory.find(node)
        if member is None:
            return "it is no member any more"
        link, known = self._mesh.links().get(node), self._known(node)
        delay = self._own_delay()
        if known is not None and known.beat_age >= self._hung_after + delay:
            return f"alive but stuck: no beat for {format_seconds(known.beat_age)}"
        deadline = time.monotonic() + self._timeout + delay
        cause = probe_peer(
            self._node,
            member,
            link,
            self._pings,
            deadline,
            packets=known is not None,
            patience=self._patience(known),
        )
        ended = cause is not None and cause.startswith(ENDED)
        if cause is not None and not ended and link is not None and is_relayed(link.schemes):
            return self._dial(node, severed=False)  # perhaps it is who is between us that does not answer
        if cause is not None or (link is not None and link.failure is None):
            return cause
        return self._dial(node, severed=link is not None)

    def _patience(self, known: PeerLiveness | None) -> float:
        """Seconds that a process which exists has beyond the usual time: together they are the silence after which
        its watchers give it up. Silence before the question counts.
        """
        silence = 0.0 if known is None else known.age
        return max(0.0, self._node.config.heartbeat_timeout - self._timeout - silence)

    def _dial(self, node: NodeId, *, severed: bool) -> str | None:
        """`severed`: there was a link, and what was under way on it may be lost."""
        dial = self._mesh.relink if severed else self._mesh.dial
        try:
            longest = min(_LONGEST_DIAL, self._node.config.heartbeat_timeout) + self._own_delay()
            dial(node, time.monotonic() + longest)
        except NexarError as error:
            return _cause(error)
        if severed:
            self._find(node, severed=True)
            self._noticed(node, "back", "its link was lost and made anew")
        return None

    def _find(self, node: NodeId, *, severed: bool = False) -> None:
        with self._lock:
            self._lost.discard(node)
        self._tell(PeerReachable(node, severed))

    def _left(self, node: NodeId, goodbye: Goodbye) -> None:
        if goodbye.traceback is None:
            self._noticed(node, "left", goodbye.reason or LEFT)
            self._tell(PeerLossFound(node, goodbye.reason or LEFT, willing=True))
        else:
            room = MAX_CAUSE_CHARACTERS - len(_RAISED)
            self._lose(node, _RAISED + goodbye.traceback[-room:])  # its last lines say most

    def _lose(self, node: NodeId, cause: str) -> None:
        """Everything that waits for it ends now: QUIC would not say for a long time that nobody is there. Hints follow
        one another, of its link, its line, its launcher: users hear of one loss once, and of nobody's who has been
        removed meanwhile.
        """
        if self._mesh.directory.find(node) is None:
            return
        with self._lock:
            is_news = node not in self._lost
            self._lost.add(node)
        if is_news:
            self._noticed(node, "lost", cause)
        self._tell(PeerLossFound(node, cause[:MAX_CAUSE_CHARACTERS]))
        link = self._mesh.links().get(node)
        if link is not None:
            link.lose(cause)


def _cause(error: NexarError) -> str:
    return str(getattr(error, "cause", None) or error) if isinstance(error, PeerError) else str(error)
