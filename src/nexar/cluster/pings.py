"""Pings that are out, and who waits for their Pongs."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

from nexar.errors import NexarError
from nexar.links.link import Link
from nexar.types import NodeId
from nexar.wire.messages import Message, Ping, Pong


class Pings:
    """Of one node. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[NodeId, Callable[[], None]]] = {}  # under the lock

    def expect(self, peer: NodeId, answered: Callable[[], None]) -> int:
        """The number for a Ping to that peer. `answered` is called on the driving thread for each of its Pongs, until
        it is forgotten, and must not block.
        """
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = (peer, answered)
        return number

    def forget(self, number: int) -> None:
        """Nobody waits for it any more: `answered` is not called again when this returns."""
        with self._lock:
            self._waiting.pop(number, None)

    def arrived(self, link: Link, message: Message) -> None:
        """A Ping is answered, a Pong told to who waits for it; one that nobody waits for, or of somebody else, is late
        or forged, and means nothing. Other messages are none of its business.
        """
        if isinstance(message, Ping):
            _answer(link, message)
        elif isinstance(message, Pong):
            with self._lock:
                peer, answered = self._waiting.get(message.number, (None, None))
                if answered is not None and peer == link.peer:
                    answered()


def _answer(link: Link, ping: Ping) -> None:
    try:
        link.send_control(Pong(ping.number))
    except NexarError:
        return  # the link is gone, and whoever asked hears of that
