"""Dispatches control messages of all links by type."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from nexar.errors import NexarError
from nexar.links.link import Link
from nexar.wire.control import Message

ControlHandler: TypeAlias = Callable[[Link, Message], None]


class ControlChannel:
    """One per node. Handlers are connected before the membership is known."""

    def __init__(self) -> None:
        self._handlers: dict[type[Message], ControlHandler] = {}  # written before the first message can arrive
        self.rest: ControlHandler | None = None  # for all other messages; None drops them
        self.on_lost: Callable[[Link, NexarError], None] | None = None  # receives links that failed

    def connect(self, handler: ControlHandler, *kinds: type[Message]) -> None:
        """The driver calls the handler, which must not block."""
        for kind in kinds:
            self._handlers[kind] = handler

    def control(self, link: Link, message: Message) -> None:
        """Called by the driver without the node's lock."""
        handler = self._handlers.get(type(message), self.rest)
        if handler is not None:
            handler(link, message)

    def lost(self, link: Link, error: NexarError) -> None:
        """Called by the driver without the node's lock."""
        if self.on_lost is not None:
            self.on_lost(link, error)
