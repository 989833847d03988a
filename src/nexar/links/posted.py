"""Receives that wait, of one conversation or with wildcards: the oldest that asks is served first."""

from __future__ import annotations

from bisect import insort

from nexar.links.message import Receive
from nexar.links.shelf import Key, Shelf
from nexar.wire.frame import Frame


class Posted:
    """The waiting receives of one communicator. Changes under the node's lock."""

    __slots__ = ("_exact", "_first", "_wild")

    def __init__(self) -> None:
        self._exact: Shelf[Receive] = Shelf()
        self._first = self._exact.first
        self._wild: list[Receive] = []  # oldest first

    def __len__(self) -> int:
        return len(self._exact) + len(self._wild)

    def add(self, receive: Receive) -> None:
        """In its place by order."""
        if receive.wild:
            insort(self._wild, receive, key=lambda other: other.order)
        else:
            self._exact.put(receive.key, receive)

    def find(self, key: Key) -> Receive | None:
        """The oldest that asks for a message of this conversation."""
        exact = self._first(key)
        if not self._wild:
            return exact
        wild = next((receive for receive in self._wild if receive.wants(key)), None)
        if exact is None or wild is None:
            return exact or wild
        return exact if exact.order < wild.order else wild

    def claim(self, key: Key, frame: Frame) -> Receive | None:
        """The oldest that asks for this message, if it fits: it waits no more, and its key is the message's. The way
        of every small message.
        """
        receive = self.find(key) if self._wild else self._first(key)
        if receive is None or not receive.accepts(frame):
            return None
        if self._wild:
            self.remove(receive)
            receive.key = key
        else:
            self._exact.drop_first(key)
        return receive

    def remove(self, receive: Receive) -> None:
        """It waits no more."""
        if not self._exact.remove(receive.key, receive):
            self._wild.remove(receive)

    def everything(self) -> list[Receive]:
        """All of them."""
        return [*self._exact.everything(), *self._wild]
