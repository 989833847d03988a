"""Messages, receives, their queues, and moving a message between buffers. The node's lock guards everything.

States of a message:

    ENVELOPE   the envelope is queued; waits for a receive or for memory
    BUFFERING  granted: flows into pooled memory; queued
    DIRECT     granted: flows into the buffer of its receive
    COMPLETE   all of it is in pooled memory; queued
    MOVING     a thread moves it between pooled memory and a receive's buffer, outside the lock
    FINISHED   received, withdrawn, lost or refused
"""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Callable, Iterator
from enum import Enum, auto
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from nexar.arrays.dtypes import describe
from nexar.arrays.views import allocate, as_row, copy
from nexar.errors import BufferMismatch, Cancelled, NexarError, PeerMisbehaved, UsageError
from nexar.links.operation import Operation
from nexar.transport.base import Redirected
from nexar.transport.buffer_pool import Lease
from nexar.types import AwaitedPeer, describe_peer
from nexar.wire.frame import Frame, Space

if TYPE_CHECKING:
    from nexar.links.matching import Matching

OBJECT: Final = 255  # an encoded value; decoding it runs no foreign code
PICKLE: Final = 254  # a pickled value, which runs code when it is loaded: only for receives that ask for it
BUFFERS: Final = 253  # the bytes of several buffers
# Values of a frame's dtype field from here on name forms, not dtypes. They are the wire format: never reuse one. Dtypes
# count up from 0, forms down from 255.
FORMS: Final = 240

# by form: its name in errors, and the method that receives it
OTHER_FORMS: Final = MappingProxyType(
    {
        OBJECT: ("an object", "recv_object()"),
        PICKLE: ("a pickled object", "recv_object(pickle=True), if you trust the sender with your process"),
        BUFFERS: ("a list of buffers", "recv_iov()"),
    }
)

Key = tuple[int, int, int]


class Ordered(Protocol):
    """An element of FifoByKey."""

    order: int


T = TypeVar("T", bound=Ordered)


class FifoByKey(Generic[T]):
    """A queue per key, sorted by `order`. Cheap for one element per key."""

    __slots__ = ("_more", "first", "oldest")

    def __init__(self) -> None:
        self.oldest: dict[Key, T] = {}  # the oldest element of each key
        self._more: dict[Key, list[T]] = {}  # the later elements
        self.first: Callable[[Key], T | None] = self.oldest.get  # returns the oldest element of a key

    def __len__(self) -> int:
        return len(self.oldest) + sum(len(queue) for queue in self._more.values())

    def put(self, key: Key, element: T) -> None:
        """Insert by `order`: usually last; further ahead if it was taken before."""
        first = self.oldest.setdefault(key, element)
        if first is element:
            return
        if element.order < first.order:
            self.oldest[key] = element
            element = first
        insort(self._more.setdefault(key, []), element, key=_order_of)

    def drop_first(self, key: Key) -> None:
        del self.oldest[key]
        if self._more and key in self._more:
            self._promote(key)

    def remove(self, key: Key, element: T) -> bool:
        """Return False if it is not here."""
        if self.first(key) is element:
            self.drop_first(key)
            return True
        queue = self._more.get(key, [])
        if element not in queue:
            return False
        queue.remove(element)
        if not queue:
            del self._more[key]
        return True

    def heads(self) -> Iterator[tuple[Key, T]]:
        return iter(list(self.oldest.items()))

    def everything(self) -> list[T]:
        return [*self.oldest.values(), *(element for queue in self._more.values() for element in queue)]

    def _promote(self, key: Key) -> None:
        queue = self._more[key]
        self.oldest[key] = queue.pop(0)
        if not queue:
            del self._more[key]


def _order_of(element: Ordered) -> int:
    return element.order


ANY = -1  # in a receive's key: any source, or any tag


class MessageState(Enum):
    """See the module docstring."""

    ENVELOPE = auto()
    BUFFERING = auto()
    DIRECT = auto()
    COMPLETE = auto()
    MOVING = auto()
    FINISHED = auto()


def conversation(space: int, tag: int) -> str:
    """Return the text for error messages."""
    if space == Space.TAGGED:
        return "with any tag" if tag == ANY else f"with tag {tag}"
    if space == Space.PART:
        return "of the rest of a message"
    if space == Space.COLLECTIVE:
        return f"of collective #{tag >> 32} step {tag & 0xFFFFFFFF}"
    return "without a tag"


