"""What becomes of a communicator: open until its fate is sealed, from then on every call on it raises that.

One generation of one communicator, at this node: what it stands on, and what becomes of it.

The members of a new generation make sure that all of them are there, and learn how far all of them had come.

A dissemination: in round i each rank tells the one 2**i further, and hears from the one 2**i behind, the least and the
most it knows of. The least of all numbers does not mind being counted twice, so after ⌈log₂ n⌉ rounds everybody has it,
and nobody has it before everybody has come.

Numbers of calls mean something within one generation. When changes follow one another closely, some members have made a
generation that others have skipped: then they come from different ones, and nothing is known to be completed by all.

Makes the communicators of one node: the first, and those that are split off it.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from copy import copy
from typing import Any, Final, NamedTuple
from weakref import WeakSet

from nexar.cluster.control_threads import CancelToken
from nexar.cluster.decisions.membership_events import NoProgress
from nexar.cluster.membership import WORLD, Change, Membership, next_generation
from nexar.cluster.mesh import EAGER_WORLD, Mesh, open_all, open_first
from nexar.cluster.node import Node
from nexar.collectives.call_log import CallLog
from nexar.collectives.context import CollectiveContext
from nexar.collectives.statistics import KEPT, TRACED
from nexar.collectives.trace_writer import TraceWriter
from nexar.communicator.events import EventFeed, FailureEvent, FailureFeed, MembershipEvent
from nexar.communicator.shared_memory_setup import SharedMemorySetup, may_share
from nexar.communicator.status import NodeActivity
from nexar.config import Config
from nexar.errors import MembershipChanged, NexarError, NoQuorum, PeerLost, PeerMisbehaved, RecoveryTimeout, Revoked
from nexar.group import Group
from nexar.links.messages import collective_tag
from nexar.links.operation import Operation
from nexar.links.progress import Progress
from nexar.links.sending import MessageHeader
from nexar.rpc.registry import Registry
from nexar.topology import FULL_MESH
from nexar.types import AwaitedPeer, NodeId, Rank
from nexar.wire.frame import Space
from nexar.wire.text import foreign_lines


class GenerationOutcome(Operation):
    """Done when the communicator is over; its error says why, and with what to go on. Any thread may wait for it; no
    wait ends it.
    """

    __slots__ = ("_progress",)

    def __init__(self, progress: Progress) -> None:
        super().__init__(progress.lock)
        self._progress = progress

    @property
    def name(self) -> str:
        """As errors call it."""
        return "the agreement on the next membership"

    def awaited(self) -> AwaitedPeer:
        """The other members, whoever is needed for a majority."""
        return AwaitedPeer(missing="its vote")

    def cancel(self) -> None:
        """Who waits no longer changes nothing."""

    def resolve(self, error: NexarError) -> None:
        """It is over, for this reason. A later word replaces an earlier one: who has no quorum may still hear that the
        others went on. Without the node's lock.
        """
        with self.lock:
            if self.done:
                self.error = error
            else:
                self.finish(error)
        self._progress.wake()  # who waits for it may lead, and sleep

    def check(self) -> None:
        """Raise why it is over, if it is."""
        if self.done:
            assert self.error is not None
            raise copy(self.error)  # its own: many calls raise it


class Generation:
    """Immutable but for its end: `interrupt` ends every call on it at once, `fate` says what is to be raised then."""

    def __init__(self, context: CollectiveContext, close: Callable[[], None]) -> None:
        """`close` frees what it stands on; it is called once."""
        self.registry = Registry()
        """The functions that it serves. This and the feeds a successor inherits before anybody has it."""
        self.failures = FailureFeed("nexar-failures")
        self.memberships: EventFeed[MembershipEvent] = EventFeed("nexar-memberships")
        self.context: Final = context
        self.group: Final = context.group
        self.communicator: Final = context.group.communicator
        self.membership: Final[Membership] = context.group.membership
        self.outcome: Final = GenerationOutcome(context.group.progress)
        self._close = close
        self._closing = threading.Lock()
        self._freed = False  # or about to be; under `_closing`
        self._closed = False  # likewise
        self.when_closed: list[Callable[[], object]] = []
        """Called when it is closed, once each. Written before anybody has it, and by `clear_away`; emptied by who
        closes, under `_closing`: its user may do so while its successor is handed over."""
        self.successor: Any = None
        """The newest communicator after it, if there is one. Written before the fate is sealed."""
        self.ancestors: WeakSet[Generation] = WeakSet()
        """Those before it that somebody still holds: each leads to the newest, not to the one after it, so that nobody
        holds those between. Written before anybody has it; read by who makes its successor."""
        self.completed: int | None = None
        """The last call on it that all who go on have completed. Written before the fate is sealed."""
        self.is_succeeded = False
        """Its fate says with what to go on. Written after the fate is sealed."""
        self.gone: dict[Rank, str] = {}
        """Members that its successor does not have, and why. Written before the fate is sealed."""
        self.agreed = False
        """All of them went by agreement: nobody was lost. Likewise."""
        self.closed_by_nodes: set[NodeId] = set()
        """Members whose users have closed it. Under the lineage's lock."""
        self.interrupted = False
        """Its members change: calls wait for their fate. Written once, before calls are interrupted."""
        self.cancel_token: Final = CancelToken()
        """Made when it is interrupted: for whoever does something in its name that is no call on it."""

    def close(self) -> None:
        """Free what it stands on. Idempotent; its user may do so while its successor is handed over."""
        with self._closing:
            first, self._freed = not self._freed, True
        if first:
            self._close()
        with self._closing:
            self._closed = True
            told, self.when_closed = self.when_closed, []
        for tell in reversed(told):
            tell()

    def close_in_background(self, heir: Generation) -> None:
        """Close it in a thread of its own, which has ended when its heir is closed. It waits for functions that others
        called; whoever makes the next successor, or waits for one, is not to wait for them too.
        """
        thread = threading.Thread(target=self.close, name="nexar-lineage-clearing", daemon=True)
        with heir._closing:
            run_in_thread = not heir._closed
            if run_in_thread:
                heir.when_closed.append(thread.join)
                thread.start()
        if not run_in_thread:
            self.close()

    def inherit(self, old: Generation) -> None:
        """It succeeds this one: who has subscribed or registered there need not do so again."""
        self.registry, self.failures, self.memberships = old.registry, old.failures, old.memberships
        self.ancestors = WeakSet([old, *old.ancestors])

    def end(self) -> None:
        """There will be no successor: nothing more is told."""
        self.close()
        self.failures.close()
        self.memberships.close()

    @property
    def nodes(self) -> frozenset[NodeId]:
        """Its members."""
        return self.group.nodes

    @property
    def me(self) -> NodeId:
        """This node."""
        return self.membership.members[self.group.rank].node

    @property
    def is_stalled(self) -> bool:
        """It was given up for want of a majority, or because that did not finish."""
        return isinstance(self.outcome.error, (NoQuorum, RecoveryTimeout))

    @property
    def is_blocked_by_close(self) -> bool:
        """A member has closed it, so there is no successor, at least for now."""
        return isinstance(self.outcome.error, Revoked) and self.outcome.error.closed

    def bar(self, target: Membership) -> Revoked | None:
        """Why a successor with these members is not made: one of them has closed this one. Under the lineage's lock."""
        for rank, member in enumerate(self.membership.members):
            if member.node in self.closed_by_nodes and target.rank_of(member.node) is not None:
                reason = f"rank {rank} has closed it, and there is no successor without that rank"
                return Revoked(communicator=str(self.communicator), reason=reason, rank=rank, closed=True)
        return None

    def interrupt(self, error: NexarError | None = None) -> None:
        """Every pending and later call raises, and its buffers are free. Without the node's lock. Idempotent."""
        self.interrupted = True
        self.context.interrupt(error or Revoked(communicator=str(self.communicator), reason="its members change"))
        self.cancel_token.make()

    def next_membership(self, world: Membership, changes: Sequence[Change]) -> Membership | None:
        """Who goes on after these changes of the world, in order; None: they do not concern this communicator.

        All members come to the same answer from the same changes: see `following`.
        """
        return next_generation(self.communicator, self.membership, world, changes)

    def publish_departures(self, change: Change) -> None:
        """Listeners hear of who has gone quietly; those who had a line to it know that already."""
        for departure in change.left:
            rank = self.membership.rank_of(departure.node)
            if departure.quiet and rank is not None:
                cause = foreign_lines(departure.cause)
                self.failures.publish(FailureEvent(rank, departure.node, cause, "left", self.membership.epoch))

    def set_successor(self, new: Generation, communicator: Any, changes: Sequence[Change]) -> MembershipChanged:
        """From now on this is what comes after it, by one step more. What its calls have to raise."""
        self.gone = dict(sorted({**self.gone, **self.lost(changes)}.items()))
        self.successor = communicator
        return MembershipChanged(
            communicator=communicator, lost=self.gone, joined=self.joined(new), completed_by_all=self.completed
        )

    def joined(self, new: Generation) -> tuple[Rank, ...]:
        """Ranks of a later generation that were not in this one."""
        return tuple(rank for rank, each in enumerate(new.membership.members) if each.node not in self.nodes)

    def membership_event_to(self, new: Generation, joined: tuple[Rank, ...], communicator: Any) -> MembershipEvent:
        """What listeners hear of it."""
        sizes, ranks = (self.group.size, new.group.size), (self.group.rank, new.group.rank)
        return MembershipEvent(new.membership.epoch, *sizes, *ranks, joined, self.gone, communicator)

    def stall_error(self, stall: NoProgress, timeout: float) -> NexarError:
        """What calls raise while there is no next membership."""

        def ranks(nodes: Iterable[NodeId]) -> list[Rank]:
            return sorted(rank for node in nodes if (rank := self.membership.rank_of(node)) is not None)

        if stall.missing_votes:
            return RecoveryTimeout(missing_votes=ranks(stall.missing_votes), timeout=timeout)
        return NoQuorum(alive=ranks(stall.alive), needed=stall.needed, left=ranks(stall.left))

    def loss(self) -> PeerLost:
        """What calls raise where the user asks for the successor: under the manual policy."""
        rank = next(iter(self.gone), None)
        cause = "its link was lost" if rank is None else self.gone[rank]
        node = None if rank is None else self.membership.members[rank].node
        remedy = "the others went on: comm.shrink() gives the next communicator"
        return PeerLost(rank=rank, node=node, cause=cause, remedy=remedy)

    def lost(self, changes: Sequence[Change]) -> dict[Rank, str]:
        """Why members of it are gone, by their ranks in it."""
        causes: dict[Rank, str] = {}
        for change in changes:
            causes |= change.causes(self.membership)
        return dict(sorted(causes.items()))


