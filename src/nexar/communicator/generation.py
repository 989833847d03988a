"""One generation of a communicator at this node: its build, state and outcome."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from contextlib import ExitStack
from copy import copy
from typing import Any, Final

from nexar.cluster.control_threads import CancelToken
from nexar.cluster.decisions.completion import (
    UNCONSTRAINED,
    CompletedCalls,
    CompletionExchange,
    CompletionNews,
    SendNews,
)
from nexar.cluster.membership import WORLD, Membership
from nexar.cluster.mesh import EAGER_WORLD, Mesh, open_all, open_first
from nexar.cluster.node import Node
from nexar.collectives.call_log import CallLog
from nexar.collectives.context import CollectiveContext
from nexar.collectives.statistics import KEPT, TRACED
from nexar.collectives.trace_writer import TraceWriter
from nexar.communicator.events import EventFeed, FailureFeed, MembershipEvent
from nexar.communicator.shared_memory_setup import SharedMemorySetup, may_share
from nexar.communicator.status import NodeActivity
from nexar.config import Config
from nexar.errors import NexarError, NoQuorum, PeerLost, PeerMisbehaved, RecoveryTimeout, Revoked
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
    """Finished when the generation ends; its error carries the successor. Any thread may wait."""

    __slots__ = ("_progress",)

    def __init__(self, progress: Progress) -> None:
        super().__init__(progress.lock)
        self._progress = progress

    @property
    def name(self) -> str:
        return "the agreement on the next membership"

    def awaited(self) -> AwaitedPeer:
        return AwaitedPeer(missing="its vote")

    def cancel(self) -> None:
        """An abandoned wait has no effect."""

    def resolve(self, error: NexarError) -> None:
        """Set or replace the outcome: a successor may follow NoQuorum. Not under the node's lock."""
        with self.lock:
            if self.done:
                self.error = error
            else:
                self.finish(error)
        self._progress.wake()  # a waiter may be the driver, asleep

    def check(self) -> None:
        if self.done:
            assert self.error is not None
            raise copy(self.error)  # a copy, because many calls raise it


class Generation:
    """Immutable except for its end: `interrupt` ends every call, `outcome` is the error to raise."""

    def __init__(self, context: CollectiveContext, close: Callable[[], None]) -> None:
        # The functions it serves. A successor inherits these and the feeds before it is shared.
        self.registry = Registry()
        self.failures = FailureFeed("failures")
        self.memberships: EventFeed[MembershipEvent] = EventFeed("memberships")
        self.context: Final = context
        self.group: Final = context.group
        self.communicator: Final = context.group.communicator
        self.membership: Final[Membership] = context.group.membership
        self.outcome: Final = GenerationOutcome(context.group.progress)
        self._close = close
        self._closing = threading.Lock()
        self._freed = False  # or in progress; under `_closing`
        self._closed = False  # under `_closing`
        # Called once each on close. Written before the generation is shared and by `close_in_background`; emptied by
        # the closing thread, under `_closing`.
        self.when_closed: list[Callable[[], object]] = []
        # The newest communicator after it. Written before the outcome.
        self.successor: Any = None
        # The outcome carries a successor. Written after the outcome.
        self.is_succeeded = False
        # Members that the successor lacks, and why. Written before the outcome.
        self.gone: dict[Rank, str] = {}
        # All of them left by agreement. Written before the outcome.
        self.agreed = False
        # Calls wait for the outcome. Written once, before calls are interrupted.
        self.interrupted = False
        # Set on interruption, for work on its behalf that is not a call.
        self.cancel_token: Final = CancelToken()

    def close(self) -> None:
        """Free its resources. Idempotent, also during the hand-over to its successor."""
        with self._closing:
            first, self._freed = not self._freed, True
        if first:
            self._close()
        with self._closing:
            self._closed = True
            callbacks, self.when_closed = self.when_closed, []
        for callback in reversed(callbacks):
            callback()

    def close_in_background(self, successor: Generation) -> None:
        """Close it in a thread that ends before its successor is closed: the next build must not wait for remote calls
        in progress.
        """
        thread = threading.Thread(target=self.close, name="nexar-generation-close", daemon=True)
        with successor._closing:
            run_in_thread = not successor._closed
            if run_in_thread:
                successor.when_closed.append(thread.join)
                thread.start()
        if not run_in_thread:
            self.close()

    def inherit(self, old: Generation) -> None:
        self.registry, self.failures, self.memberships = old.registry, old.failures, old.memberships

    def end(self) -> None:
        """Close it and its feeds, without a successor."""
        self.close()
        self.failures.close()
        self.memberships.close()

    @property
    def nodes(self) -> frozenset[NodeId]:
        return self.group.nodes

    @property
    def me(self) -> NodeId:
        return self.membership.members[self.group.rank].node

    @property
    def is_stalled(self) -> bool:
        return isinstance(self.outcome.error, (NoQuorum, RecoveryTimeout))

    @property
    def is_blocked_by_close(self) -> bool:
        return isinstance(self.outcome.error, Revoked) and self.outcome.error.closed

    def interrupt(self, error: NexarError | None = None) -> None:
        """End every pending and later call and release its buffers. Not under the node's lock. Idempotent."""
        self.interrupted = True
        self.context.interrupt(error or Revoked(communicator=str(self.communicator), reason="its members change"))
        self.cancel_token.cancel()

    def membership_event_to(self, new: Generation, joined: tuple[Rank, ...], communicator: Any) -> MembershipEvent:
        sizes, ranks = (self.group.size, new.group.size), (self.group.rank, new.group.rank)
        return MembershipEvent(new.membership.epoch, *sizes, *ranks, joined, self.gone, communicator)


