"""Router and NoticeDispatch: deliver frames and control notices to their open generation.

Frames, abort and mismatch notices of a generation that is not open yet are kept, within a bound. Progress queries are
not: their sender does not wait so long. Those of an ended generation are dropped and counted. Texts and lists of peers
are bounded, because they appear in our errors and are forwarded.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from msgspec.structs import replace

from nexar.config import Config
from nexar.errors import NexarError, Revoked, UsageError
from nexar.links.flow_control import UnexpectedBuffers
from nexar.links.matching import Matching
from nexar.links.operation import DeferredIO
from nexar.links.progress import Progress
from nexar.transport.buffer_pool import BufferPool
from nexar.types import NodeId
from nexar.wire.control import (
    Blamed,
    CallAborted,
    CallMismatch,
    CommunicatorClosed,
    Message,
    ProgressQuery,
    ProgressReply,
)
from nexar.wire.frame import HEADER_BYTES, Frame
from nexar.wire.text import foreign_line

if TYPE_CHECKING:
    from nexar.links.link import Link

Notice: TypeAlias = CallMismatch | CallAborted | ProgressQuery | ProgressReply | CommunicatorClosed

_CLOSED_KEPT: Final = 1024  # the newest closed generations, for which queries are still answered
_KEPT: Final = 256  # for communicators that are not open yet
_MAX_CHARACTERS: Final = 1000  # characters of a text
_MAX_ENTRIES: Final = 64  # entries of a list


ReceiveNotice: TypeAlias = Callable[["Link", Notice], None]
AnswerQuery: TypeAlias = Callable[[ProgressQuery], Notice]


class NoticeDispatch:
    """Delivers control notices to communicators."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock  # the node's, guards everything below
        self._open: dict[tuple[int, int], ReceiveNotice] = {}  # by communicator and generation
        self._over: dict[int, int] = {}  # communicator → first generation that may still open
        self._answers: dict[tuple[int, int], AnswerQuery] = {}  # of generations that are over
        self._kept: list[tuple[Link, Notice]] = []
        self.dropped = 0  # notices of generations that are over, or too many to keep

    def open(self, communicator: int, generation: int, receive: ReceiveNotice) -> None:
        """Deliver kept notices to `receive` now, later ones on the driver thread. It runs without the lock and must not
        block.
        """
        key = communicator, generation
        with self._lock:
            self._open[key] = receive
            kept = [each for each in self._kept if (each[1].communicator, each[1].generation) == key]
            self._kept = [each for each in self._kept if (each[1].communicator, each[1].generation) != key]
        for sender, notice in kept:
            receive(sender, notice)

    def close(self, communicator: int, generation: int, answer: AnswerQuery | None = None) -> None:
        """Drop notices of this and earlier generations. `answer` still answers queries. Idempotent."""
        with self._lock:
            if answer is not None:
                self._answers[communicator, generation] = answer
                while len(self._answers) > _CLOSED_KEPT:
                    del self._answers[next(iter(self._answers))]
            self._open.pop((communicator, generation), None)
            self._over[communicator] = max(generation + 1, self._over.get(communicator, 0))
            self._kept = [each for each in self._kept if not self._is_over(each[1])]

    def arrived(self, sender: Link, message: Message) -> None:
        """Drop messages that concern no communicator."""
        if not isinstance(message, (CallMismatch, CallAborted, ProgressQuery, ProgressReply, CommunicatorClosed)):
            self.dropped += 1
            return
        message = _bounded(message)
        with self._lock:
            receive = self._open.get((message.communicator, message.generation))
            answer = self._answers.get((message.communicator, message.generation))
            if receive is None and (answer is None or not isinstance(message, ProgressQuery)):
                self._keep(sender, message)
        if receive is not None:
            receive(sender, message)
        elif answer is not None and isinstance(message, ProgressQuery):
            with suppress(NexarError):  # the link is lost, as the peer notices
                sender.send_control(answer(message))

    def _keep(self, sender: Link, notice: Notice) -> None:
        if isinstance(notice, (CallMismatch, CallAborted)) and not self._is_over(notice) and len(self._kept) < _KEPT:
            self._kept.append((sender, notice))
        else:
            self.dropped += 1

    def _is_over(self, notice: Notice) -> bool:
        return notice.generation < self._over.get(notice.communicator, 0)


