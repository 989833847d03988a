"""Messages that arrive, and the receives that ask for them.

A message is *announced* (its envelope is here, the payload waits for our grant), *flowing* (granted; the payload
lands in `data`) or *whole*. Small ones arrive whole. Everything here changes under the node's lock.
"""

from __future__ import annotations

import threading
from typing import Protocol

from nexar.arrays.dtypes import describe
from nexar.errors import BufferMismatch, NexarError
from nexar.links.operation import Operation
from nexar.links.shelf import Key
from nexar.transport.buffer_pool import Lease
from nexar.types import AwaitedPeer
from nexar.wire.frame import Frame, Space

ANY = -1
"""In a receive's key: any source, any tag."""


def conversation(space: int, tag: int) -> str:
    """How errors name a conversation."""
    if space == Space.TAGGED:
        return "with any tag" if tag == ANY else f"with tag {tag}"
    if space == Space.COLLECTIVE:
        return f"of collective #{tag >> 32} step {tag & 0xFFFFFFFF}"
    return "without a tag"


class Origin(Protocol):
    """Where a message comes from: its link, as far as matching must know it.

    `grant`, `refuse` and `consumed` are called under the lock; what they have to send goes into the node's outbox.
    """

    @property
    def rank(self) -> int | None:
        """The peer's, for errors."""

    def grant(self, message: Message, into: memoryview) -> None:
        """Expect the payload there, and tell the sender to send it."""

    def redirect(self, message: Message, into: memoryview | None) -> bool:
        """As Carrier.redirect_payload; with or without the lock."""

    def refuse(self, message: Message, reason: str) -> None:
        """Discard what comes, and tell the sender why."""

    def consumed(self, message: Message) -> None:
        """The message left the early store, so its credit is free."""


class Message:
    """One message that has arrived, as a whole or by its envelope."""

    __slots__ = (
        "data",
        "early_bytes",
        "error",
        "frame",
        "gone",
        "granted",
        "key",
        "lease",
        "order",
        "origin",
        "receive",
        "settling",
        "shape",
        "whole",
    )

    def __init__(self, origin: Origin, key: Key, frame: Frame, shape: tuple[int, ...]) -> None:
        self.origin = origin
        self.key = key
        self.frame = frame
        self.shape = shape
        self.order = 0  # of arrival in its communicator: wildcards take the oldest
        self.data: memoryview | None = None
        self.lease: Lease | None = None  # pooled memory behind `data`, when it is not a receive's
        self.early_bytes = 0  # reserved for it in the node's early budget
        self.granted = False
        self.gone = False  # received, withdrawn or lost: nothing is to be done for it any more
        self.whole = False
        self.error: NexarError | None = None  # why the rest will never come
        self.settling = False  # its receive came late and is moving it over, outside the lock
        self.receive: Receive | None = None


class Owner(Protocol):
    """Whose receive it is (a Matching)."""

    lock: threading.Lock

    def cancel(self, receive: Receive) -> None:
        """See Operation.cancel."""

    def awaited(self, source: int, missing: str) -> AwaitedPeer:
        """Who should have sent."""


class Receive(Operation):
    """A posted receive. Once done without error, `frame`, `shape` and `into` hold what came."""

    __slots__ = ("brought", "dtype", "frame", "into", "key", "message", "order", "owner", "shape")

    def __init__(self, owner: Owner, key: Key, into: memoryview | None, dtype: int) -> None:
        self.lock = owner.lock  # the base's part, written out: a receive is made for every message
        self.done = False
        self.error = None
        self._waiter = None
        self._callbacks = None
        self.owner = owner
        self.key = key
        self.into = into
        self.brought = into is not None  # the caller's own memory; else it is made for the message that comes
        self.dtype = dtype
        self.order = 0  # of posting: of several that fit, the oldest takes the message
        self.frame: Frame | None = None
        self.shape: tuple[int, ...] = ()
        self.message: Message | None = None  # the one flowing into `into`

    @property
    def name(self) -> str:
        """As errors call it."""
        return f"the receive {conversation(self.key[1], self.key[2])}"

    def awaited(self) -> AwaitedPeer:
        """The sender."""
        return self.owner.awaited(self.key[0], f"a send {conversation(self.key[1], self.key[2])}")

    def value(self) -> Receive:
        """Itself: callers take from it what they want."""
        return self

    def cancel(self) -> None:
        """A message that was flowing in goes back among the early ones, if there is room; else its sender is told."""
        self.owner.cancel(self)

    def wants(self, key: Key) -> bool:
        """Is a message of this (source, space, tag) meant? ANY_TAG takes tagged and untagged, never collectives."""
        source, space, tag = self.key
        if source not in (ANY, key[0]):
            return False
        return key[1] != Space.COLLECTIVE if tag == ANY else (space, tag) == key[1:]

    def accepts(self, frame: Frame) -> bool:
        """Does its size and dtype fit? A receive without a buffer takes anything; raw bytes fit every dtype."""
        into = self.into
        if into is None:
            return True
        return len(into) == frame.length and (self.dtype == frame.dtype or not self.dtype or not frame.dtype)

    def mismatch(self, message: Message) -> NexarError:
        """Why it does not fit."""
        return BufferMismatch(
            expected=describe(self.dtype, len(self.into) if self.into is not None else 0),
            found=describe(message.frame.dtype, message.frame.length),
            source=message.origin.rank,
            tag=message.key[2] if message.key[1] == Space.TAGGED else None,
        )
