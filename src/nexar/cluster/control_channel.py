"""Control messages: dispatch by type, events of the mesh, and sending to members without a link."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

from nexar.errors import NexarError
from nexar.links.link import Link
from nexar.types import NodeId
from nexar.wire.control import Message

if TYPE_CHECKING:
    from nexar.cluster.mesh import Mesh  # which imports this module

_log = logging.getLogger(__name__)

ControlHandler: TypeAlias = Callable[[Link, Message], None]


@dataclass(frozen=True, slots=True)
class LinkLost:
    """A link failed."""

    link: Link
    error: NexarError


@dataclass(frozen=True, slots=True)
class LivenessConnectionLost:
    """The liveness connection to a member broke."""

    node: NodeId
    cause: str


@dataclass(frozen=True, slots=True)
class RouteLost:
    """No relay route to a member is left."""

    node: NodeId
    cause: str


@dataclass(frozen=True, slots=True)
class NeighbourDoubted:
    """A relay delivers frames of a member that has a direct connection to this node."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class RemovalReported:
    """A peer says that this node was removed."""

    epoch: int
    reason: str


MeshEvent: TypeAlias = LinkLost | LivenessConnectionLost | RouteLost | NeighbourDoubted | RemovalReported


class ControlChannel:
    """Dispatches messages and events. Handlers are called without the node's lock and must not block: message handlers
    by the driver, the event handler by any thread. A joiner has links, for its state, before most handlers are
    connected.
    """

    def __init__(self, rest: ControlHandler) -> None:
        """`rest` handles messages of types without a handler."""
        self._rest = rest
        self._handlers: dict[type[Message], ControlHandler] = {}  # written by one thread; dict methods are atomic
        # Written once. None: this node is no member yet, and events are dropped.
        self._on_event: Callable[[MeshEvent], None] | None = None

    def connect(self, handler: ControlHandler, *kinds: type[Message]) -> None:
        for kind in kinds:
            self._handlers[kind] = handler

    def connect_events(self, handler: Callable[[MeshEvent], None]) -> None:
        self._on_event = handler

    def control(self, link: Link, message: Message) -> None:
        self._handlers.get(type(message), self._rest)(link, message)

    def post(self, event: MeshEvent) -> None:
        if self._on_event is not None:
            self._on_event(event)


def send_or_log(link: Link, message: Message) -> None:
    """Never blocks. The message may be lost: a peer that misses it detects the end of the link."""
    try:
        link.send_control(message)
    except NexarError as error:
        _log.debug("message to node %x lost: %s", link.peer, error)


MAX_QUEUED_MESSAGES: Final = 64  # per member; the newest are kept, and senders that need an answer ask again
_DIAL_TIMEOUT: Final = 1.0  # seconds


class BackgroundSender:
    """Sends messages to members that must be dialed first, in order per member. Any thread."""

    def __init__(
        self,
        links: Mesh,
        run_in_thread: Callable[[Callable[[], None]], None],
        *,
        own_delay: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`run_in_thread` runs a blocking task, or drops it when the node closes."""
        self._own_delay = own_delay
        self._links = links
        self._run_in_thread = run_in_thread
        self._lock = threading.Lock()
        self._queued: dict[NodeId, deque[Message]] = {}  # of each member that has a task; guarded by the lock

    def send(self, node: NodeId, message: Message) -> None:
        """Never blocks. The message may be lost. Raises the errors of `run_in_thread`."""
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
