"""One thread that waits: how many of its operations are not done yet, and the sleep that their end ends.

Something posted that will be done later.

Law: an operation is done exactly once, under the node's lock (`Progress.lock`), and from then on nothing
touches its buffers. Whoever finishes it also tells its waiter; who drives has nothing else to announce.

I/O that a change of state asks for. Filled under the node's lock, done after it was released, by whoever comes
first.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING, Any

from nexar.transport.base import CarrierLost
from nexar.types import AwaitedPeer

if TYPE_CHECKING:
    import asyncio


class Waiter:
    """Counts down to zero, or falls to zero at the first error: a wait that has failed waits for nothing more.

    Written under the node's lock, but for the sleep itself, which is a lock that whoever wakes us releases.
    """

    __slots__ = ("_signal", "asleep", "keeps", "pending")

    def __init__(self) -> None:
        self.pending = 0
        self.keeps = False  # at its deadline the operations go on without it; set before it waits
        self.asleep = False
        self._signal: threading.Lock | None = None

    def count(self, error: BaseException | None) -> None:
        """One operation has ended. Those that end after an error find zero, and leave it so."""
        if error is None and self.pending > 1:
            self.pending -= 1
        else:
            self.pending = 0
            if self.asleep:
                self.wake()

    def prepare(self) -> None:
        """The next wake() ends the next sleep(), also if it comes first."""
        if self._signal is None:
            self._signal = threading.Lock()
            self._signal.acquire()
        self.asleep = True

    def sleep(self, timeout: float) -> None:
        """Until woken or timed out; at times for no reason, when two woke the sleep before."""
        signal = self._signal
        if signal is not None:
            signal.acquire(timeout=timeout)

    def wake(self) -> None:
        """At most one release for each prepare(). Under the lock, or in a signal handler of the waiting thread."""
        if self.asleep and self._signal is not None:
            self.asleep = False
            try:
                self._signal.release()
            except RuntimeError:  # a signal handler and a finished operation woke it at the same moment
                return


class Operation(ABC):
    """Posted work. `await` it from asyncio, or hand it to `Progress.wait`."""

    __slots__ = ("_callbacks", "_waiter", "done", "error", "lock")

    def __init__(self, lock: threading.Lock) -> None:
        self.lock = lock  # the node's
        self.done = False
        self.error: BaseException | None = None
        self._waiter: Waiter | None = None
        self._callbacks: list[Callable[[], object]] | None = None

    @property
    @abstractmethod
    def name(self) -> str:
        """What it is, for error messages: `receive of tag 7`."""

    @abstractmethod
    def awaited(self) -> AwaitedPeer:
        """Who has to do what before this can be done."""

    @abstractmethod
    def cancel(self) -> None:
        """Give up. When this returns, nothing touches the operation's buffers. Done operations are left alone."""

    def undo(self) -> None:
        """Cancel it. A receive that is done already gives its message back, for the next receive to take; only for
        results that nobody has used.
        """
        self.cancel()

    def last_moved(self) -> float:
        """When it last came nearer to its end (time.monotonic), where that can be seen; else 0."""
        return 0.0

    def value(self) -> Any:
        """What it gave, once it is done."""
        return None

    def result(self) -> Any:
        """The value, or the error raised. Only for operations that are done."""
        if self.error is not None:
            raise copy(self.error)  # its own: several operations may have failed for one reason
        return self.value()

    # -- under the node's lock -------------------------------------------------------------------------

    def finish(self, error: BaseException | None = None) -> None:
        """It is done. Idempotent: the first outcome stands."""
        if self.done:
            return
        self.error = error
        self.done = True
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if waiter.pending == 1 and not waiter.asleep:
                waiter.pending = 0  # what count() would do; this is the case that has to be quick
            else:
                waiter.count(error)
        callbacks = self._callbacks
        if callbacks is not None:
            self._callbacks = None
            for callback in callbacks:
                callback()

    def join(self, waiter: Waiter) -> None:
        """Let `waiter` count this operation. A second waiter is served through a callback."""
        waiter.pending += 1
        if self._waiter is None:
            self._waiter = waiter
        else:
            self.when_done(lambda: waiter.count(self.error))

    def part(self, waiter: Waiter) -> None:
        """`waiter` has given up."""
        if self._waiter is waiter:
            self._waiter = None

    def when_done(self, callback: Callable[[], object]) -> None:
        """`callback` runs in the finishing thread under the node's lock: it may only hand over, never call back."""
        if self.done:
            callback()
        elif self._callbacks is None:
            self._callbacks = [callback]
        else:
            self._callbacks.append(callback)

    def forget(self, callback: Callable[[], object]) -> None:
        """Do not call it after all. Without effect when it has been called."""
        if self._callbacks is not None and callback in self._callbacks:
            self._callbacks.remove(callback)

    # -- asyncio ---------------------------------------------------------------------------------------

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait without blocking the loop; the node's progress thread drives meanwhile.

        Whatever ends the awaiting but its own end cancels it: a cancelled task, or a coroutine that is closed.
        """
        from asyncio import get_running_loop  # noqa: PLC0415 - whoever awaits has it; nobody else pays for it

        loop = get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def resolve() -> None:
            if not future.done():
                future.set_result(None)

        def announce() -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody awaits this any more, and the node goes on
                loop.call_soon_threadsafe(resolve)

        with self.lock:
            self.when_done(announce)
        try:
            yield from future
        except BaseException:
            self.cancel()
            raise
        return self.result()


class FinishedOperation(Operation):
    """An operation that was done when it was posted."""

    __slots__ = ()

    def __init__(self) -> None:  # no lock: nobody ever waits for it
        self.done = True
        self.error = None

    @property
    def name(self) -> str:
        """Never shown."""
        return "finished operation"

    def awaited(self) -> AwaitedPeer:
        """Nobody."""
        return AwaitedPeer()

    def cancel(self) -> None:
        """Too late."""

    def part(self, waiter: Waiter) -> None:
        """Nobody waits for it."""

    def __await__(self) -> Generator[Any, None, Any]:
        """At once."""
        yield from ()


FINISHED = FinishedOperation()


class DeferredIO:
    """Calls to make, in order. A deque's append and popleft are atomic, so no lock is needed to empty it."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()

    def add(self, call: Callable[..., Any], *arguments: Any) -> None:
        """`call` must not block."""
        self.calls.append((call, arguments))

    def flush(self) -> None:
        """Make the calls.

        A carrier that is lost reports that to its link by itself, once; what it was to send is void.
        """
        calls = self.calls
        while calls:
            try:
                call, arguments = calls.popleft()
            except IndexError:  # another thread was quicker
                return
            try:
                call(*arguments)
            except CarrierLost:
                continue
