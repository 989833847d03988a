"""Control messages about one generation of one communicator find whoever keeps it on this node.

A peer may have opened a communicator a moment before us. What says that one of its calls came to nothing must not be
lost then: it is kept until the communicator opens here, within a bound. Questions are not: who asks does not wait that
long.

What a peer writes stands in our errors, and is passed on: so each text is cut to a line of a bounded length, and so are
the lists. An honest peer writes no more than that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import Final, Protocol, TypeAlias

from msgspec.structs import replace

from nexar.errors import NexarError
from nexar.transport.foreign_text import one_line
from nexar.types import NodeId
from nexar.wire.messages import Culprit, Disagreed, GaveUp, Inquire, Message, Report, Unheard

Notice: TypeAlias = Disagreed | GaveUp | Inquire | Report | Unheard

_FAREWELLS: Final = 1024  # generations that were closed, and about which questions are still answered: the newest
_KEPT: Final = 256  # for communicators that are not open yet
_LONGEST: Final = 1000  # characters of a text
_MOST: Final = 64  # entries of a list


class Speaker(Protocol):
    """Who said it, and can be answered: a link."""

    @property
    def peer(self) -> NodeId:
        """Its node."""

    def send_control(self, message: Message) -> bool:
        """See Link.send_control."""


Receive: TypeAlias = Callable[[Speaker, Notice], None]
Answer: TypeAlias = Callable[[Inquire], Notice]


class Notices:
    """The communicators of one node, as far as control messages need to know them."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock  # the node's, over all below
        self._open: dict[tuple[int, int], Receive] = {}  # by communicator and generation
        self._over: dict[int, int] = {}  # communicator → first generation that may still open
        self._answers: dict[tuple[int, int], Answer] = {}  # of generations that are over
        self._kept: list[tuple[Speaker, Notice]] = []
        self.dropped = 0
        """About generations that are over, or too many to be kept."""

    def open(self, communicator: int, generation: int, receive: Receive) -> None:
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

    def close(self, communicator: int, generation: int, answer: Answer | None = None) -> None:
        """The generation is over: what comes for it, or for those before, is dropped. `answer`: but for questions,
        which it answers, for as long as others ask. Idempotent.
        """
        with self._lock:
            if answer is not None:
                self._answers[communicator, generation] = answer
                while len(self._answers) > _FAREWELLS:
                    del self._answers[next(iter(self._answers))]
            self._open.pop((communicator, generation), None)
            self._over[communicator] = max(generation + 1, self._over.get(communicator, 0))
            self._kept = [each for each in self._kept if not self._is_over(each[1])]

    def arrived(self, speaker: Speaker, message: Message) -> None:
        """Any control message of a link; those that are about no communicator are dropped."""
        if not isinstance(message, (Disagreed, GaveUp, Inquire, Report, Unheard)):
            self.dropped += 1
            return
        message = _bounded(message)
        with self._lock:
            receive = self._open.get((message.communicator, message.generation))
            answer = self._answers.get((message.communicator, message.generation))
            if receive is None and (answer is None or not isinstance(message, Inquire)):
                self._keep(speaker, message)
        if receive is not None:
            receive(speaker, message)
        elif answer is not None and isinstance(message, Inquire):
            with suppress(NexarError):  # the link is lost: who asked hears of that
                speaker.send_control(answer(message))

    def _keep(self, speaker: Speaker, notice: Notice) -> None:
        if isinstance(notice, (Disagreed, GaveUp)) and not self._is_over(notice) and len(self._kept) < _KEPT:
            self._kept.append((speaker, notice))
        else:
            self.dropped += 1

    def _is_over(self, notice: Notice) -> bool:
        return notice.generation < self._over.get(notice.communicator, 0)


def _bounded(notice: Notice) -> Notice:
    if isinstance(notice, GaveUp):
        culprits = tuple(_bounded_culprit(each) for each in notice.culprits[:_MOST])
        return replace(notice, reason=_line(notice.reason), culprits=culprits)
    if isinstance(notice, Report):
        return replace(notice, doing=_line(notice.doing), finished=notice.finished and _line(notice.finished))
    if isinstance(notice, Disagreed) and len(notice.calls) > _MOST:
        return replace(notice, calls=dict(islice(notice.calls.items(), _MOST)))
    return notice


def _bounded_culprit(culprit: Culprit) -> Culprit:
    last, current = culprit.last_operation, culprit.current_operation
    return replace(
        culprit,
        missing=_line(culprit.missing),
        last_operation=last and _line(last),
        current_operation=current and _line(current),
    )


def _line(text: str) -> str:
    return one_line(text[:_LONGEST])
