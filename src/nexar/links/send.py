"""A send that could not be done at once: it waits for credit, for a grant, or for delivery."""

from __future__ import annotations

import threading
from typing import Protocol

from nexar.links.message import conversation, key_of
from nexar.links.operation import Operation
from nexar.types import AwaitedPeer
from nexar.wire.frame import Frame


class Sender(Protocol):
    """Whose send it is (a Link)."""

    lock: threading.Lock

    def cancel_send(self, send: Send) -> None:
        """See Operation.cancel."""

    def awaited(self, missing: str) -> AwaitedPeer:
        """The peer."""


class Send(Operation):
    """A message whose memory is borrowed until the peer's transport has all of it. Changes under the node's lock."""

    __slots__ = ("announced", "data", "flowing", "frame", "owner", "shape")

    def __init__(self, owner: Sender, frame: Frame, shape: bytes, data: memoryview) -> None:
        super().__init__(owner.lock)
        self.owner = owner
        self.frame = frame  # the envelope
        self.shape = shape
        self.data = data
        self.announced = False  # the envelope has left
        self.flowing = False  # the peer granted it

    @property
    def name(self) -> str:
        """As errors call it."""
        return f"the send of {self.frame.length} bytes {self._conversation}"

    @property
    def _conversation(self) -> str:
        _, space, tag = key_of(self.frame.destination, self.frame)
        return conversation(space, tag)

    def belongs_to(self, communicator: int, generation: int) -> bool:
        """Is it of this generation?"""
        return self.frame.communicator == communicator and self.frame.generation == generation

    def awaited(self) -> AwaitedPeer:
        """The receiver, and what it has not done."""
        if self.flowing:
            return self.owner.awaited("the rest of the transfer")
        return self.owner.awaited(f"a receive {self._conversation}")

    def cancel(self) -> None:
        """The message is taken back: the receiver sees nothing of it."""
        self.owner.cancel_send(self)
