"""One generation of a communicator at this node: its build, state and outcome."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any, Final
from weakref import WeakSet

from nexar.cluster.control_threads import CancelToken
from nexar.cluster.decisions.membership_events import NoProgress
from nexar.cluster.membership import Change, Membership, next_generation
from nexar.collectives.context import CollectiveContext
from nexar.communicator.events import EventFeed, FailureEvent, FailureFeed, MembershipEvent
from nexar.errors import MembershipChanged, NexarError, NoQuorum, PeerLost, RecoveryTimeout, Revoked
from nexar.links.operation import Operation
from nexar.links.progress import Progress
from nexar.rpc.registry import Registry
from nexar.types import AwaitedPeer, NodeId, Rank
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
        # Earlier generations that are still referenced. Each refers to the newest successor, so none keeps the ones
        # between alive. Written before the generation is shared; read when its successor is made.
        self.ancestors: WeakSet[Generation] = WeakSet()
        # The last call on it that all continuing members completed. Written before the outcome.
        self.completed: int | None = None
        # The outcome carries a successor. Written after the outcome.
        self.is_succeeded = False
        # Members that the successor lacks, and why. Written before the outcome.
        self.gone: dict[Rank, str] = {}
        # All of them left by agreement. Written before the outcome.
        self.agreed = False
        # Members whose users closed it. Under the lock of Successors.
        self.closed_by_nodes: set[NodeId] = set()
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
        self.ancestors = WeakSet([old, *old.ancestors])

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

    def close_error(self, target: Membership) -> Revoked | None:
        """Return the error if one of these members closed this generation: no successor with it is made. Under the
        lock of Successors.
        """
        for rank, member in enumerate(self.membership.members):
            if member.node in self.closed_by_nodes and target.rank_of(member.node) is not None:
                reason = f"rank {rank} has closed it, and there is no successor without that rank"
                return Revoked(communicator=str(self.communicator), reason=reason, rank=rank, closed=True)
        return None

    def interrupt(self, error: NexarError | None = None) -> None:
        """End every pending and later call and release its buffers. Not under the node's lock. Idempotent."""
        self.interrupted = True
        self.context.interrupt(error or Revoked(communicator=str(self.communicator), reason="its members change"))
        self.cancel_token.cancel()

    def next_membership(self, world: Membership, changes: Sequence[Change]) -> Membership | None:
        """None: these changes of the world do not concern it."""
        return next_generation(self.communicator, self.membership, world, changes)

    def publish_departures(self, change: Change) -> None:
        for departure in change.left:
            rank = self.membership.rank_of(departure.node)
            if departure.quiet and rank is not None:
                cause = foreign_lines(departure.cause)
                self.failures.publish(FailureEvent(rank, departure.node, cause, "left", self.membership.epoch))

    def set_successor(self, new: Generation, communicator: Any, changes: Sequence[Change]) -> MembershipChanged:
        self.gone = dict(sorted({**self.gone, **self.lost(changes)}.items()))
        self.successor = communicator
        return MembershipChanged(
            communicator=communicator, lost=self.gone, joined=self.joined(new), completed_by_all=self.completed
        )

    def joined(self, new: Generation) -> tuple[Rank, ...]:
        return tuple(rank for rank, each in enumerate(new.membership.members) if each.node not in self.nodes)

    def membership_event_to(self, new: Generation, joined: tuple[Rank, ...], communicator: Any) -> MembershipEvent:
        sizes, ranks = (self.group.size, new.group.size), (self.group.rank, new.group.rank)
        return MembershipEvent(new.membership.epoch, *sizes, *ranks, joined, self.gone, communicator)

    def stall_error(self, stall: NoProgress, timeout: float) -> NexarError:
        def ranks(nodes: Iterable[NodeId]) -> list[Rank]:
            return sorted(rank for node in nodes if (rank := self.membership.rank_of(node)) is not None)

        if stall.missing_votes:
            return RecoveryTimeout(missing_votes=ranks(stall.missing_votes), timeout=timeout)
        return NoQuorum(alive=ranks(stall.alive), needed=stall.needed, left=ranks(stall.left))

    def loss(self) -> PeerLost:
        rank = next(iter(self.gone), None)
        cause = "its link was lost" if rank is None else self.gone[rank]
        node = None if rank is None else self.membership.members[rank].node
        remedy = "the others continued: comm.shrink() gives the next communicator"
        return PeerLost(rank=rank, node=node, cause=cause, remedy=remedy)

    def lost(self, changes: Sequence[Change]) -> dict[Rank, str]:
        causes: dict[Rank, str] = {}
        for change in changes:
            causes |= change.causes(self.membership)
        return dict(sorted(causes.items()))
