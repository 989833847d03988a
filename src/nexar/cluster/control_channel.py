"""Control messages of all links find the room they are meant for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from nexar.errors import NexarError
from nexar.links.link import Link
from nexar.wire.control import Message

ControlHandler: TypeAlias = Callable[[Link, Message], None]


class ControlChannel:
    """Of one node. Rooms connect before the node knows its membership; what nobody is connected for goes to `rest`."""

    def __init__(self) -> None:
        self._handlers: dict[type[Message], ControlHandler] = {}  # written before anybody can speak
        self.rest: ControlHandler | None = None
        """Gets what nobody else is connected for; None: it is dropped."""
        self.on_lost: Callable[[Link, NexarError], None] | None = None
        """Told of links that ended without this side's will."""

    def connect(self, handler: ControlHandler, *kinds: type[Message]) -> None:
        """This handler gets messages of these kinds, on the driving thread; it must not block."""
        for kind in kinds:
            self._handlers[kind] = handler

    def control(self, link: Link, message: Message) -> None:
        """A link has heard a control message. The driving thread, without the node's lock."""
        handler = self._handlers.get(type(message), self.rest)
        if handler is not None:
            handler(link, message)

    def lost(self, link: Link, error: NexarError) -> None:
        """A link is lost. The driving thread, without the node's lock."""
        if self.on_lost is not None:
            self.on_lost(link, error)
