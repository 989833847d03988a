"""Control messages about one generation of one communicator find whoever keeps it on this node.

A peer may have opened a communicator a moment before us. What says that one of its calls came to nothing must not be
lost then: it is kept until the communicator opens here, within a bound. Questions are not: who asks does not wait that
long.

What a peer writes stands in our errors, and is passed on: so each text is cut to a line of a bounded length, and so are
the lists. An honest peer writes no more than that.

Where the links of one node meet its communicators: arriving frames find the matching they belong to.

A peer may have opened a communicator a moment before us, so frames of a generation that is not open *yet* are kept
until it is, within a bound; frames of one that is over are dropped and counted.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

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

Notice: TypeAlias = CallMismatch | CallAborted | ProgressQuery | ProgressReply | CommunicatorClosed

_CLOSED_KEPT: Final = 1024  # generations that were closed, and about which questions are still answered: the newest
_KEPT: Final = 256  # for communicators that are not open yet
_LONGEST: Final = 1000  # characters of a text
_MOST: Final = 64  # entries of a list


class NoticeTarget(Protocol):
    """Who said it, and can be answered: a link."""

    @property
    def peer(self) -> NodeId:
        """Its node."""

    def send_control(self, message: Message) -> bool:
        """See Link.send_control."""


ReceiveNotice: TypeAlias = Callable[[NoticeTarget, Notice], None]
AnswerQuery: TypeAlias = Callable[[ProgressQuery], Notice]


class NoticeDispatch:
    """The communicators of one node, as far as control messages need to know them."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock  # the node's, over all below
        self._open: dict[tuple[int, int], ReceiveNotice] = {}  # by communicator and generation
        self._over: dict[int, int] = {}  # communicator → first generation that may still open
        self._answers: dict[tuple[int, int], AnswerQuery] = {}  # of generations that are over
        self._kept: list[tuple[NoticeTarget, Notice]] = []
        self.dropped = 0
        """About generations that are over, or too many to be kept."""

    def open(self, communicator: int, generation: int, receive: ReceiveNotice) -> None:
        """`receive` gets what comes for this generation, on the driving thread and without the lock; now, what came
        before. It must not block.
        """
        key = communicator, generation
        with self._lock:
            self._open[key] = receive
            early = [each for each in self._kept if (each[1].communicator, each[1].generation) == key]
            self._kept = [each for each in self._kept if (each[1].communicator, each[1].generation) != key]
        for speaker, notice in early:
            receive(speaker, notice)

    def close(self, communicator: int, generation: int, answer: AnswerQuery | None = None) -> None:
        """The generation is over: what comes for it, or for those before, is dropped. `answer`: but for questions,
        which it answers, for as long as others ask. Idempotent.
        """
        with self._lock:
            if answer is not None:
                self._answers[communicator, generation] = answer
                while len(self._answers) > _CLOSED_KEPT:
                    del self._answers[next(iter(self._answers))]
            self._open.pop((communicator, generation), None)
            self._over[communicator] = max(generation + 1, self._over.get(communicator, 0))
            self._kept = [each for each in self._kept if not self._is_over(each[1])]

    def arrived(self, speaker: NoticeTarget, message: Message) -> None:
        """Any control message of a link; those that are about no communicator are dropped."""
        if not isinstance(message, (CallMismatch, CallAborted, ProgressQuery, ProgressReply, CommunicatorClosed)):
            self.dropped += 1
            return
        message = _bounded(message)
        with self._lock:
            receive = self._open.get((message.communicator, message.generation))
            answer = self._answers.get((message.communicator, message.generation))
            if receive is None and (answer is None or not isinstance(message, ProgressQuery)):
                self._keep(speaker, message)
        if receive is not None:
            receive(speaker, message)
        elif answer is not None and isinstance(message, ProgressQuery):
            with suppress(NexarError):  # the link is lost: who asked hears of that
                speaker.send_control(answer(message))

    def _keep(self, speaker: NoticeTarget, notice: Notice) -> None:
        if isinstance(notice, (CallMismatch, CallAborted)) and not self._is_over(notice) and len(self._kept) < _KEPT:
            self._kept.append((speaker, notice))
        else:
            self.dropped += 1

    def _is_over(self, notice: Notice) -> bool:
        return notice.generation < self._over.get(notice.communicator, 0)


def _bounded(notice: Notice) -> Notice:
    if isinstance(notice, CallAborted):
        culprits = tuple(_bounded_culprit(each) for each in notice.culprits[:_MOST])
        return replace(notice, reason=_line(notice.reason), culprits=culprits)
    if isinstance(notice, ProgressReply):
        return replace(notice, doing=_line(notice.doing), finished=notice.finished and _line(notice.finished))
    if isinstance(notice, CallMismatch) and len(notice.calls) > _MOST:
        return replace(notice, calls=dict(islice(notice.calls.items(), _MOST)))
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
    return foreign_line(text[:_LONGEST])


_UNOPENED_CREDITS = 16  # of each peer this many credits' worth of frames is kept for communicators not opened yet


class _Kept(NamedTuple):
    """A frame that came before its communicator was opened."""

    owner: object
    size: int
    deliver: Callable[[], None]


