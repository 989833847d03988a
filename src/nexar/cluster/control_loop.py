"""The control loop of one node: timers, sockets and short callbacks, one at a time, in one thread.

A callback must never block: this node's heartbeats are timers of the same loop. It may take briefly held locks, and
send without waiting. Longer work belongs in a TaskPool. A callback over SLOW_CALLBACK is logged.
"""

from __future__ import annotations

import itertools
import logging
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Generic, NamedTuple, Self, TypeVar

from nexar.clock import Clock, SystemClock
from nexar.errors import InternalError

_log = logging.getLogger(__name__)

MAX_QUEUED: Final = 4096
"""Callbacks that wait for the loop. One more is dropped, and `call_soon` returns False."""
SLOW_CALLBACK: Final = 0.010  # seconds; longer callbacks are logged at debug
_LONGEST_SLEEP: Final = 3600.0

TimerCallback = Callable[[float], float | None]


class Timer:
    """One callback of a ControlLoop. `callback(now)` returns its next time, or None. Any thread, except as stated.

    Times are those of the loop's clock. A callback that raises is logged and has no next time.
    """

    def __init__(self, loop: ControlLoop, callback: TimerCallback) -> None:
        self._loop = loop
        self.callback: Final = callback
        self.due: float | None = None  # when it runs next; this and the next two are guarded by the loop's lock
        self.number = 0  # of the last setting
        self.closed = False

    def move(self, when: float) -> None:
        """Run at `when`, replacing an earlier setting."""
        self._loop.set_timer(self, when)

    def wake_by(self, due: float | None) -> None:
        """Run at `due` or earlier. None changes nothing."""
        if due is not None:
            self._loop.set_timer(self, due, only_earlier=True)

    def cancel(self) -> None:
        """Clear the time. The callback may be running. Never blocks."""
        self._loop.set_timer(self, None)

    def close(self) -> None:
        """Never run again. Waits for a running callback, except inside the loop, so the caller must hold no lock that
        the callback needs. Idempotent.
        """
        self._loop.close_timer(self)


class TimerSet:
    """The timers that have a time. The owner's lock guards every method.

    Not a heap: a node has a few dozen timers, most are moved before they run, and every step is atomic, so a finaliser
    that interrupts one may set a timer.
    """

    def __init__(self) -> None:
        self._timers: dict[Timer, None] = {}
        self._numbers = itertools.count(1)
        self.newest = 0  # number of the newest setting

    def __len__(self) -> int:
        return len(self._timers)

    def set(self, timer: Timer, due: float | None) -> None:
        timer.due = due
        timer.number = self.newest = next(self._numbers)
        if due is None:
            self._timers.pop(timer, None)
        else:
            self._timers[timer] = None

    def first(self) -> float | None:
        return min((timer.due for timer in list(self._timers) if timer.due is not None), default=None)

    def take(self, now: float, newest: int) -> Timer | None:
        """Remove and return the first due timer, except those set after number `newest`."""
        due = [each for each in list(self._timers) if each.due is not None and each.due <= now]
        timer = min((each for each in due if each.number <= newest), key=_order, default=None)
        if timer is not None:
            self.set(timer, None)
        return timer


def _order(timer: Timer) -> tuple[float, int]:
    return timer.due or 0.0, timer.number


class _Watch(NamedTuple):
    socket: socket.socket
    callback: Callable[[], None]


class _Poller:
    """The selector of a loop. Only the executing thread uses it, except `wake`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._watches: dict[int, _Watch] = {}  # by descriptor
        self._sender, self._receiver = socket.socketpair()
        for end in (self._sender, self._receiver):
            end.setblocking(False)
        self._selector.register(self._receiver, selectors.EVENT_READ)

    def wake(self) -> None:
        try:
            self._sender.send(b"!")
        except OSError:
            return  # a wake-up is pending, or it is closed

    def wait(self, seconds: float) -> list[_Watch]:
        ready = self._selector.select(seconds)
        for key, _ in ready:
            if key.data is None:
                self._receiver.recv(64)
        return [key.data for key, _ in ready if key.data is not None]

    def is_watched(self, watch: _Watch) -> bool:
        return self._watches.get(watch.socket.fileno()) is watch

    def register(self, watched: socket.socket, events: int, callback: Callable[[], None]) -> None:
        self.unregister(watched)
        watch = self._watches[watched.fileno()] = _Watch(watched, callback)
        self._selector.register(watched, events, watch)

    def unregister(self, watched: socket.socket) -> None:
        if self._watches.pop(watched.fileno(), None) is not None:
            self._selector.unregister(watched)

    def close(self) -> None:
        """Also closes registered sockets. Unregisters nothing: after a fork the parent shares the kernel's set."""
        self._selector.close()
        for end in (self._sender, self._receiver, *(watch.socket for watch in self._watches.values())):
            end.close()
        self._watches.clear()