def key_of(source: int, frame: Frame) -> Key:
    """Return (source, space, tag); a collective's tag is its sequence and step."""
    if frame.space == Space.COLLECTIVE:
        return source, frame.space, collective_tag(frame.sequence, frame.step)
    return source, frame.space, frame.tag


def collective_tag(sequence: int, step: int) -> int:
    """Return the tag of a collective's step."""
    return sequence << 32 | step


def row_of(data: object, need: str) -> memoryview:
    """Return the memory as bytes. Raise UsageError, beginning with `need`."""
    try:
        return as_row(data)
    except (TypeError, ValueError) as error:
        kind = f"{type(data).__module__}.{type(data).__qualname__}"
        raise UsageError(f"{need}, got {kind}: {error}") from error


def room_for(into: object) -> memoryview:
    """Return a receive's memory as writable bytes. Raise UsageError."""
    row = row_of(into, "a receive needs contiguous memory")
    if row.readonly and len(row):
        raise UsageError("the receive buffer is read-only; pass one that can be written")
    # an empty read-only buffer is valid, because nothing is written
    return row if len(row) else memoryview(bytearray())


class Origin(Protocol):
    """The link of a message, as matching sees it. `grant`, `refuse` and `consumed` run under the lock and only queue
    I/O.
    """

    @property
    def rank(self) -> int | None: ...

    def grant(self, message: Message, into: memoryview) -> None:
        """Expect the payload, and tell the sender to send it."""

    def redirect(self, message: Message, into: memoryview | None) -> Redirected:
        """Like Carrier.redirect_payload; UNKNOWN if the carrier has ended. With or without the lock."""

    def refuse(self, message: Message, reason: str) -> None: ...

    def consumed(self, message: Message) -> None:
        """Return its credit. Called once, unless `arrive` returned True."""


class Message:
    """An arrived message, whole or as an envelope."""

    __slots__ = (
        "after_move", "arrived", "budget_bytes", "credited", "data", "error", "frame", "key", "lease", "order",
        "origin", "receive", "settled", "shape", "state", "withdrawn",
    )  # fmt: skip

    def __init__(self, origin: Origin, key: Key, frame: Frame, shape: tuple[int, ...], order: int) -> None:
        self.origin = origin
        self.key = key
        self.frame = frame
        self.shape = shape
        self.order = order  # of arrival in its communicator; never changes: the oldest is taken first
        self.state = MessageState.ENVELOPE
        self.data: memoryview | None = None  # where its bytes are, or flow to
        self.lease: Lease | None = None  # pooled memory behind `data`, unless that is a receive's
        self.budget_bytes = 0  # reserved in the node's budget for unexpected messages
        self.credited = False  # its credit was returned
        self.receive: Receive | None = None  # while DIRECT or MOVING
        # While the message is MOVING, these record events for the moving thread:
        self.arrived = False  # the last byte has arrived where the move directed it
        self.withdrawn = False  # by the sender
        self.error: NexarError | None = None  # why the rest will never come
        self.settled: threading.Event | None = None  # a thread waits for the end of the move
        self.after_move: Callable[[], None] | None = None  # what the link does then, under the lock

    def end_move(self) -> None:
        if self.after_move is not None:
            act, self.after_move = self.after_move, None
            act()
        if self.settled is not None:
            self.settled.set()
            self.settled = None


class NewestTaken:
    """The newest taken message of one conversation. Only retractable receives keep it alive."""

    __slots__ = ("__weakref__", "order")

    def __init__(self) -> None:
        self.order = 0


NOTHING_TAKEN: Final = NewestTaken()  # of a retractable receive that has not taken a message yet


