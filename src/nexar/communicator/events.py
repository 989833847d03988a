"""Events about members, for async iterators or callbacks.

Publishing never blocks: each queue is bounded, and drops and counts its oldest events.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Final, Generic, Literal, Self, TypeVar
from weakref import WeakSet

from nexar.errors import UsageError
from nexar.types import NodeId, Rank

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Future

    from nexar.communicator.communicator import Communicator  # which imports this module

_log = logging.getLogger(__name__)
_CALLBACK_TIMEOUT: Final = 5.0  # seconds that a callback gets to return when its subscription is closed

# Events that a listener may be behind.
QUEUE_LENGTH: Final = 1024

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FailureEvent:
    """An observation about one rank. "back" revokes it. Only a MembershipEvent reports a change of members."""

    rank: Rank
    """Rank in the membership of `epoch`."""
    node: NodeId
    cause: str
    """How it was observed, as text."""
    state: Literal["lost", "stuck", "left", "back"]
    """"lost": unreachable. "stuck": alive without progress. "left": it closed. "back": reachable or progressing again.
    """
    epoch: int


@dataclass(frozen=True, slots=True)
class MembershipEvent:
    """The step from one communicator to its successor."""

    epoch: int
    """Epoch of the successor."""
    old_size: int
    size: int
    old_rank: Rank | None
    """This process's rank before; None: it just joined."""
    rank: Rank
    """This process's rank now."""
    joined: tuple[Rank, ...]
    """New ranks of the successor."""
    left: Mapping[Rank, str]
    """Old rank to the reason why it left."""
    communicator: Communicator
    """The successor."""


class EventFeed(Generic[T]):
    """Publishes events of one kind. Any thread."""

    def __init__(self, name: str) -> None:
        self.name: Final = name
        self._lock = threading.Lock()
        self._closed = False  # under the lock
        self._called: set[Subscription[T]] = set()  # with a callback, until closed; under the lock
        self._iterated: WeakSet[Subscription[T]] = WeakSet()  # without a callback; under the lock
        # Those of `_iterated` on which a task waits, under the lock: keeps them alive, as nothing else may refer to
        # that task.
        self._awaited: set[Subscription[T]] = set()

    def publish(self, event: T) -> None:
        """Never blocks. No effect once closed."""
        for each in self._subscriptions():
            each.put(event)

    def subscribe(self, callback: Callable[[T], object] | None = None) -> Subscription[T]:
        """A thread calls `callback`, in order. A closed feed returns an ended subscription."""
        subscription = Subscription(self, callback)
        subscription.begin()
        with self._lock:
            closed = self._closed
            if not closed:
                (self._iterated if callback is None else self._called).add(subscription)
        if closed:
            subscription.end()
        return subscription

    def close(self) -> None:
        """End all subscriptions after their queued events. Waits for callbacks, 5 seconds each. Idempotent."""
        with self._lock:
            self._closed = True
        subscriptions = self._subscriptions()
        for each in subscriptions:
            each.end()
        for each in subscriptions:
            each.join()

    def drop(self, subscription: Subscription[T]) -> None:
        with self._lock:
            self._called.discard(subscription)
            self._iterated.discard(subscription)

    def awaited(self, subscription: Subscription[T], *, now: bool) -> None:
        with self._lock:
            (self._awaited.add if now else self._awaited.discard)(subscription)

    def _subscriptions(self) -> list[Subscription[T]]:
        with self._lock:
            return [*self._called, *self._iterated]