def _bounded(notice: Notice) -> Notice:
    if isinstance(notice, CallAborted):
        culprits = tuple(_bounded_culprit(each) for each in notice.culprits[:_MAX_ENTRIES])
        return replace(notice, reason=_line(notice.reason), culprits=culprits)
    if isinstance(notice, ProgressReply):
        return replace(notice, doing=_line(notice.doing), finished=notice.finished and _line(notice.finished))
    if isinstance(notice, CallMismatch) and len(notice.calls) > _MAX_ENTRIES:
        return replace(notice, calls=dict(islice(notice.calls.items(), _MAX_ENTRIES)))
    return notice


def _bounded_culprit(culprit: Blamed) -> Blamed:
    last, current = culprit.last_operation, culprit.current_operation
    return replace(
        culprit,
        missing=_line(culprit.missing),
        last_operation=last and _line(last),
        current_operation=current and _line(current),
    )


def _line(text: str) -> str:
    return foreign_line(text[:_MAX_CHARACTERS])


_UNOPENED_CREDITS = 16  # credits' worth of frames that each peer may send to unopened communicators


class _Kept(NamedTuple):
    """A frame of an unopened communicator."""

    owner: object
    size: int
    deliver: Callable[[], None]


class Router:
    """The communicators of one node, as links see them."""

    def __init__(self, node: NodeId, config: Config, progress: Progress) -> None:
        self.node = node
        self.config = config
        self.progress = progress
        self.lock = progress.lock
        self.deferred_io = DeferredIO()
        self.notices = NoticeDispatch(self.lock)
        self.pool = BufferPool.of_profile(config.buffer_profile)
        self.unexpected_buffers = UnexpectedBuffers(config.early_bytes, self.pool)
        # Handles relay frames, on the driver thread; False for other kinds. Set before the first link.
        self.relay: Callable[[Any, Frame, memoryview], bool] = _relays_nothing
        self.stale_frames = 0  # of generations that are over; under the lock
        self._open: dict[int, Matching] = {}  # under the lock
        self._over: dict[int, int] = {}  # communicator → first generation that may still open; under the lock
        self._unopened: dict[tuple[int, int], list[_Kept]] = {}  # under the lock
        self._unopened_bytes: Counter[object] = Counter()  # by owner; under the lock
        self._links: dict[Callable[[Matching, NexarError], None], None] = {}  # called when a generation ends
        self._watchers: dict[Callable[[NodeId, NexarError], None], None] = {}  # called when a peer is lost

    def on_generation_end(self, callback: Callable[[Matching, NexarError], None]) -> Callable[[], None]:
        """Call `callback` under the lock when a generation ends. Return an idempotent unregister function, which needs
        no lock.
        """
        self._links[callback] = None
        return lambda: self._links.pop(callback, None)

    def open(
        self,
        communicator: int,
        generation: int = 0,
        members: frozenset[NodeId] | None = None,
        make: Callable[..., Matching] = Matching,
        *,
        may_be_over: bool = False,
    ) -> Matching:
        """Open a generation, and deliver kept frames. `members` None: every node with a link. `make` runs under the
        lock. Raises UsageError if the generation is over; with `may_be_over`, returns a closed matching.
        """
        with self.lock:
            is_over = self.is_over(communicator, generation)
            if is_over and not may_be_over:
                raise UsageError(f"generation {generation} of communicator {communicator} is over already")
            if is_over:
                closed = make(
                    communicator, generation, self.lock, self.unexpected_buffers, self.deferred_io, members=members
                )
                closed.close(Revoked(communicator=str(communicator), reason=f"generation {generation} is over"))
                return closed
            previous = self._open.get(communicator)
            if previous is not None:
                self._end(
                    previous, Revoked(communicator=str(communicator), reason=f"generation {generation} has begun")
                )
            matching = make(
                communicator, generation, self.lock, self.unexpected_buffers, self.deferred_io, members=members
            )
            self._open[communicator] = matching
            self._over[communicator] = generation
            kept = self._unopened.pop((communicator, generation), [])
            self._release(kept)
            self._drop_superseded(communicator, generation)
        for frame in kept:
            frame.deliver()
        self.deferred_io.flush()
        return matching

    def close(self, matching: Matching, error: NexarError) -> None:
        """Receives raise `error`; later frames are dropped. Idempotent."""
        with self.lock:
            self._end(matching, error)
        self.deferred_io.flush()

    def _end(self, matching: Matching, error: NexarError) -> None:
        if self._open.get(matching.communicator) is not matching:
            return
        del self._open[matching.communicator]
        self._over[matching.communicator] = matching.generation + 1
        for callback in list(self._links):  # first: carriers must release the memory that closing frees
            callback(matching, error)
        matching.close(error)

    def find(self, communicator: int, generation: int) -> Matching | None:
        """Under the lock."""
        matching = self._open.get(communicator)
        return matching if matching is not None and matching.generation == generation else None

    def matchings(self) -> list[Matching]:
        return list(self._open.values())

    def lose(self, peer: NodeId, error: NexarError) -> None:
        """Report a lost peer to every communicator. Under the lock."""
        for matching in self.matchings():
            matching.lose(peer, error)
        for callback in list(self._watchers):
            callback(peer, error)

    def on_peer_lost(self, callback: Callable[[NodeId, NexarError], None]) -> Callable[[], None]:
        """Call `callback` under the lock when a peer is lost. Return an idempotent unregister function."""
        self._watchers[callback] = None
        return lambda: self._watchers.pop(callback, None)

    def current(self, communicator: int) -> Matching:
        """Raise UsageError if not open. Under the lock."""
        matching = self._open.get(communicator)
        if matching is None:
            raise UsageError(f"communicator {communicator} is not open on this node")
        return matching

    def keep(self, owner: object, frame: Frame, deliver: Callable[[], None]) -> bool:
        """Keep a frame of an unopened generation; drop one of an ended one. Return False above the owner's bound. Under
        the lock.
        """
        if self.is_over(frame.communicator, frame.generation):
            self.stale_frames += 1
            return True
        size = HEADER_BYTES + frame.body
        if self._unopened_bytes[owner] + size > _UNOPENED_CREDITS * self.config.credit_bytes:
            return False
        self._unopened_bytes[owner] += size
        kept = _Kept(owner, size, deliver)
        self._unopened.setdefault((frame.communicator, frame.generation), []).append(kept)
        return True

    def is_over(self, communicator: int, generation: int) -> bool:
        """Whether this generation can no longer open here. Under the lock."""
        return generation < self._over.get(communicator, 0)

    def forget(self, owner: object) -> None:
        """Drop the frames of a lost connection. Under the lock."""
        del self._unopened_bytes[owner]
        for key, frames in list(self._unopened.items()):
            self._unopened[key] = [kept for kept in frames if kept.owner is not owner]
            if not self._unopened[key]:
                del self._unopened[key]

    def _drop_superseded(self, communicator: int, generation: int) -> None:
        """Drop frames of skipped generations, which never open."""
        for key in [key for key in self._unopened if key[0] == communicator and key[1] < generation]:
            frames = self._unopened.pop(key)
            self.stale_frames += len(frames)
            self._release(frames)

    def _release(self, frames: list[_Kept]) -> None:
        for kept in frames:
            self._unopened_bytes[kept.owner] -= kept.size


def _relays_nothing(_link: object, _frame: Frame, _body: memoryview) -> bool:
    return False
