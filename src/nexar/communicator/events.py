"""What happens to the members of a communicator, told to whoever wants to know: by an async iterator or a callback.

A feed costs nothing until somebody subscribes. Publishing never waits for a listener: each has a queue of its own, of
bounded length, in which the newest are kept; what had to give way is counted.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Self, TypeVar
from weakref import WeakSet

from nexar.errors import UsageError
from nexar.types import NodeId, Rank

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Future

_log = logging.getLogger(__name__)
_CALLBACK_TIMEOUT: Final = 5.0  # seconds that a callback gets to return when its subscription is closed

QUEUE_LENGTH: Final = 1024
"""Events that a listener may be behind."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FailureEvent:
    """What was noticed of one rank. It may still turn out well: only a MembershipEvent says who is in."""

    rank: Rank
    """In the membership of `epoch`."""
    node: NodeId
    cause: str
    """How it was noticed; for people."""
    state: Literal["lost", "stuck", "left", "back"]
    """Lost: it cannot be reached. Stuck: alive, and does not go on. Left: it said goodbye. Back: it can be reached, or
    goes on, after all."""
    epoch: int


@dataclass(frozen=True, slots=True)
class MembershipEvent:
    """The step from one communicator to its successor."""

    epoch: int
    """Of the successor."""
    old_size: int
    size: int
    old_rank: Rank | None
    """Mine before; None: I have just joined."""
    rank: Rank
    """Mine now."""
    joined: tuple[Rank, ...]
    """Ranks of the successor that were not there before."""
    left: Mapping[Rank, str]
    """Old rank to why it is no longer there."""
    communicator: Any
    """The successor."""


class EventFeed(Generic[T]):
    """Events of one kind. Any thread. Close it with what it tells of: every subscription ends then."""

    def __init__(self, name: str) -> None:
        """`name`: of its threads."""
        self.name: Final = name
        self._lock = threading.Lock()
        self._closed = False  # under the lock
        self._called: set[Subscription[T]] = set()  # with a callback; until they are closed; under the lock
        self._iterated: WeakSet[Subscription[T]] = WeakSet()  # for as long as somebody holds them; under the lock
        self._awaited: set[Subscription[T]] = set()
        """Those of `_iterated` that a task waits on, under the lock: nothing else may hold that task."""

    def publish(self, event: T) -> None:
        """Tell all who have subscribed. Never blocks; nothing happens once it is closed."""
        for each in self._subscriptions():
            each.put(event)

    def subscribe(self, callback: Callable[[T], object] | None = None) -> Subscription[T]:
        """What is published from now on. With a callback: it is called in a thread of ours, in order.

        A subscription to a closed feed has ended.
        """
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
        """Listeners get what was published before, then their subscriptions end. Returns when the callbacks have
        returned; those that take long are left to themselves, with a warning. Idempotent.
        """
        with self._lock:
            self._closed = True
        subscriptions = self._subscriptions()
        for each in subscriptions:
            each.end()
        for each in subscriptions:
            each.join()

    def drop(self, subscription: Subscription[T]) -> None:
        """It is closed. Idempotent."""
        with self._lock:
            self._called.discard(subscription)
            self._iterated.discard(subscription)

    def awaited(self, subscription: Subscription[T], *, now: bool) -> None:
        """A task begins or ceases to wait on it."""
        with self._lock:
            (self._awaited.add if now else self._awaited.discard)(subscription)

    def _subscriptions(self) -> list[Subscription[T]]:
        with self._lock:
            return [*self._called, *self._iterated]


class FailureFeed(EventFeed[FailureEvent]):
    """What is noticed of members. One loss is told once, however many hints of it come: nothing more is said of who is
    gone, until it is back.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._gone: OrderedDict[NodeId, None] = OrderedDict()  # under the lock; the newest

    def publish(self, event: FailureEvent) -> None:
        """See Feed."""
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
    """The events of one listener, in the order in which they were published.

    Without a callback it is an async iterator, for one task: `async for event in comm.failure_events()`. It ends when
    the communicator is closed, or when nobody holds it any more, as after the loop is left. With a callback it calls
    it, in a thread of ours, until it is closed; what a callback raises is logged, and the next event comes all the
    same. Also a context manager, which closes it.
    """

    def __init__(self, feed: EventFeed[T], callback: Callable[[T], object] | None) -> None:
        self.dropped = 0
        """Events that the listener was too slow for: more than a queue full. Written by who publishes."""
        self._feed = feed
        self._callback = callback
        self._condition = threading.Condition()
        self._events: deque[T] = deque()  # under the condition
        self._ended = False  # under the condition; nothing comes any more, what is queued is still given
        self._waiter: tuple[AbstractEventLoop, Future[None]] | None = None  # under the condition
        self._thread: threading.Thread | None = None  # written before anybody else has the subscription

    # -- the feed's side ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """Called once, by the feed. The thread is a daemon: a callback that never returns does not keep a process."""
        if self._callback is not None:
            self._thread = threading.Thread(
                target=self._call_back, args=(self._callback,), name=f"nexar-{self._feed.name}", daemon=True
            )
            self._thread.start()

    def put(self, event: T) -> None:
        """Never blocks. Any thread."""
        with self._condition:
            if self._ended:
                return
            if len(self._events) == QUEUE_LENGTH:
                self._events.popleft()
                self.dropped += 1
            self._events.append(event)
            self._notify()

    def end(self) -> None:
        """Nothing comes any more. Idempotent."""
        with self._condition:
            self._ended = True
            self._notify()

    def join(self) -> None:
        """Until its callback has returned; not for ever, and not from the callback itself."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(_CALLBACK_TIMEOUT)
        if thread.is_alive():
            _log.warning(
                "the callback %r has not returned for %g s; it is not waited for", self._callback, _CALLBACK_TIMEOUT
            )

    # -- the listener's side -----------------------------------------------------------------------------

    def close(self) -> None:
        """No event is given any more. Returns when a callback that is running has returned; one that takes long is
        left to itself, with a warning. Idempotent; a callback may close its own subscription.
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
        """The next event. UsageError if somebody else gets the events: a callback, or another task."""
        from asyncio import get_running_loop  # noqa: PLC0415 - whoever awaits has it; nobody else pays for it

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
            except Exception:  # noqa: BLE001 - whatever a user's function raises
                _log.exception("the callback %r raised on %r; it is called again for the next", callback, event)


def _wake(waiter: Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