class Receive(Operation):
    """A posted receive. Once done, `frame`, `shape` and `into` describe the message."""

    __slots__ = (
        "caller_buffer", "dtype", "frame", "into", "key", "message", "newest_taken", "order", "owner", "shape", "wild",
    )  # fmt: skip

    # Order of posting. Once done, the message's order of arrival, its position if given back; `key` is then its key.
    order: int
    frame: Frame  # set when done, like the shape
    shape: tuple[int, ...]

    def __init__(self, owner: Matching, key: Key, into: memoryview | None, dtype: int) -> None:
        self.lock = owner.lock  # the base class's attributes, inlined because every message needs a receive
        self.done = False
        self.error = None
        self._waiter = None
        self._callbacks = None
        self.owner = owner
        self.key = key
        self.into = into
        self.caller_buffer = into is not None  # memory of the caller; otherwise it is allocated for the message
        self.wild = key[0] == ANY or key[2] == ANY  # asks for more than one conversation
        self.dtype = dtype
        self.message: Message | None = None  # the message that flows, or is moved, into `into`
        self.newest_taken: NewestTaken | None = None  # set by post() if retractable

    @property
    def name(self) -> str:
        return f"the receive {conversation(self.key[1], self.key[2])}"

    def awaited(self) -> AwaitedPeer:
        return self.owner.awaited(self.key[0], f"a send {conversation(self.key[1], self.key[2])}")

    def value(self) -> Receive:
        return self

    def cancel(self) -> None:
        """A partly arrived message becomes unexpected. Without memory for it, its sender is told."""
        self.owner.cancel(self)

    def undo(self) -> None:
        """Raise MemoryError and keep the message if it cannot be copied."""
        self.owner.give_back(self)

    def retract(self) -> bool:
        """Like undo, but return False if a later message of the conversation was taken. Needs a retractable receive."""
        return self.owner.give_back(self, in_order=True)

    def wants(self, key: Key) -> bool:
        """Whether it asks for this key. ANY_TAG matches tagged and untagged messages only."""
        source, space, tag = self.key
        if source not in (ANY, key[0]):
            return False
        return key[1] < Space.COLLECTIVE if tag == ANY else (space, tag) == key[1:]

    def accepts(self, frame: Frame) -> bool:
        """Whether size and dtype fit. Without a buffer any array fits; raw bytes fit every dtype."""
        into = self.into
        if into is None:
            return frame.dtype < FORMS
        if len(into) != frame.length:
            return False
        return self.dtype == frame.dtype or not frame.dtype or (not self.dtype and frame.dtype < FORMS)

    def mismatch(self, message: Message) -> NexarError | None:
        """Return the error for a message that does not fit and stays queued; None completes the receive."""
        if message.frame.dtype >= FORMS:
            return wrong_form_error("an array", message)
        return BufferMismatch(
            expected=describe(self.dtype, len(self.into) if self.into is not None else 0),
            found=describe(message.frame.dtype, message.frame.length),
            source=message.origin.rank,
            node=message.key[0],
            tag=message.key[2] if message.key[1] == Space.TAGGED else None,
        )


ReceiveKind = Callable[["Matching", Key, memoryview | None, int], Receive]


def wrong_form_error(wanted: str, message: Message) -> UsageError:
    """Return the error for a message of another form."""
    code, length = message.frame.dtype, message.frame.length
    found, verb = OTHER_FORMS[code] if code in OTHER_FORMS else (describe(code, length), "recv() or recv_bytes()")
    source = describe_peer(message.origin.rank, message.key[0])
    return UsageError(
        f"the message from {source} {conversation(*message.key[1:])} is {found}, but the receive is for {wanted}; "
        f"it is kept: take it with {verb}"
    )


class Probe(Receive):
    """Completes when a matching message is here, without taking it."""

    __slots__ = ("source",)

    source: int  # node id of the sender, set when done

    def accepts(self, frame: Frame) -> bool:
        """Return False, so that every matching message reaches `mismatch`."""
        return False

    def undo(self) -> None:
        self.cancel()

    def mismatch(self, message: Message) -> NexarError | None:
        self.frame, self.shape, self.source = message.frame, message.shape, message.key[0]
        return None

    @property
    def name(self) -> str:
        return super().name.replace("receive", "probe", 1)


class ObjectReceive(Receive):
    """Receives an encoded value; with dtype PICKLE also a pickled one."""

    __slots__ = ()

    def accepts(self, frame: Frame) -> bool:
        return frame.dtype in (OBJECT, self.dtype)

    def mismatch(self, message: Message) -> NexarError | None:
        return wrong_form_error(OTHER_FORMS[self.dtype][0], message)


