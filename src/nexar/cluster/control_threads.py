"""Cancellation, and sending in the background."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from nexar.errors import NexarError
from nexar.types import NodeId
from nexar.wire.control import Message

if TYPE_CHECKING:
    from nexar.cluster.mesh import Mesh  # at run time it would load NumPy into the seed


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
        """Call `wake`, which must not block, when cancelled before or inside the block."""
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


_log = logging.getLogger(__name__)

MAX_SENDER_THREADS: Final = 16
MAX_QUEUED_MESSAGES: Final = 64  # per member; the newest are kept, and senders that need an answer ask again
_DIAL_TIMEOUT: Final = 1.0  # seconds


class BackgroundSender:
    """Sends messages to members that must be dialed first. Any thread.

    A member has at most one sending thread, the node MAX_SENDER_THREADS. They end with the node's dials.
    """

    def __init__(
        self,
        links: Mesh,
        run_in_thread: Callable[[Callable[[], None]], None],
        *,
        own_delay: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._own_delay = own_delay
        self._links = links
        self._run_in_thread = run_in_thread
        self._lock = threading.Lock()  # guards everything below
        self._queued: dict[NodeId, deque[Message]] = {}  # of each member that has, or waits for, a thread
        self._waiting: deque[NodeId] = deque()  # for a thread
        self._busy = 0  # threads

    def send(self, node: NodeId, message: Message) -> None:
        """May lose the message. Never blocks."""
        with self._lock:
            messages = self._queued.get(node)
            if messages is not None:
                messages.append(message)
                return
            self._queued[node] = deque([message], maxlen=MAX_QUEUED_MESSAGES)
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
                self._send_queued(node)
        except BaseException:
            self._fail()
            raise

    def _send_queued(self, node: NodeId) -> None:
        try:
            link = self._links.link(node, time.monotonic() + _DIAL_TIMEOUT + self._own_delay())
            while (message := self._take(node)) is not None:
                link.send_control(message)
        except BaseException as error:
            with self._lock:
                del self._queued[node]
            if not isinstance(error, NexarError):
                raise
            _log.debug("message to node %x lost: %s", node, error)

    def _fail(self) -> None:
        """Queued messages are lost if no thread is left."""
        with self._lock:
            self._busy -= 1
            while not self._busy and self._waiting:
                self._queued.pop(self._waiting.popleft(), None)

    def _next(self) -> NodeId | None:
        """None ends this thread."""
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._busy -= 1
            return None

    def _take(self, node: NodeId) -> Message | None:
        with self._lock:
            messages = self._queued[node]
            if messages:
                return messages.popleft()
            del self._queued[node]
            return None
