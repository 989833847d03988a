"""Operation (posted work), Waiter (one thread's wait), DeferredIO (I/O to do after releasing the node's lock).

An operation completes exactly once, under the node's lock (`Progress.lock`). Afterwards nothing touches its buffers.
The completing thread also notifies its waiter.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from typing import TYPE_CHECKING, Any

from nexar.transport.base import CarrierLost
from nexar.types import AwaitedPeer

if TYPE_CHECKING:
    import asyncio


class Waiter:
    """One thread's count of pending operations; an error sets it to zero.

    The node's lock guards it, except the sleep: a lock that the waking thread releases.
    """

    __slots__ = ("_signal", "asleep", "keeps", "pending")

    def __init__(self) -> None:
        self.pending = 0
        self.keeps = False  # at its deadline the operations continue without it; set before waiting
        self.asleep = False
        self._signal: threading.Lock | None = None

    def count(self, error: BaseException | None) -> None:
        if error is None and self.pending > 1:
            self.pending -= 1
        else:
            self.pending = 0
            if self.asleep:
                self.wake()

    def prepare(self) -> None:
        """The next wake() ends the next sleep(), even if wake() comes first."""
        if self._signal is None:
            self._signal = threading.Lock()
            self._signal.acquire()
        self.asleep = True

    def sleep(self, timeout: float) -> None:
        """May return early."""
        signal = self._signal
        if signal is not None:
            signal.acquire(timeout=timeout)

    def wake(self) -> None:
        """Effective once per prepare(). Call it under the lock, or in a signal handler of the waiting thread."""
        if self.asleep and self._signal is not None:
            self.asleep = False
            try:
                self._signal.release()
            except RuntimeError:  # a signal handler and a completing operation woke it simultaneously
                return


class Operation(ABC):
    """Posted work: `await` it, or pass it to `Progress.wait`."""

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
        """For error messages: `receive of tag 7`."""

    @abstractmethod
    def awaited(self) -> AwaitedPeer: ...

    @abstractmethod
    def cancel(self) -> None:
        """On return nothing touches the buffers. No effect once done."""

    def undo(self) -> None:
        """Cancel; a completed receive gives its message back. Only if the result was not used."""
        self.cancel()

    def last_moved(self) -> float:
        """Return the time of its last progress (time.monotonic), or 0."""
        return 0.0

    def value(self) -> Any:
        return None

    def result(self) -> Any:
        """Return the value or raise the error. Requires `done`."""
        if self.error is not None:
            raise copy(self.error)  # a copy: several operations may share one error
        return self.value()

    # -- under the node's lock -------------------------------------------------------------------------

    def finish(self, error: BaseException | None = None) -> None:
        """Idempotent."""
        if self.done:
            return
        self.error = error
        self.done = True
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if waiter.pending == 1 and not waiter.asleep:
                waiter.pending = 0  # inlined count(), for the fast path
            else:
                waiter.count(error)
        callbacks = self._callbacks
        if callbacks is not None:
            self._callbacks = None
            for callback in callbacks:
                callback()

    def add_waiter(self, waiter: Waiter) -> None:
        waiter.pending += 1
        if self._waiter is None:
            self._waiter = waiter
        else:
            self.when_done(lambda: waiter.count(self.error))

    def remove_waiter(self, waiter: Waiter) -> None:
        if self._waiter is waiter:
            self._waiter = None

    def when_done(self, callback: Callable[[], object]) -> None:
        """The callback runs in the completing thread, under the node's lock, so it may only enqueue."""
        if self.done:
            callback()
        elif self._callbacks is None:
            self._callbacks = [callback]
        else:
            self._callbacks.append(callback)

    def forget(self, callback: Callable[[], object]) -> None:
        if self._callbacks is not None and callback in self._callbacks:
            self._callbacks.remove(callback)

    # -- asyncio ---------------------------------------------------------------------------------------

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait while the progress thread drives. Ending the await early cancels the operation."""
        from asyncio import get_running_loop  # noqa: PLC0415 - imported only when asyncio is in use

        loop = get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def resolve() -> None:
            if not future.done():
                future.set_result(None)

        def announce() -> None:
            with suppress(RuntimeError):  # the loop is closed, so no task awaits this
                loop.call_soon_threadsafe(resolve)

        with self.lock:
            self.when_done(announce)
        try:
            yield from future
        except BaseException:
            self.cancel()
            raise
        return self.result()


@contextmanager
def cancelling(operations: Sequence[Operation]) -> Iterator[None]:
    """Cancel unfinished operations when an exception leaves the block, GeneratorExit included."""
    try:
        yield
    except BaseException:
        for operation in operations:
            operation.cancel()
        raise


class FinishedOperation(Operation):
    """An operation that was complete when posted."""

    __slots__ = ()

    def __init__(self) -> None:  # no lock: no thread ever waits for it
        self.done = True
        self.error = None

    @property
    def name(self) -> str:
        return "finished operation"

    def awaited(self) -> AwaitedPeer:
        return AwaitedPeer()

    def cancel(self) -> None: ...

    def remove_waiter(self, waiter: Waiter) -> None: ...

    def __await__(self) -> Generator[Any, None, Any]:
        yield from ()


FINISHED = FinishedOperation()


class DeferredIO:
    """I/O calls, in order. Added under the node's lock; any thread makes them after its release."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()

    def add(self, call: Callable[..., Any], *arguments: Any) -> None:
        """`call` must not block."""
        self.calls.append((call, arguments))

    def flush(self) -> None:
        """Ignore CarrierLost: a lost carrier reports itself to its link."""
        calls = self.calls
        while calls:
            try:
                call, arguments = calls.popleft()
            except IndexError:  # another thread took it
                return
            try:
                call(*arguments)
            except CarrierLost:
                continue