class ControlLoop:
    """Runs timers, socket callbacks and queued callbacks, one at a time, in one thread that starts on first use. Any
    thread, except as stated. Close it after its users. In a forked child it does nothing.
    """

    def __init__(self, *, clock: Clock | None = None, name: str = "nexar-control", threaded: bool = True) -> None:
        """Without a thread the caller calls `step`, always in the same thread."""
        self._clock = clock or SystemClock()
        self._name = name
        self._threaded = threaded
        self._owner = os.getpid()
        # Guards everything below. Reentrant: a finaliser that the garbage collector runs may set a timer.
        self._lock = threading.RLock()
        self._timers = TimerSet()
        self._queue: deque[Callable[[], None]] = deque()
        self._running: Timer | None = None  # its callback is being called
        self._returned = threading.Condition(self._lock)  # notified when a timer's callback has returned
        self._sleeps_until: float | None = None  # None while the executing thread is awake, or a wake-up is on its way
        self._poller: _Poller | None = None  # made with the first use
        self._started = False
        self._thread: threading.Thread | None = None  # set once
        self._overflowing = False  # callbacks are being dropped, and a warning was logged
        self._closed = False

    # -- any thread --------------------------------------------------------------------------------------

    def now(self) -> float:
        return self._clock.now()

    def call_at(self, when: float | None, callback: TimerCallback) -> Timer:
        """Return a timer. Without `when` it has no time yet."""
        timer = Timer(self, callback)
        if when is not None:
            self.set_timer(timer, when)
        return timer

    def call_soon(self, callback: Callable[[], None]) -> bool:
        """Call it in the loop, after those queued before. False: it is dropped and never called, because the loop is
        closed, this is a forked child, or MAX_QUEUED wait, which happens only if a callback blocks.
        """
        if not self._is_mine:
            return False
        with self._lock:
            if self._closed or self._is_full(callback):
                return False
            self._start()
            self._queue.append(callback)
            self._wake()
        return True

    def close(self) -> None:
        """Queued callbacks still run, timers do not. Closes registered sockets. Joins the thread, except inside the
        loop. Idempotent.
        """
        if not self._is_mine:
            return
        with self._lock:
            self._closed = True
            self._wake()
            thread = self._thread
        if thread is None:
            self._end()
        elif thread is not threading.current_thread():
            thread.join()

    def abandon(self) -> None:
        """In a forked child: close its descriptors. Takes no lock."""
        self._closed = True
        if self._poller is not None:
            self._poller.close()

    def next_due(self) -> float | None:
        with self._lock:
            return self._timers.first()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- for Timer: any thread ---------------------------------------------------------------------------

    def set_timer(self, timer: Timer, due: float | None, *, only_earlier: bool = False) -> None:
        if not self._is_mine:
            return
        with self._lock:
            if timer.closed or self._closed:
                return
            if only_earlier and timer.due is not None and due is not None and timer.due <= due:
                return
            if due is not None:
                self._start()
            self._timers.set(timer, due)
            if due is not None:
                self._wake(due)

    def close_timer(self, timer: Timer) -> None:
        if not self._is_mine:
            return
        with self._lock:
            self._timers.set(timer, None)
            timer.closed = True
            if self._threaded and threading.current_thread() is not self._thread:
                self._returned.wait_for(lambda: self._running is not timer)

    # -- only in a callback of this loop -----------------------------------------------------------------

    def register(self, watched: socket.socket, events: int, callback: Callable[[], None]) -> None:
        """Call `callback` while the socket has one of these selector events. Replaces an earlier registration."""
        self._check_thread()
        self._open().register(watched, events, callback)

    def unregister(self, watched: socket.socket) -> None:
        """Call this before closing the socket. Idempotent."""
        self._check_thread()
        self._open().unregister(watched)

    # -- the executing thread ----------------------------------------------------------------------------

    def step(self, longest: float = 0.0) -> None:
        """Wait at most `longest` seconds for events, then do all that is due. New work waits for the next step."""
        if longest > 0 or self._poller is not None:
            self._poll(self._open(), longest)
        with self._lock:
            count, newest = len(self._queue), self._timers.newest
        for _ in range(count):
            self._call(self._queue.popleft())
        while (timer := self._take(newest)) is not None:
            self._run_timer(timer)

    def _poll(self, poller: _Poller, longest: float) -> None:
        ready = poller.wait(self._begin_sleep(longest))
        with self._lock:
            self._sleeps_until = None
        for watch in ready:
            if poller.is_watched(watch):
                self._call(watch.callback)

    def _run(self) -> None:
        while not self._closed:
            self.step(_LONGEST_SLEEP)
        self._end()

    def _end(self) -> None:
        """Idempotent."""
        while self._queue:
            self._call(self._queue.popleft())
        with self._lock:
            poller, self._poller = self._poller, None
        if poller is not None:
            poller.close()

    def _begin_sleep(self, longest: float) -> float:
        """Returns the longest time to sleep."""
        with self._lock:
            now = self._clock.now()
            self._sleeps_until = now + longest  # before it looks: a finaliser that sets a timer from now on wakes it
            first = self._timers.first()
            if self._queue or self._closed:
                return 0.0
            until = now + longest if first is None else min(first, now + longest)
            self._sleeps_until = until
            return max(0.0, until - now)

    def _take(self, newest: int) -> Timer | None:
        with self._lock:
            self._running = None if self._closed else self._timers.take(self._clock.now(), newest)
            return self._running

    def _run_timer(self, timer: Timer) -> None:
        again = self._call(timer.callback, self._clock.now())
        with self._lock:
            self._running = None
            self._returned.notify_all()
        timer.wake_by(again)

    def _call(self, callback: Callable[..., Any], *arguments: Any) -> Any:
        begin = self._clock.now()
        try:
            return callback(*arguments)
        except Exception:  # noqa: BLE001 - other callbacks must go on; the log has the traceback
            _log.exception("the callback %s of the control loop raised; the loop continues", _name(callback))
            return None
        finally:
            seconds = self._clock.now() - begin
            if seconds > SLOW_CALLBACK:
                _log.debug("the callback %s took %.0f ms of the control loop", _name(callback), seconds * 1e3)

    # -- helpers -----------------------------------------------------------------------------------------

    @property
    def _is_mine(self) -> bool:
        """False in a forked child, where the thread does not exist and the lock may be held."""
        return os.getpid() == self._owner

    def _check_thread(self) -> None:
        if self._threaded and threading.current_thread() is not self._thread:
            raise InternalError("control loop: sockets are registered only by its own callbacks")

    def _is_full(self, callback: Callable[[], None]) -> bool:
        """Under the lock."""
        full = len(self._queue) >= MAX_QUEUED
        if full and not self._overflowing:
            _log.warning(
                "the control loop has %d waiting callbacks, the oldest %s, and drops %s and further ones",
                len(self._queue),
                _name(self._queue[0]),
                _name(callback),
            )
        self._overflowing = full
        return full

    def _start(self) -> None:
        """Under the lock."""
        if self._started or not self._threaded:
            return
        self._started = True
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        try:
            self._open()
            thread.start()
        except BaseException:
            self._started = False
            raise
        self._thread = thread

    def _open(self) -> _Poller:
        poller = self._poller
        if poller is None:
            poller = self._poller = _Poller()
        return poller

    def _wake(self, due: float | None = None) -> None:
        """Wake the thread before `due`, or now. Under the lock."""
        if self._sleeps_until is not None and self._poller is not None and (due is None or due < self._sleeps_until):
            self._sleeps_until = None
            self._poller.wake()


