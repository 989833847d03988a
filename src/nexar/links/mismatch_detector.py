"""Which collectives this rank has called, and what the others say that theirs are.

Law: every frame of a call carries the call's fingerprint, and a rank makes one call for each sequence number. So the
first frame of a source in a sequence says it all; it is compared with the call made here under that number, whether
that is under way, over, or still to come. What follows from the same source costs one look.

Sequences are begun in order. So a sequence is *open* (begun, not ended), *over* (below the next, not open) or *to
come*. Nobody will ever ask for a message of one that is over: what comes for it is dropped, and an envelope refused,
so that its sender does not wait for ever. That needs no memory of what was given up, however long ago.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations
from time import monotonic
from typing import Final, TypeAlias

from nexar.wire.frame import Frame

CallFacts: TypeAlias = tuple[int, int, int, int, int, int]
"""Operation, dtype, count, root, reduce op, way. Operation 0: not stated; dtype 0: neither dtype nor count is; way 0:
the way is not."""
Mismatch: TypeAlias = Callable[[int, int, CallFacts, CallFacts], None]
"""Sequence, source node, their call, ours. Called under the lock: it may only hand over."""

REMEMBERED: Final = 1024
"""Calls that are over and can still be compared: a power of two."""
_UNEXPECTED: Final = 4096  # first frames of calls to come that are remembered


class MismatchDetector:
    """Of one generation of one communicator. Everything under the node's lock."""

    __slots__ = (
        "_discard",
        "_early_frames",
        "_next",
        "_open",
        "_over",
        "_unexpected",
        "dropped",
        "heard",
        "on_disagreement",
    )

    def __init__(self, discard: Callable[[int, str], None]) -> None:
        """`discard(sequence, reason)` drops the messages of a sequence that nobody has asked for."""
        self._discard = discard
        self._next = 0  # the first sequence to come
        self._open: dict[int, tuple[CallFacts, dict[int, float]]] = {}
        self._over: list[tuple[int, CallFacts] | None] = [
            None
        ] * REMEMBERED  # by sequence, the newest of each remainder
        self._unexpected: dict[int, dict[int, tuple[CallFacts, float]]] = {}  # first frames of calls to come, by source
        self._early_frames = 0
        self.heard: dict[int, float] = {}
        """By node: when it last began to speak in a sequence (time.monotonic)."""
        self.dropped = 0
        """Frames of sequences that are over."""
        self.on_disagreement: Mismatch | None = None

    # -- calls made here ---------------------------------------------------------------------------------

    def begin(self, sequence: int, call: CallFacts) -> dict[int, float]:
        """This rank makes the call. Returns when each source was first heard of in it; that grows until the end."""
        self._next = sequence + 1
        arrivals: dict[int, float] = {}
        self._open[sequence] = call, arrivals
        if self._unexpected:
            self._take_early(sequence, call, arrivals)
        return arrivals

    def _take_early(self, sequence: int, call: CallFacts, arrivals: dict[int, float]) -> None:
        early = self._unexpected.pop(sequence, {})
        self._early_frames -= len(early)
        for source, (theirs, when) in early.items():
            arrivals[source] = when
            self._compare(sequence, source, theirs, call)

    def end(self, sequence: int) -> None:
        """The call has all that it wanted."""
        self._over[sequence % REMEMBERED] = sequence, self._open.pop(sequence)[0]

    def give_up(self, sequence: int, reason: str) -> None:
        """The call has ended otherwise. None of its receives is posted any more; what waits for them goes."""
        self.end(sequence)
        self._discard(sequence, reason)

    # -- frames of others --------------------------------------------------------------------------------

    def saw(self, source: int, frame: Frame) -> bool:
        """A frame of a collective has come. False: its call is over here, so it is to be dropped."""
        found = self._open.get(frame.sequence)
        if found is not None and source in found[1]:
            return True
        theirs = frame.operation, frame.dtype, frame.count, frame.root, frame.reduce_op, frame.way
        if self.told(source, frame.sequence, theirs):
            return True
        self.dropped += 1
        return False

    def told(self, source: int, sequence: int, theirs: CallFacts) -> bool:
        """A source says what its call of this sequence is. False: ours is over."""
        self.heard[source] = now = monotonic()
        found = self._open.get(sequence)
        if found is not None:
            found[1].setdefault(source, now)
            self._compare(sequence, source, theirs, found[0])
            return True
        if sequence >= self._next:
            self._remember(sequence, source, theirs, now)
            return True
        past = self.call_of(sequence)
        if past is not None:
            self._compare(sequence, source, theirs, past)
        return False

    def call_of(self, sequence: int) -> CallFacts | None:
        """What was called here, if it is not too long ago."""
        found = self._open.get(sequence)
        if found is not None:
            return found[0]
        past = self._over[sequence % REMEMBERED]
        return past[1] if past is not None and past[0] == sequence else None

    def is_told_of(self, sequence: int) -> bool:
        """Has anybody said what its call of this sequence to come is?"""
        return sequence in self._unexpected

    def _remember(self, sequence: int, source: int, theirs: CallFacts, now: float) -> None:
        early = self._unexpected.get(sequence)
        if not theirs[0] or (early is not None and source in early):
            return  # what is not stated is no call, and need never be made
        if self._early_frames < _UNEXPECTED:
            self._early_frames += 1
            self._unexpected.setdefault(sequence, {})[source] = theirs, now

    def _compare(self, sequence: int, source: int, theirs: CallFacts, ours: CallFacts) -> None:
        if theirs != ours and self.on_disagreement is not None and differ(theirs, ours):
            self.on_disagreement(sequence, source, theirs, ours)


def differ(one: CallFacts, other: CallFacts) -> bool:
    """Are these two different calls, so far as both are stated?"""
    if not one[0] or not other[0]:
        return False
    if one[0] != other[0] or one[3:5] != other[3:5]:
        return True
    if one[1] and other[1] and one[1:3] != other[1:3]:
        return True
    return bool(one[5] and other[5]) and one[5] != other[5]


def same_but_for_algorithm(calls: Iterable[CallFacts]) -> bool:
    """Whether nothing but the way tells any two of these calls apart."""
    return not any(differ((*one[:5], 0), (*other[:5], 0)) for one, other in combinations(set(calls), 2))
