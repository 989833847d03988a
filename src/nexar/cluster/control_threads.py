"""Calling back whoever dials for a node that closes: their waits end at once, not at their deadlines.

A thread that does at its time what is due, and sleeps until then.

What was decided, done in the order of the decisions, one thing at a time, by whichever thread finds nobody doing it.

So no thread waits for another one's I/O, nobody hears of a decision before the one that was made earlier, and what a
message brings about is done by the thread that heard it: there is no hop to another one.

Words for members that this node has no link to yet: who carries them dials first, and that takes a while.

One thread at most is on the way to each member, and not many at once, however much there is to say.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, Generic, Protocol, TypeVar

from nexar.errors import NexarError
from nexar.links.link import Link
from nexar.types import NodeId
from nexar.wire.control import Message


class DialCancelled(Exception):
    """This node is closing, so nobody goes on dialing for it."""

    def __init__(self) -> None:
        super().__init__("this node is closed")


class CancelToken:
    """Made once, for good. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._made = threading.Event()
        self._lock = threading.Lock()
        self._wakes: dict[object, Callable[[], None]] = {}  # under the lock

    @property
    def made(self) -> bool:
        """Whether the node is closing."""
        return self._made.is_set()

    def make(self) -> None:
        """End every wait, now and later. Idempotent."""
        with self._lock:
            self._made.set()
            wakes = list(self._wakes.values())
        for wake in wakes:
            wake()

    @contextmanager
    def waking(self, wake: Callable[[], None]) -> Iterator[None]:
        """`wake`, which must not block, is called if the recall is made inside the block, or was made before it."""
        key = object()
        with self._lock:
            self._wakes[key] = wake
            made = self.made
        try:
            if made:
                wake()
            yield
        finally:
            with self._lock:
                del self._wakes[key]

    def pause(self, seconds: float) -> None:
        """Sleep. Recalled at once when it is made."""
        if self._made.wait(seconds):
            raise DialCancelled


_LONGEST_SLEEP: Final = 3600.0


class TimerThread:
    """Calls `ring(now)` at the times it was told of, in a thread of its own, never two calls at once. `ring` returns
    when it wants to be called next, None: when told. Close it.
    """

    def __init__(self, ring: Callable[[float], float | None]) -> None:
        """Without a thread until it is told of a time."""
        self._ring = ring
        self._condition = threading.Condition()
        self._due: float | None = None  # under the condition
        self._closed = False  # under the condition
        self._thread: threading.Thread | None = None  # under the condition

    def wake_by(self, due: float | None) -> None:
        """Ring at this time (time.monotonic), if it is earlier than what is due already. Any thread."""
        if due is None:
            return
        with self._condition:
            if self._due is None or due < self._due:
                self._due = due
                self._start()
                self._condition.notify()

    def close(self) -> None:
        """Returns when the thread has ended; not callable from it. Idempotent."""
        with self._condition:
            self._closed = True
            self._condition.notify()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _start(self) -> None:
        """Under the condition."""
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="nexar-alarm", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while self._wait():
            self.wake_by(self._ring(time.monotonic()))

    def _wait(self) -> bool:
        """Until something is due; False: closed."""
        with self._condition:
            while not self._closed:
                left = _LONGEST_SLEEP if self._due is None else self._due - time.monotonic()
                if left <= 0:
                    self._due = None  # from here on a new time is a new call
                    return True
                self._condition.wait(min(left, _LONGEST_SLEEP))
            return False


Item = TypeVar("Item")


class SerialQueue(Generic[Item]):
    """Of one machine. What `do` adds in its turn is done after what is there already."""

    def __init__(self, do: Callable[[Item], None]) -> None:
        self._do = do
        self._waiting: deque[Item] = deque()
        self._running = threading.Lock()  # held by who does them, without waiting for it

    def add(self, errands: Iterable[Item]) -> None:
        """In this order. Under the lock that the decisions are made under, so that theirs is kept; `run` follows."""
        self._waiting.extend(errands)

    def run(self) -> None:
        """Do what is to be done, unless another thread is at it; it then does this too. Without the lock. Raises what
        `do` raises; the rest waits for the next run.
        """
        while self._waiting and self._running.acquire(blocking=False):
            try:
                while self._waiting:
                    self._do(self._waiting.popleft())
            finally:
                self._running.release()


_log = logging.getLogger(__name__)

MAX_SENDER_THREADS: Final = 16
"""Threads."""
MAX_QUEUED_MESSAGES: Final = 64
"""That wait for one member: the newest. Whoever needs an answer asks again."""
_DIAL_TIMEOUT: Final = 1.0  # seconds for a dial


class LinkProvider(Protocol):
    """What is asked of a mesh."""

    def link(self, node: NodeId, deadline: float) -> Link:
        """See Mesh."""


class BackgroundSender:
    """Of one node. Any thread. Its threads end by themselves, soon after the node's dials have been recalled."""

    def __init__(
        self,
        links: LinkProvider,
        run_in_thread: Callable[[Callable[[], None]], None],
        *,
        own_delay: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`aside` runs something in a thread of its own. `own_delay`: seconds by which a dial has more time, because
        this node runs slowly.
        """
        self._own_delay = own_delay
        self._links = links
        self._run_in_thread = run_in_thread
        self._lock = threading.Lock()  # over everything below
        self._words: dict[NodeId, deque[Message]] = {}  # of each member that a courier is, or will be, on the way to
        self._waiting: deque[NodeId] = deque()  # for a courier
        self._busy = 0  # couriers

    def send(self, node: NodeId, message: Message) -> None:
        """It may be lost. Never blocks."""
        with self._lock:
            messages = self._words.get(node)
            if messages is not None:
                messages.append(message)
                return
            self._words[node] = deque([message], maxlen=MAX_QUEUED_MESSAGES)
            self._waiting.append(node)
            if self._busy == MAX_SENDER_THREADS:
                return
            self._busy += 1
        try:
            self._run_in_thread(self._run)
        except BaseException:  # no thread could be started
            self._fail()
            raise

    def _run(self) -> None:
        try:
            while (node := self._next()) is not None:
                self._carry(node)
        except BaseException:
            self._fail()
            raise

    def _carry(self, node: NodeId) -> None:
        try:
            link = self._links.link(node, time.monotonic() + _DIAL_TIMEOUT + self._own_delay())
            while (message := self._take(node)) is not None:
                link.send_control(message)
        except BaseException as error:
            with self._lock:
                del self._words[node]
            if not isinstance(error, NexarError):
                raise
            _log.debug("not said to node %x: %s", node, error)

    def _fail(self) -> None:
        """One courier fewer. If it was the last, nobody comes for those who wait: what they were to hear is lost."""
        with self._lock:
            self._busy -= 1
            while not self._busy and self._waiting:
                self._words.pop(self._waiting.popleft(), None)

    def _next(self) -> NodeId | None:
        """Whom to go to; None: nobody waits, and this courier is free."""
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._busy -= 1
            return None

    def _take(self, node: NodeId) -> Message | None:
        """The next word for it; None: there is none, and the next one goes by the link, or with another courier."""
        with self._lock:
            messages = self._words[node]
            if messages:
                return messages.popleft()
            del self._words[node]
            return None