class Router:
    """The communicators of one node, as far as links need to know them."""

    def __init__(self, node: NodeId, config: Config, progress: Progress) -> None:
        self.node = node
        self.config = config
        self.progress = progress
        self.lock = progress.lock
        self.deferred_io = DeferredIO()
        self.notices = NoticeDispatch(self.lock)
        self.pool = BufferPool.of_profile(config.buffer_profile)
        self.early = UnexpectedBuffers(config.early_bytes, self.pool)
        self.relay: Callable[[Any, Frame, memoryview], bool] = _relays_nothing
        """Takes frames of a link that are about relaying, on the driving thread; False: they are not. Written before
        the first link."""
        self.stale_frames = 0  # of generations that are over; under the lock
        self._open: dict[int, Matching] = {}  # under the lock
        self._over: dict[int, int] = {}  # communicator → first generation that may still open; under the lock
        self._unopened: dict[tuple[int, int], list[_Kept]] = {}  # under the lock
        self._unopened_bytes: Counter[object] = Counter()  # by owner; under the lock
        self._links: dict[Callable[[Matching, NexarError], None], None] = {}  # told when a generation ends
        self._watchers: dict[Callable[[NodeId, NexarError], None], None] = {}  # told when a peer is lost

    def tell_of_ends(self, callback: Callable[[Matching, NexarError], None]) -> Callable[[], None]:
        """`callback` runs under the lock whenever a generation is closed: what a link does in it is over.

        Returns what takes it back; that may be called under the lock or not, and twice.
        """
        self._links[callback] = None
        return lambda: self._links.pop(callback, None)

    def open(
        self,
        communicator: int,
        generation: int = 0,
        members: frozenset[NodeId] | None = None,
        make: Callable[..., Matching] = Matching,
    ) -> Matching:
        """Begin a generation of a communicator. Frames that came too early for it are delivered now.

        `members`: the nodes that take part; None: whoever has a link. `make`: of another kind; called under the lock.
        """
        with self.lock:
            if generation < self._over.get(communicator, 0):
                raise UsageError(f"generation {generation} of communicator {communicator} is over already")
            previous = self._open.get(communicator)
            if previous is not None:
                self._end(
                    previous, Revoked(communicator=str(communicator), reason=f"generation {generation} has begun")
                )
            matching = make(communicator, generation, self.lock, self.early, self.deferred_io, members=members)
            self._open[communicator] = matching
            self._over[communicator] = generation
            early = self._unopened.pop((communicator, generation), [])
            self._release(early)
            self._drop_superseded(communicator, generation)
        for kept in early:
            kept.deliver()
        self.deferred_io.flush()
        return matching

    def close(self, matching: Matching, error: NexarError) -> None:
        """End a generation: its receives raise `error`, its later frames are dropped. Idempotent."""
        with self.lock:
            self._end(matching, error)
        self.deferred_io.flush()

    def _end(self, matching: Matching, error: NexarError) -> None:
        if self._open.get(matching.communicator) is not matching:
            return
        del self._open[matching.communicator]
        self._over[matching.communicator] = matching.generation + 1
        for tell in list(self._links):  # first: they make the carriers let go of the memory that closing frees
            tell(matching, error)
        matching.close(error)

    def find(self, communicator: int, generation: int) -> Matching | None:
        """The matching of an open generation. Under the lock."""
        matching = self._open.get(communicator)
        return matching if matching is not None and matching.generation == generation else None

    def matchings(self) -> list[Matching]:
        """Every open generation. Under the lock."""
        return list(self._open.values())

    def lose(self, peer: NodeId, error: NexarError) -> None:
        """This peer will send no more: every communicator that it takes part in is told. Under the lock."""
        for matching in self.matchings():
            matching.lose(peer, error)
        for tell in list(self._watchers):
            tell(peer, error)

    def tell_of_losses(self, callback: Callable[[NodeId, NexarError], None]) -> Callable[[], None]:
        """`callback` runs under the lock whenever a peer is lost. Returns what takes it back, also twice."""
        self._watchers[callback] = None
        return lambda: self._watchers.pop(callback, None)

    def current(self, communicator: int) -> Matching:
        """The open generation of a communicator. Under the lock. UsageError if there is none."""
        matching = self._open.get(communicator)
        if matching is None:
            raise UsageError(f"communicator {communicator} is not open on this node")
        return matching

    def keep(self, owner: object, frame: Frame, deliver: Callable[[], None]) -> bool:
        """Keep a frame of a generation that is not open yet, or drop one that is over.

        Under the lock. False: too much is kept for this owner, whom it came from.
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
        """It was open here, or a later one was. Under the lock."""
        return generation < self._over.get(communicator, 0)

    def forget(self, owner: object) -> None:
        """Drop what is kept for it: frames of a connection that is over belong to no flow any more. Under the lock."""
        del self._unopened_bytes[owner]
        for key, frames in list(self._unopened.items()):
            self._unopened[key] = [kept for kept in frames if kept.owner is not owner]
            if not self._unopened[key]:
                del self._unopened[key]

    def _drop_superseded(self, communicator: int, generation: int) -> None:
        """Generations that were skipped will never be opened: drop what came for them."""
        for key in [key for key in self._unopened if key[0] == communicator and key[1] < generation]:
            frames = self._unopened.pop(key)
            self.stale_frames += len(frames)
            self._release(frames)

    def _release(self, frames: list[_Kept]) -> None:
        for kept in frames:
            self._unopened_bytes[kept.owner] -= kept.size


def _relays_nothing(_link: object, _frame: Frame, _body: memoryview) -> bool:
    """A node that no station belongs to."""
    return False