SEQUENCE: Final = (1 << 64) - 2
"""No collective ever has this number."""
NOTHING: Final = -1
"""Of somebody who has finished no call."""
ANYTHING: Final = (1 << 63) - 1
"""Of somebody who was not there before: the others' word counts."""
_NEWS: Final = struct.Struct("<qqq")


class CompletedCalls(NamedTuple):
    """How far a member had come."""

    generation: int
    """That it comes from."""
    number: int
    """Of the last call that it completed there; NOTHING if there is none."""


NEWCOMER: Final = CompletedCalls(ANYTHING, ANYTHING)
"""Who was not there before."""


class _News(NamedTuple):
    """What is known of all who were heard of so far."""

    least: int
    oldest: int
    """Generation that one of them comes from."""
    newest: int

    def merged(self, other: _News) -> _News:
        return _News(min(self.least, other.least), min(self.oldest, other.oldest), max(self.newest, other.newest))


def exchange_completed(group: Group, mine: CompletedCalls, deadline: float) -> int:
    """What all members have completed: the least of their numbers; NOTHING, too, if they come from different
    generations; ANYTHING if all are new. Returns when all have come. PeerLost, OperationTimeout: one did not.
    """
    is_new = mine == NEWCOMER
    news = _News(mine.number, mine.generation, NOTHING if is_new else mine.generation)
    distance, step = 1, 0
    while distance < group.size:
        news = news.merged(_exchange(group, news, distance, step, deadline))
        distance, step = 2 * distance, step + 1
    return news.least if news.newest in (NOTHING, news.oldest) else NOTHING


