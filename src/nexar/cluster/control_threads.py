"""Cancellation, and sending in the background."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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

MAX_QUEUED_MESSAGES: Final = 64  # per member; the newest are kept, and senders that need an answer ask again
_DIAL_TIMEOUT: Final = 1.0  # seconds


class BackgroundSender:
    """Sends messages to members that must be dialed first. Any thread.

    A member has at most one task, which sends its messages in order.
    """

    def __init__(
        self,
        links: Mesh,
        run_in_thread: Callable[[Callable[[], None]], None],
        *,
        own_delay: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`run_in_thread` runs a task that blocks; it may drop it when the node closes."""
        self._own_delay = own_delay
        self._links = links
        self._run_in_thread = run_in_thread
        self._lock = threading.Lock()
        self._queued: dict[NodeId, deque[Message]] = {}  # of each member that has a task; guarded by the lock

    def send(self, node: NodeId, message: Message) -> None:
        """May lose the message. Never blocks. Raises what `run_in_thread` raises."""
        with self._lock:
            messages = self._queued.get(node)
            if messages is not None:
                messages.append(message)
                return
            self._queued[node] = deque([message], maxlen=MAX_QUEUED_MESSAGES)
        try:
            self._run_in_thread(partial(self._send_queued, node))
        except BaseException:  # no thread could be started
            self._forget(node)
            raise

    def _send_queued(self, node: NodeId) -> None:
        try:
            link = self._links.link(node, time.monotonic() + _DIAL_TIMEOUT + self._own_delay())
            while (message := self._take(node)) is not None:
                link.send_control(message)
        except BaseException as error:
            self._forget(node)
            if not isinstance(error, NexarError):
                raise
            _log.debug("message to node %x lost: %s", node, error)

    def _forget(self, node: NodeId) -> None:
        with self._lock:
            self._queued.pop(node, None)

    def _take(self, node: NodeId) -> Message | None:
        with self._lock:
            messages = self._queued[node]
            if messages:
                return messages.popleft()
            del self._queued[node]
            return None