# No collective has this number.
SEQUENCE: Final = (1 << 64) - 2
_NEWS: Final = struct.Struct("<qqq")


def exchange_completed(group: Group, mine: CompletedCalls, deadline: float) -> int:
    """Return the last call that all members completed: NONE_COMPLETED also if their generations differ, UNCONSTRAINED
    if all are new. Blocks until all take part. Raises PeerLost or OperationTimeout.
    """
    exchange = CompletionExchange(group.rank, group.size, mine)
    sends = exchange.start()
    while sends:  # one for each step
        sends = exchange.received(sends[0].step, _exchange(group, sends[0], deadline))
    assert exchange.result is not None
    return exchange.result


def _exchange(group: Group, sent: SendNews, deadline: float) -> CompletionNews:
    step = sent.step
    receive = group.post_receive(sent.source, None, space=Space.COLLECTIVE, tag=collective_tag(SEQUENCE, step))
    about = MessageHeader(space=Space.COLLECTIVE, sequence=SEQUENCE, step=step)
    send = group.post_send(sent.rank, memoryview(_NEWS.pack(*sent.news)), deadline, about=about)
    group.wait((send, receive), deadline)
    received = bytes(receive.into or b"")
    if len(received) != _NEWS.size:
        raise PeerMisbehaved(rank=sent.source, what="it sent an invalid message while the communicator was made")
    return CompletionNews(*_NEWS.unpack(received))


class GenerationBuilder:
    """Makes this node's generations. Any thread."""

    def __init__(self, node: Node, mesh: Mesh, config: Config) -> None:
        self.config = config
        self.me = node.id
        self._node = node
        self._mesh = mesh
        self._activity = NodeActivity(node.progress)

    def lose(self, node: NodeId, cause: str) -> None:
        """Fail operations that wait for a former member. Its earlier messages can still be received; if some may still
        arrive, the end of its link fails them instead.
        """
        if self._mesh.quiet_leavers.has(node):
            return
        router = self._mesh.router
        with router.lock:
            router.lose(node, PeerLost(node=node, cause=foreign_lines(cause)))
        router.deferred_io.flush()
        self._node.progress.wake()  # a waiter may be the driver, asleep

    def make(
        self,
        membership: Membership,
        communicator: int,
        deadline: float,
        completed: CompletedCalls | None = None,
        begun: Callable[[Group], None] | None = None,
    ) -> tuple[Generation, int]:
        """Make a generation together with its members, numbered by the membership's epoch. `completed`: this member's
        last call in the one before; the second result: that of all. Closing the group given to `begun` aborts the
        build. Raises PeerLost or OperationTimeout and leaves nothing behind.
        """
        with ExitStack() as undo:
            group = Group(self._node, self._mesh, membership, communicator, membership.epoch)
            undo.callback(group.close)
            if begun is not None:
                begun(group)
            if communicator == WORLD and self._node.has_remote_peers:
                self._open_links(membership, deadline)
            least = UNCONSTRAINED if completed is None else exchange_completed(group, completed, deadline)
            directory = self.config.trace_dir
            kept = KEPT if directory is None else TRACED
            call_log = CallLog(group, kept=kept, other_activity=self._activity.outside_of)
            self._activity.add(call_log)
            undo.callback(self._activity.remove, call_log)
            if directory is not None:
                undo.callback(TraceWriter(directory, group, call_log).write)
            undo.callback(call_log.close)
            region, shared = None, False
            topology = self.config.topology if communicator == WORLD else FULL_MESH  # else links are checked
            if may_share(membership, topology):
                sharing = SharedMemorySetup(group, deadline)
                region = sharing.agree(call_log)
                shared = sharing.shared
                undo.callback(sharing.close)
            context = CollectiveContext(group, self.config, call_log, region, shared=shared)
            undo.callback(context.scratch.close)
            return Generation(context, undo.pop_all().close), least

    def _open_links(self, membership: Membership, deadline: float) -> None:
        """Later memberships of large worlds open links on first use."""
        if membership.epoch == 1:
            open_first(self._mesh, self.config.topology, deadline)
        elif membership.size <= EAGER_WORLD:
            open_all(self._mesh, deadline)
