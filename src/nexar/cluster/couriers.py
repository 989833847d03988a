"""Words for members that this node has no link to yet: who carries them dials first, and that takes a while.

One thread at most is on the way to each member, and not many at once, however much there is to say.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from nexar.errors import NexarError
from nexar.links.link import Link
from nexar.types import NodeId
from nexar.wire.messages import Message

_log = logging.getLogger(__name__)

AT_ONCE: Final = 16
"""Threads."""
MOST_WORDS: Final = 64
"""That wait for one member: the newest. Whoever needs an answer asks again."""
_PATIENCE: Final = 1.0  # seconds for a dial


class Roads(Protocol):
    """What is asked of a mesh."""

    def link(self, node: NodeId, deadline: float) -> Link:
        """See Mesh."""


class Couriers:
    """Of one node. Any thread. Its threads end by themselves, soon after the node's dials have been recalled."""

    def __init__(
        self,
        roads: Roads,
        aside: Callable[[Callable[[], None]], None],
        *,
        own_delay: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`aside` runs something in a thread of its own. `own_delay`: seconds by which a dial has more time, because
        this node runs slowly.
        """
        self._own_delay = own_delay
        self._roads = roads
        self._aside = aside
        self._lock = threading.Lock()  # over everything below
        self._words: dict[NodeId, deque[Message]] = {}  # of each member that a courier is, or will be, on the way to
        self._waiting: deque[NodeId] = deque()  # for a courier
        self._busy = 0  # couriers

    def send(self, node: NodeId, word: Message) -> None:
        """It may be lost. Never blocks."""
        with self._lock:
            words = self._words.get(node)
            if words is not None:
                words.append(word)
                return
            self._words[node] = deque([word], maxlen=MOST_WORDS)
            self._waiting.append(node)
            if self._busy == AT_ONCE:
                return
            self._busy += 1
        try:
            self._aside(self._run)
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
            link = self._roads.link(node, time.monotonic() + _PATIENCE + self._own_delay())
            while (word := self._take(node)) is not None:
                link.send_control(word)
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
            words = self._words[node]
            if words:
                return words.popleft()
            del self._words[node]
            return None
