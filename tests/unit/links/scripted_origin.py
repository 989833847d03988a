"""A link that does what a test says, for matching alone."""

from __future__ import annotations

import threading
from collections.abc import Callable

from nexar.links.flow_control import UnexpectedBuffers
from nexar.links.matching import Matching
from nexar.links.messages import Message
from nexar.links.operation import DeferredIO
from nexar.transport.base import Redirected
from nexar.transport.buffer_pool import BufferPool, Lease
from nexar.wire.frame import Frame, FrameKind, Space

TAGGED, UNTAGGED = int(Space.TAGGED), int(Space.UNTAGGED)


class ScriptedOrigin:
    """Remembers what it was asked to do. A payload lands when the test says so."""

    rank = 3

    def __init__(self) -> None:
        self.granted: list[Message] = []
        self.refused: list[Message] = []
        self.credits: dict[Message, int] = {}  # how often each message's credit was given back
        self.places: dict[int, memoryview | None] = {}
        self.landed: set[int] = set()
        self.on_redirect: Callable[[], None] = lambda: None  # what happens in another thread just then

    def grant(self, message: Message, into: memoryview) -> None:
        self.granted.append(message)
        self.places[message.frame.transfer] = into

    def redirect(self, message: Message, into: memoryview | None) -> Redirected:
        hook, self.on_redirect = self.on_redirect, lambda: None
        hook()
        transfer = message.frame.transfer
        if transfer in self.landed:
            return Redirected.COMPLETE
        old = self.places.get(transfer)
        if old is None:
            return Redirected.UNKNOWN
        if into is not None:
            into[:] = old
        self.places[transfer] = into
        return Redirected.MOVED

    def refuse(self, message: Message, reason: str) -> None:
        self.redirect(message, None)
        self.refused.append(message)

    def consumed(self, message: Message) -> None:
        self.credits[message] = self.credits.get(message, 0) + 1

    def pour(self, matching: Matching, message: Message, data: bytes) -> None:
        """The payload arrives, wherever it is expected now."""
        place = self.places[message.frame.transfer]
        assert place is not None
        place[:] = data
        self.landed.add(message.frame.transfer)
        with matching.lock:
            matching.payload_complete(message)
        matching._deferred_io.flush()


class NoMemory(BufferPool):
    """The system refuses every byte."""

    def __init__(self) -> None:
        super().__init__([(1, 0)])

    def take(self, size: int) -> Lease:
        raise MemoryError(f"{size} bytes")


def make(early_bytes: int = 1 << 20, pool: BufferPool | None = None) -> tuple[Matching, ScriptedOrigin]:
    unexpected_buffers = UnexpectedBuffers(early_bytes, pool or BufferPool.of_profile("training"))
    return Matching(0, 0, threading.Lock(), unexpected_buffers, DeferredIO()), ScriptedOrigin()


def arrive(
    matching: Matching, origin: ScriptedOrigin, data: bytes, *, source: int = 1, tag: int = 7, dtype: int = 0
) -> bool:
    frame = Frame(kind=FrameKind.EAGER, space=TAGGED, tag=tag, dtype=dtype, length=len(data), body=len(data))
    with matching.lock:
        taken = matching.arrive(origin, source, frame, (), memoryview(data))
    matching._deferred_io.flush()
    return taken


def announce(
    matching: Matching, origin: ScriptedOrigin, size: int, transfer: int, *, source: int = 1, tag: int = 7
) -> Message:
    frame = Frame(kind=FrameKind.ENVELOPE, space=TAGGED, tag=tag, transfer=transfer, length=size)
    with matching.lock:
        message = matching.announce(origin, source, frame, ())
    matching._deferred_io.flush()
    return message
