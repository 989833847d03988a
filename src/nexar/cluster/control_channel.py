"""Dispatches control messages of all links by type, and reports lost links."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from nexar.errors import NexarError
from nexar.links.link import Link
from nexar.wire.control import Message

ControlHandler: TypeAlias = Callable[[Link, Message], None]
LostHandler: TypeAlias = Callable[[Link, NexarError], None]


class ControlChannel:
    """The driver calls the handlers without the node's lock; they must not block. A joiner has links, for its state,
    before most handlers are connected.
    """

    def __init__(self, rest: ControlHandler) -> None:
        """`rest` handles messages of types without a handler."""
        self._rest = rest
        self._handlers: dict[type[Message], ControlHandler] = {}  # written by one thread; dict methods are atomic
        self._on_lost: LostHandler | None = None  # None: the loss of a link is not reported yet

    def connect(self, handler: ControlHandler, *kinds: type[Message]) -> None:
        """Handle messages of these types."""
        for kind in kinds:
            self._handlers[kind] = handler

    def connect_lost(self, handler: LostHandler) -> None:
        """Handle links that failed."""
        self._on_lost = handler

    def control(self, link: Link, message: Message) -> None:
        self._handlers.get(type(message), self._rest)(link, message)

    def lost(self, link: Link, error: NexarError) -> None:
        if self._on_lost is not None:
            self._on_lost(link, error)