class FailureFeed(EventFeed[FailureEvent]):
    """Publishes nothing more about a lost member until it is back."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._gone: OrderedDict[NodeId, None] = OrderedDict()  # under the lock; the newest QUEUE_LENGTH

    def publish(self, event: FailureEvent) -> None:
        with self._lock:
            known = event.node in self._gone
            if event.state == "back":
                self._gone.pop(event.node, None)
            elif event.state in ("lost", "left"):
                self._gone[event.node] = None
            while len(self._gone) > QUEUE_LENGTH:
                self._gone.popitem(last=False)
        if not known or event.state == "back":
            super().publish(event)


class Subscription(Generic[T]):
    """Events of one listener, in order. A context manager, which closes it.

    Without a callback it is an async iterator for one task: `async for event in comm.failure_events()`. It ends when
    the communicator is closed or nothing refers to the subscription. With a callback, a thread of nexar calls it for
    each event until the subscription is closed, and logs its exceptions.
    """

    def __init__(self, feed: EventFeed[T], callback: Callable[[T], object] | None) -> None:
        self.dropped = 0
        """Events lost because the queue was full. Written by the publishing thread."""
        self._feed = feed
        self._callback = callback
        self._condition = threading.Condition()
        self._events: deque[T] = deque()  # under the condition
        self._ended = False  # under the condition; queued events are still delivered
        self._waiter: tuple[AbstractEventLoop, Future[None]] | None = None  # under the condition
        self._thread: threading.Thread | None = None  # written before the subscription is shared

    # -- called by the feed ------------------------------------------------------------------------------

    def begin(self) -> None:
        """Called once. Starts a daemon thread: a callback that hangs does not block process exit."""
        if self._callback is not None:
            self._thread = threading.Thread(
                target=self._call_back, args=(self._callback,), name=f"nexar-{self._feed.name}", daemon=True
            )
            self._thread.start()

    def put(self, event: T) -> None:
        with self._condition:
            if self._ended:
                return
            if len(self._events) == QUEUE_LENGTH:
                self._events.popleft()
                self.dropped += 1
            self._events.append(event)
            self._notify()

    def end(self) -> None:
        with self._condition:
            self._ended = True
            self._notify()

    def join(self) -> None:
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(_CALLBACK_TIMEOUT)
        if thread.is_alive():
            _log.warning(
                "the callback %r has not returned after %g s; nexar does not wait for it",
                self._callback,
                _CALLBACK_TIMEOUT,
            )

    # -- called by the listener --------------------------------------------------------------------------

    def close(self) -> None:
        """Drop queued events and deliver no more. Waits up to 5 seconds for a running callback, then logs a warning.
        Idempotent. A callback may close its own subscription.
        """
        with self._condition:
            self._events.clear()
        self.end()
        self._feed.drop(self)
        self.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        """Return the next event. UsageError if a callback or another task receives the events."""
        from asyncio import get_running_loop  # noqa: PLC0415 - already loaded for callers that await; a cost for others

        loop = get_running_loop()
        while True:
            with self._condition:
                self._check()
                if self._events:
                    return self._events.popleft()
                if self._ended:
                    raise StopAsyncIteration
                waiter = loop.create_future()
                self._waiter = loop, waiter
            self._feed.awaited(self, now=True)
            try:
                await waiter
            finally:
                self._feed.awaited(self, now=False)

    # -- inside --------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Under the condition."""
        if self._callback is not None:
            raise UsageError("the events of this subscription go to its callback; subscribe again, without one")
        if self._waiter is not None and not self._waiter[1].done():
            raise UsageError("another task waits for this subscription's events; subscribe once for each task")

    def _notify(self) -> None:
        """Under the condition."""
        self._condition.notify()
        if self._waiter is None:
            return
        loop, waiter = self._waiter
        self._waiter = None
        try:
            loop.call_soon_threadsafe(_wake, waiter)
        except RuntimeError:
            _log.debug("the loop of a task that waited for %s has been closed meanwhile", self._feed.name)

    def _call_back(self, callback: Callable[[T], object]) -> None:
        while True:
            with self._condition:
                while not self._events and not self._ended:
                    self._condition.wait()
                if not self._events:
                    return
                event = self._events.popleft()
            try:
                callback(event)
            except Exception:  # noqa: BLE001 - any exception of the user's function
                _log.exception("the callback %r raised on %r; it is called again for the next", callback, event)


def _wake(waiter: Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