def _exchange(group: Group, news: _News, distance: int, step: int, deadline: float) -> _News:
    there, back = (group.rank + distance) % group.size, (group.rank - distance) % group.size
    receive = group.post_receive(back, None, space=Space.COLLECTIVE, tag=collective_tag(SEQUENCE, step))
    about = MessageHeader(space=Space.COLLECTIVE, sequence=SEQUENCE, step=step)
    send = group.post_send(there, memoryview(_NEWS.pack(*news)), deadline, about=about)
    group.wait((send, receive), deadline)
    told = bytes(receive.into or b"")
    if len(told) != _NEWS.size:
        raise PeerMisbehaved(rank=back, what="it settled a communicator with something that is no number")
    return _News(*_NEWS.unpack(told))


class GenerationBuilder:
    """Of one node. Any thread."""

    def __init__(self, node: Node, mesh: Mesh, config: Config) -> None:
        self.config = config
        self._node = node
        self._mesh = mesh
        self._activity = NodeActivity(node.progress)

    def lose(self, node: NodeId, cause: str) -> None:
        """This node is no member any more: whoever still waits for it, on a communicator that has it, is told. Whatever
        it said before can still be received; where some of that may still be on its way, the end of its link tells.
        """
        if self._mesh.quiet_leavers.has(node):
            return
        router = self._mesh.router
        with router.lock:
            router.lose(node, PeerLost(node=node, cause=foreign_lines(cause)))
        router.deferred_io.flush()
        self._node.progress.wake()  # who waits may lead, and sleep

    def make(
        self,
        membership: Membership,
        communicator: int,
        deadline: float,
        completed: CompletedCalls | None = None,
        begun: Callable[[Group], None] | None = None,
    ) -> tuple[Generation, int]:
        """One generation, that of the membership's epoch, together with all its members. `completed`: it succeeds
        another one, and this is what this member has completed in that; what all have is returned. `begun` is told of
        the group: who closes it meanwhile ends the making.

        PeerLost, OperationTimeout: a member did not take part in time; nothing is left behind then.
        """
        with ExitStack() as undo:
            group = Group(self._node, self._mesh, membership, communicator, membership.epoch)
            undo.callback(group.close)
            if begun is not None:
                begun(group)
            if communicator == WORLD and self._node.meets_strangers:
                self._open_links(membership, deadline)
            least = ANYTHING if completed is None else exchange_completed(group, completed, deadline)
            directory = self.config.trace_dir
            kept = KEPT if directory is None else TRACED
            call_log = CallLog(group, kept=kept, beside=self._activity.beside)
            self._activity.add(call_log)
            undo.callback(self._activity.remove, call_log)
            if directory is not None:
                undo.callback(TraceWriter(directory, group, call_log).write)
            undo.callback(call_log.close)
            region, shared = None, False
            topology = self.config.topology if communicator == WORLD else FULL_MESH  # of a part it is found out
            if may_share(membership, topology):
                sharing = SharedMemorySetup(group, deadline)
                region = sharing.agree(call_log)
                shared = sharing.shared
                undo.callback(sharing.close)
            context = CollectiveContext(group, self.config, call_log, region, shared=shared)
            undo.callback(context.scratch.close)
            return Generation(context, undo.pop_all().close), least

    def _open_links(self, membership: Membership, deadline: float) -> None:
        """Later memberships of large worlds open theirs when they are first used."""
        if membership.epoch == 1:
            open_first(self._mesh, self.config.topology, deadline)
        elif membership.size <= EAGER_WORLD:
            open_all(self._mesh, deadline)