class PartReceive(Receive):
    """Receives the next part of a message. An empty part means that the sender gave up."""

    __slots__ = ("_unfit",)

    def __init__(self, owner: Matching, key: Key, into: memoryview | None, dtype: int) -> None:
        super().__init__(owner, key, into, dtype)
        self._unfit = False  # a part of a wrong size came

    @property
    def failed(self) -> bool:
        """Whether the rest will never come or is malformed. False if cancelled here."""
        return self._unfit or (self.error is not None and not isinstance(self.error, Cancelled))

    def mismatch(self, message: Message) -> NexarError | None:
        self._unfit = True
        rank, node, length = message.origin.rank, message.key[0], message.frame.length
        if not length:
            reason = f"{describe_peer(rank, node)} gave up sending it"
            return Cancelled(operation="the receive of a message in parts", reason=reason)
        expected = 0 if self.into is None else len(self.into)
        return PeerMisbehaved(rank=rank, node=node, what=f"it sent a part of {length} bytes instead of {expected}")


class BuffersReceive(Receive):
    """Receives several buffers, if their total matches."""

    __slots__ = ("buffers", "total")

    def __init__(self, owner: Matching, key: Key, total: int, buffers: int) -> None:
        super().__init__(owner, key, None, BUFFERS)
        self.total = total
        self.buffers = buffers

    def accepts(self, frame: Frame) -> bool:
        return frame.dtype == BUFFERS and frame.count == self.total

    def mismatch(self, message: Message) -> NexarError | None:
        if message.frame.dtype != BUFFERS:
            return wrong_form_error(OTHER_FORMS[BUFFERS][0], message)
        return BufferMismatch(
            expected=f"{self.total} bytes in {self.buffers} buffers",
            found=f"{message.frame.count} bytes",
            source=message.origin.rank,
            node=message.key[0],
            tag=message.key[2] if message.key[1] == Space.TAGGED else None,
        )


class PostedReceives:
    """The posted receives of one communicator."""

    __slots__ = ("_exact", "_first", "_wild")

    def __init__(self) -> None:
        self._exact: FifoByKey[Receive] = FifoByKey()
        self._first = self._exact.first
        self._wild: list[Receive] = []  # oldest first

    def __len__(self) -> int:
        return len(self._exact) + len(self._wild)

    def add(self, receive: Receive) -> None:
        if receive.wild:
            insort(self._wild, receive, key=lambda other: other.order)
        else:
            self._exact.put(receive.key, receive)

    def find(self, key: Key) -> Receive | None:
        exact = self._first(key)
        if not self._wild:
            return exact
        wild = next((receive for receive in self._wild if receive.wants(key)), None)
        if exact is None or wild is None:
            return exact or wild
        return exact if exact.order < wild.order else wild

    def claim(self, key: Key, frame: Frame) -> Receive | None:
        """Remove and return the oldest receive for this message, if it fits. Every small message takes this path."""
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
        if not self._exact.remove(receive.key, receive):
            self._wild.remove(receive)

    def everything(self) -> list[Receive]:
        return [*self._exact.everything(), *self._wild]


def move_message(message: Message, into: memoryview) -> bool:
    """Move the message to `into`. Return True if all of it is there, False if the rest may still come. Needs no lock:
    the message is MOVING, so no other thread touches its memory.

    The carrier redirects the rest; a copy is needed only if all had arrived. If the driver sets `arrived` meanwhile,
    the carrier says so, or the payload completed in `into`.
    """
    old = message.data
    assert old is not None
    if not message.arrived:
        outcome = message.origin.redirect(message, into)
        if outcome is not Redirected.COMPLETE:
            return False
    copy(old, into)
    return True


def make_room(receive: Receive, message: Message) -> bool:
    """Allocate the receive's memory. The sender chose the size: without memory, fail the receive and return False."""
    try:
        receive.into = allocate(message.frame.length)
    except (MemoryError, ValueError):
        receive.finish(out_of_memory(receive, message.frame.length))
        return False
    return True


def out_of_memory(receive: Receive, size: int) -> MemoryError:
    """Return the error for missing memory."""
    return MemoryError(
        f"{receive.name}: a message of {size} bytes does not fit into memory; it is kept: free some memory"
    )
