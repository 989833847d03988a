"""Receives of other kinds: for messages that are no arrays, and for looking at a message without taking it.

They rest on one law of matching: a message that does not fit its receive stays where it is, and the receive is done
with what `mismatch` gives.
"""

from __future__ import annotations

from nexar.errors import BufferMismatch, Cancelled, NexarError, PeerMisbehaved
from nexar.links.form import BUFFERS, OBJECT, OTHER_FORMS
from nexar.links.message import Message, Owner, Receive, misunderstood
from nexar.links.shelf import Key
from nexar.types import describe_peer
from nexar.wire.frame import Frame, Space


class Probe(Receive):
    """Done when a message is here that it would take. Takes none; `frame` and `shape` are the message's then."""

    __slots__ = ("source",)

    source: int
    """The sender's node; set when it is done."""

    def accepts(self, frame: Frame) -> bool:
        """Never: so every message that is meant comes to `mismatch`, and stays."""
        return False

    def undo(self) -> None:
        """It took nothing, so there is nothing to give back."""
        self.cancel()

    def mismatch(self, message: Message) -> NexarError | None:
        """No error: this is what it waited for."""
        self.frame, self.shape, self.source = message.frame, message.shape, message.key[0]
        return None

    @property
    def name(self) -> str:
        """As errors call it."""
        return super().name.replace("receive", "probe", 1)


class ObjectReceive(Receive):
    """Takes an encoded value; with dtype PICKLE a pickled one too."""

    __slots__ = ()

    def accepts(self, frame: Frame) -> bool:
        """What may be read without running code, or what was asked for."""
        return frame.dtype in (OBJECT, self.dtype)

    def mismatch(self, message: Message) -> NexarError | None:
        """What it is instead."""
        return misunderstood(OTHER_FORMS[self.dtype][0], message)


class PartReceive(Receive):
    """Takes the next part of a message. A part without bytes says that its sender has given the message up."""

    __slots__ = ("_unfit",)

    def __init__(self, owner: Owner, key: Key, into: memoryview | None, dtype: int) -> None:
        super().__init__(owner, key, into, dtype)
        self._unfit = False  # a part came that is not the one it was to be

    @property
    def failed(self) -> bool:
        """The rest of the message will never come, or is not what was announced. False if this side cancelled it."""
        return self._unfit or (self.error is not None and not isinstance(self.error, Cancelled))

    def mismatch(self, message: Message) -> NexarError | None:
        """The parts are as long as the first one said, or nothing is right any more."""
        self._unfit = True
        rank, node, length = message.origin.rank, message.key[0], message.frame.length
        if not length:
            reason = f"{describe_peer(rank, node)} has given up sending it"
            return Cancelled(operation="the receive of a message in parts", reason=reason)
        expected = 0 if self.into is None else len(self.into)
        return PeerMisbehaved(rank=rank, node=node, what=f"it sent a part of {length} bytes instead of {expected}")


class BuffersReceive(Receive):
    """Takes the bytes of several buffers, if they are as many in all as there is room for."""

    __slots__ = ("buffers", "total")

    def __init__(self, owner: Owner, key: Key, total: int, buffers: int) -> None:
        super().__init__(owner, key, None, BUFFERS)
        self.total = total
        self.buffers = buffers

    def accepts(self, frame: Frame) -> bool:
        """How much it is in all stands in the frame's count."""
        return frame.dtype == BUFFERS and frame.count == self.total

    def mismatch(self, message: Message) -> NexarError | None:
        """Too much, too little, or something else."""
        if message.frame.dtype != BUFFERS:
            return misunderstood(OTHER_FORMS[BUFFERS][0], message)
        return BufferMismatch(
            expected=f"{self.total} bytes in {self.buffers} buffers",
            found=f"{message.frame.count} bytes",
            source=message.origin.rank,
            node=message.key[0],
            tag=message.key[2] if message.key[1] == Space.TAGGED else None,
        )
