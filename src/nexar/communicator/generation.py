"""One generation of a communicator at this node: its state and outcome."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING, Final

from nexar.cluster.control_loop import CancelToken
from nexar.cluster.membership import Membership
from nexar.collectives.context import CollectiveContext
from nexar.communicator.events import EventFeed, FailureFeed, MembershipEvent
from nexar.errors import NexarError, NoQuorum, RecoveryTimeout, Revoked
from nexar.links.operation import Operation
from nexar.links.progress import Progress
from nexar.rpc.registry import Registry
from nexar.types import AwaitedPeer, NodeId, Rank

if TYPE_CHECKING:
    from nexar.communicator.communicator import Communicator  # which imports this module


class GenerationOutcome(Operation):
    """Done when the generation ends; its error carries the successor. Any thread may wait."""

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
        """Set or replace the outcome (a successor may follow NoQuorum). Not under the node's lock."""
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
    """Immutable except for its end: `interrupt` ends every call, `outcome` holds the error to raise."""

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
        self._when_closed: list[Callable[[], object]] = []  # called once each on close; under `_closing`
        # The newest communicator after it. Written before the outcome.
        self.successor: Communicator | None = None
        # The outcome carries a successor. Written after the outcome.
        self.is_superseded = False
        # Members that the successor lacks, and why. Written before the outcome.
        self.gone: dict[Rank, str] = {}
        # All of them left by agreement. Written before the outcome.
        self.agreed = False
        # Calls wait for the outcome. Written once, before calls are interrupted.
        self.interrupted = False
        # Set on interruption, for work on its behalf that is not a call.
        self.cancel_token: Final = CancelToken()

    def leave(self) -> None:
        """Tell the members that this node makes no more calls on it. Close it next. Never blocks."""
        self.group.leave()
        self.context.call_log.leave()

    def close(self) -> None:
        """Free its resources. Idempotent, even during the hand-over to its successor."""
        with self._closing:
            first, self._freed = not self._freed, True
        if first:
            self._close()
        with self._closing:
            self._closed = True
            callbacks, self._when_closed = self._when_closed, []
        for callback in reversed(callbacks):
            callback()

    def call_when_closed(self, callback: Callable[[], object]) -> None:
        """Call it after the resources are freed: by the closing thread, or at once if that has happened."""
        with self._closing:
            if not self._closed:
                self._when_closed.append(callback)
                return
        callback()

    def close_in_background(self, successor: Generation) -> None:
        """Close it in a thread, which the successor's close joins: the next build must not wait for remote calls."""
        thread = threading.Thread(target=self.close, name="nexar-generation-close", daemon=True)
        with suppress(RuntimeError), successor._closing:  # the process may have no room for another thread
            if not successor._closed:
                thread.start()
                successor._when_closed.append(thread.join)
                return
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
    def is_stalled(self) -> bool:
        return isinstance(self.outcome.error, (NoQuorum, RecoveryTimeout))

    @property
    def is_blocked_by_close(self) -> bool:
        return isinstance(self.outcome.error, Revoked) and self.outcome.error.closed

    def interrupt(self, error: NexarError | None = None) -> None:
        """End pending and later calls and release their buffers. Not under the node's lock. Idempotent."""
        self.interrupted = True
        self.context.interrupt(error or Revoked(communicator=str(self.communicator), reason="its members change"))
        self.cancel_token.cancel()

    def membership_event_to(
        self, new: Generation, joined: tuple[Rank, ...], communicator: Communicator
    ) -> MembershipEvent:
        sizes, ranks = (self.group.size, new.group.size), (self.group.rank, new.group.rank)
        return MembershipEvent(new.membership.epoch, *sizes, *ranks, joined, self.gone, communicator)
