"""Messages that arrive, and the receives that ask for them. Everything here changes under the node's lock.

A message is in one of these states:

announced  its envelope is here; it waits on the shelf for a receive, or for room
early      granted: its payload flows into early memory; on the shelf
direct     granted: its payload flows into the buffer of its receive
whole      every byte is in early memory; on the shelf
moving     a thread is moving it between early memory and a receive's buffer, outside the lock
gone       received, withdrawn, lost or refused: nothing is to be done for it any more
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum, auto
from typing import Final, Protocol

from nexar.arrays.dtypes import describe
from nexar.arrays.view import as_row
from nexar.errors import BufferMismatch, NexarError, UsageError
from nexar.links.form import FORMS, OTHER_FORMS
from nexar.links.operation import Operation
from nexar.links.shelf import Key
from nexar.transport.base import Redirected
from nexar.transport.buffer_pool import Lease
from nexar.types import AwaitedPeer, describe_peer
from nexar.wire.frame import Frame, Space

ANY = -1
"""In a receive's key: any source, any tag."""


class State(Enum):
    """See the module."""

    ANNOUNCED = auto()
    EARLY = auto()
    DIRECT = auto()
    WHOLE = auto()
    MOVING = auto()
    GONE = auto()


def conversation(space: int, tag: int) -> str:
    """How errors name a conversation."""
    if space == Space.TAGGED:
        return "with any tag" if tag == ANY else f"with tag {tag}"
    if space == Space.PART:
        return "of the rest of a message"
    if space == Space.COLLECTIVE:
        return f"of collective #{tag >> 32} step {tag & 0xFFFFFFFF}"
    return "without a tag"


def key_of(source: int, frame: Frame) -> Key:
    """The conversation of a frame. A collective's is its sequence and step; in the other spaces `tag` is the user's."""
    if frame.space == Space.COLLECTIVE:
        return source, frame.space, collective_tag(frame.sequence, frame.step)
    return source, frame.space, frame.tag


def collective_tag(sequence: int, step: int) -> int:
    """The tag to post for a step of a collective."""
    return sequence << 32 | step


def row_of(data: object, need: str) -> memoryview:
    """The memory of `data` as a row of bytes. UsageError says what is needed and does not have it."""
    try:
        return as_row(data)
    except (TypeError, ValueError) as error:
        kind = f"{type(data).__module__}.{type(data).__qualname__}"
        raise UsageError(f"{need}, which this {kind} does not hold: {error}") from error


def room_for(into: object) -> memoryview:
    """The memory of a receive as a row of bytes that can be written. UsageError says why it cannot."""
    row = row_of(into, "a receive needs contiguous memory")
    if row.readonly and len(row):
        raise UsageError("the receive buffer is read-only; pass one that can be written")
    return row if len(row) else memoryview(bytearray())  # nothing is written there, but even that wants to be allowed


class Origin(Protocol):
    """Where a message comes from: its link, as far as matching must know it.

    `grant`, `refuse` and `consumed` are called under the lock; what they have to send goes into the node's outbox.
    """

    @property
    def rank(self) -> int | None:
        """The peer's, for errors."""

    def grant(self, message: Message, into: memoryview) -> None:
        """Expect the payload there, and tell the sender to send it."""

    def redirect(self, message: Message, into: memoryview | None) -> Redirected:
        """As Carrier.redirect_payload, with or without the lock; UNKNOWN also if the carrier has ended."""

    def refuse(self, message: Message, reason: str) -> None:
        """Discard what comes, and tell the sender why."""

    def consumed(self, message: Message) -> None:
        """The message was taken, so its credit is free. Called once for each message that did not arrive straight."""


class Message:
    """One message that has arrived, as a whole or by its envelope."""

    __slots__ = (
        "after_move", "arrived", "credited", "data", "early_bytes", "error", "frame", "key", "lease", "order", "origin",
        "receive", "settled", "shape", "state", "withdrawn",
    )  # fmt: skip

    def __init__(self, origin: Origin, key: Key, frame: Frame, shape: tuple[int, ...], order: int) -> None:
        self.origin = origin
        self.key = key
        self.frame = frame
        self.shape = shape
        self.order = order  # of arrival in its communicator: the oldest is taken first, whatever happened to it since
        self.state = State.ANNOUNCED
        self.data: memoryview | None = None  # where its bytes are, or flow to
        self.lease: Lease | None = None  # pooled memory behind `data`, when it is not a receive's
        self.early_bytes = 0  # reserved for it in the node's early budget
        self.credited = False  # its credit was given back
        self.receive: Receive | None = None  # while direct or moving
        # What happens to it while it is moving waits for whoever moves it:
        self.arrived = False  # the last byte has landed where the move directed it
        self.withdrawn = False  # the sender took it back
        self.error: NexarError | None = None  # why the rest will never come
        self.settled: threading.Event | None = None  # somebody waits for the end of the move
        self.after_move: Callable[[], None] | None = None  # what its link has to do then, under the lock

    def end_move(self) -> None:
        """Whoever waits for the end of the move may look again."""
        if self.after_move is not None:
            act, self.after_move = self.after_move, None
            act()
        if self.settled is not None:
            self.settled.set()
            self.settled = None


