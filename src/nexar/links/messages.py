"""What the bytes of a message are, when they are no array: numbers of a frame's dtype field that name no dtype.

Numbers are the wire format: never reuse one. Those of dtypes grow from 0, these fall from 255.

First in, first out, per key: the container of matching. Most keys hold one thing at a time: that case is cheap.

Messages that arrive, and the receives that ask for them. Everything here changes under the node's lock.

A message is in one of these states:

announced  its envelope is here; it waits on the shelf for a receive, or for room
early      granted: its payload flows into early memory; on the shelf
direct     granted: its payload flows into the buffer of its receive
whole      every byte is in early memory; on the shelf
moving     a thread is moving it between early memory and a receive's buffer, outside the lock
gone       received, withdrawn, lost or refused: nothing is to be done for it any more

Receives of other kinds: for messages that are no arrays, and for looking at a message without taking it.

They rest on one law of matching: a message that does not fit its receive stays where it is, and the receive is done
with what `mismatch` gives.

Receives that wait, of one conversation or with wildcards: the oldest that asks is served first.

Moving a message from one memory to another while its payload may still be arriving.

The carrier is asked to let the rest land in the new place and moves what it has; only if it says that everything has
landed in the old place already is there something for us to copy. Runs without the node's lock: it may take long.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Callable, Iterator
from enum import Enum, auto
from types import MappingProxyType
from typing import Final, Generic, Protocol, TypeVar

from nexar.arrays.dtypes import describe
from nexar.arrays.views import allocate, as_row, copy
from nexar.errors import BufferMismatch, Cancelled, NexarError, PeerMisbehaved, UsageError
from nexar.links.operation import Operation
from nexar.transport.base import Redirected
from nexar.transport.buffer_pool import Lease
from nexar.types import AwaitedPeer, describe_peer
from nexar.wire.frame import Frame, Space

OBJECT: Final = 255
"""A value, encoded without running anybody's code to read it."""
PICKLE: Final = 254
"""A value that runs code when it is read: only for who asked for it."""
BUFFERS: Final = 253
"""The bytes of several buffers."""
FORMS: Final = 240
"""From here on a number is a form."""

OTHER_FORMS: Final = MappingProxyType(
    {
        OBJECT: ("an object", "recv_object()"),
        PICKLE: ("a pickled object", "recv_object(pickle=True), if you trust who sent it with your process"),
        BUFFERS: ("a list of buffers", "recv_iov()"),
    }
)
"""How errors name a form, and the verb that takes it."""

Key = tuple[int, int, int]


class Ordered(Protocol):
    """What can stand on a shelf."""

    order: int


T = TypeVar("T", bound=Ordered)


class FifoByKey(Generic[T]):
    """A queue for each key, in order of `order`; an empty queue leaves no trace."""

    __slots__ = ("_more", "first", "oldest")

    def __init__(self) -> None:
        self.oldest: dict[Key, T] = {}
        """The oldest thing of each key, to look at: empty if the shelf is."""
        self._more: dict[Key, list[T]] = {}  # what came after it
        self.first: Callable[[Key], T | None] = self.oldest.get
        """The oldest thing of this key, left where it is."""

    def __len__(self) -> int:
        return len(self.oldest) + sum(len(queue) for queue in self._more.values())

    def put(self, key: Key, thing: T) -> None:
        """In its place by order: usually behind everything, further ahead if it was taken before and comes back."""
        first = self.oldest.setdefault(key, thing)
        if first is thing:
            return
        if thing.order < first.order:
            self.oldest[key] = thing
            thing = first
        insort(self._more.setdefault(key, []), thing, key=_order_of)

    def drop_first(self, key: Key) -> None:
        """The oldest thing of this key, which `first` has shown, goes."""
        del self.oldest[key]
        if self._more and key in self._more:
            self._promote(key)

    def remove(self, key: Key, thing: T) -> bool:
        """Take this very thing out, wherever it stands. False if it is not here."""
        if self.first(key) is thing:
            self.drop_first(key)
            return True
        queue = self._more.get(key, [])
        if thing not in queue:
            return False
        queue.remove(thing)
        if not queue:
            del self._more[key]
        return True

    def heads(self) -> Iterator[tuple[Key, T]]:
        """The oldest thing of every key."""
        return iter(list(self.oldest.items()))

    def everything(self) -> list[T]:
        """All of it, oldest first within a key."""
        return [*self.oldest.values(), *(thing for queue in self._more.values() for thing in queue)]

    def _promote(self, key: Key) -> None:
        queue = self._more[key]
        self.oldest[key] = queue.pop(0)
        if not queue:
            del self._more[key]


def _order_of(thing: Ordered) -> int:
    return thing.order


ANY = -1
"""In a receive's key: any source, any tag."""


class MessageState(Enum):
    """See the module."""

    ENVELOPE = auto()
    BUFFERING = auto()
    DIRECT = auto()
    COMPLETE = auto()
    MOVING = auto()
    FINISHED = auto()


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
        self.state = MessageState.ENVELOPE
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


class ReceiveOwner(Protocol):
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

    def __init__(self, owner: ReceiveOwner, key: Key, into: memoryview | None, dtype: int) -> None:
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


ReceiveKind = Callable[[ReceiveOwner, Key, memoryview | None, int], Receive]
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

    def __init__(self, owner: ReceiveOwner, key: Key, into: memoryview | None, dtype: int) -> None:
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

    def __init__(self, owner: ReceiveOwner, key: Key, total: int, buffers: int) -> None:
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


class PostedReceives:
    """The waiting receives of one communicator. Changes under the node's lock."""

    __slots__ = ("_exact", "_first", "_wild")

    def __init__(self) -> None:
        self._exact: FifoByKey[Receive] = FifoByKey()
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


def move_message(message: Message, into: memoryview) -> bool:
    """Let the message be in `into`. True: all of it is there; False: the rest will come, or never will.

    The message is in state moving, so nobody else touches its memory. `arrived` may be set meanwhile by the driving
    thread: then the carrier answers that all has landed, or it landed in the new place after the redirection.
    """
    old = message.data
    assert old is not None
    if not message.arrived:
        outcome = message.origin.redirect(message, into)
        if outcome is not Redirected.LANDED:
            return False
    copy(old, into)
    return True


def make_room(receive: Receive, message: Message) -> bool:
    """Memory for a receive that brought none. The size is the sender's claim, so it may be absurd: False, and the
    receive is done.
    """
    try:
        receive.into = allocate(message.frame.length)
    except (MemoryError, ValueError):
        receive.finish(out_of_memory(receive, message.frame.length))
        return False
    return True


def out_of_memory(receive: Receive, size: int) -> MemoryError:
    """What a receive raises that brought no memory, if there is none for its message."""
    return MemoryError(
        f"{receive.name}: a message of {size} bytes does not fit into memory; it is kept: free some memory"
    )