def _name(callback: Callable[..., Any]) -> str:
    while isinstance(callback, partial):
        callback = callback.func
    return getattr(callback, "__qualname__", None) or repr(callback)


class DialCancelled(Exception):
    """The node closes."""

    def __init__(self) -> None:
        super().__init__("this node is closed")


class CancelToken:
    """Cancels dials and waits, permanently. Any thread."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._wakes: dict[object, Callable[[], None]] = {}  # guarded by the lock

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Idempotent."""
        with self._lock:
            self._cancelled.set()
            wakes = list(self._wakes.values())
        for wake in wakes:
            wake()

    @contextmanager
    def waking(self, wake: Callable[[], None]) -> Iterator[None]:
        """Call `wake` when cancelled before or inside the block. It must not block."""
        key = object()
        with self._lock:
            self._wakes[key] = wake
            cancelled = self.is_cancelled
        try:
            if cancelled:
                wake()
            yield
        finally:
            with self._lock:
                del self._wakes[key]

    def pause(self, seconds: float) -> None:
        """Raises DialCancelled when cancelled."""
        if self._cancelled.wait(seconds):
            raise DialCancelled


Item = TypeVar("Item")


class SerialQueue(Generic[Item]):
    """Performs items in order, in any thread that finds no other performing. So no thread waits for another's I/O.

    A thread that must not perform items posts them and passes `drain` to `ControlLoop.call_soon`. `perform` may post.
    In a forked child nothing is performed.
    """

    def __init__(self, perform: Callable[[Item], None]) -> None:
        self._perform = perform
        self._owner = os.getpid()
        self._waiting: deque[Item] = deque()
        self._draining = threading.Lock()  # held by the performing thread; never waited for

    def post(self, items: Iterable[Item]) -> None:
        """Call it under the lock that orders the decisions, then `drain` without it."""
        self._waiting.extend(items)

    def drain(self) -> None:
        """Perform the items unless another thread does. Raises the errors of `perform`; the rest waits for the next
        call.
        """
        while self._waiting and os.getpid() == self._owner and self._draining.acquire(blocking=False):
            try:
                while self._waiting:
                    self._perform(self._waiting.popleft())
            finally:
                self._draining.release()