class Owner(Protocol):
    """Whose receive it is (a Matching)."""

    lock: threading.Lock

    def cancel(self, receive: Receive) -> None:
        """See Operation.cancel."""

    def give_back(self, receive: Receive, *, in_order: bool = False) -> bool:
        """See Receive.undo, Receive.retract."""

    def awaited(self, source: int, missing: str) -> AwaitedPeer:
        """Who should have sent."""


class NewestTaken:
    """Order of the newest message that a receive of one conversation has taken. The retractable receives of that
    conversation share it, and nothing else keeps it alive.
    """

    __slots__ = ("__weakref__", "order")

    def __init__(self) -> None:
        self.order = 0


NOTHING_TAKEN: Final = NewestTaken()
"""Of a retractable receive that has not taken a message yet."""


class Receive(Operation):
    """A posted receive. Once done without error, `frame`, `shape` and `into` hold what came."""

    __slots__ = (
        "brought", "dtype", "frame", "into", "key", "message", "newest_taken", "order", "owner", "shape", "wild",
    )  # fmt: skip

    order: int
    """Of posting, set then: of several that fit, the oldest takes the message. Once it is done: its message's order of
    arrival, which is the message's place if it is given back; `key` is then the message's, too."""
    frame: Frame
    """Set when it is done, like the shape."""
    shape: tuple[int, ...]

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
        self.wild = key[0] == ANY or key[2] == ANY  # asks for more than one conversation
        self.dtype = dtype
        self.message: Message | None = None  # the one that flows, or is moved, into `into`
        self.newest_taken: NewestTaken | None = None  # of one that was posted as retractable; written then

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
        """A message that was flowing in goes back among the early ones; if there is no memory, its sender is told."""
        self.owner.cancel(self)

    def undo(self) -> None:
        """See Operation. Raises MemoryError if the message is in the caller's memory and there is none to move it to;
        the receive keeps it then.
        """
        self.owner.give_back(self)

    def retract(self) -> bool:
        """As undo, but only if that keeps the order; for receives that were posted as retractable. False: a later
        message of the conversation was taken already, so this receive goes on, or keeps what it has.
        """
        return self.owner.give_back(self, in_order=True)

    def wants(self, key: Key) -> bool:
        """Is a message of this (source, space, tag) meant? ANY_TAG takes tagged and untagged, nothing else."""
        source, space, tag = self.key
        if source not in (ANY, key[0]):
            return False
        return key[1] < Space.COLLECTIVE if tag == ANY else (space, tag) == key[1:]

    def accepts(self, frame: Frame) -> bool:
        """Does its size and dtype fit? A receive without a buffer takes any array; raw bytes fit every dtype. What is
        no array is for who asks for that (see asking.py).
        """
        into = self.into
        if into is None:
            return frame.dtype < FORMS
        if len(into) != frame.length:
            return False
        return self.dtype == frame.dtype or not frame.dtype or (not self.dtype and frame.dtype < FORMS)

    def mismatch(self, message: Message) -> NexarError | None:
        """Why it does not fit. None: it was not to take it, so it is done."""
        if message.frame.dtype >= FORMS:
            return misunderstood("an array", message)
        return BufferMismatch(
            expected=describe(self.dtype, len(self.into) if self.into is not None else 0),
            found=describe(message.frame.dtype, message.frame.length),
            source=message.origin.rank,
            node=message.key[0],
            tag=message.key[2] if message.key[1] == Space.TAGGED else None,
        )


Asking = Callable[[Owner, Key, memoryview | None, int], Receive]
"""What makes a receive."""


def misunderstood(wanted: str, message: Message) -> UsageError:
    """The message is something else than the receive asked for."""
    code, length = message.frame.dtype, message.frame.length
    found, verb = OTHER_FORMS[code] if code in OTHER_FORMS else (describe(code, length), "recv() or recv_bytes()")
    source = describe_peer(message.origin.rank, message.key[0])
    return UsageError(
        f"the message from {source} {conversation(*message.key[1:])} is {found}, but the receive is for {wanted}; "
        f"it is kept: take it with {verb}"
    )
