"""Compares fingerprints of arriving frames with the local collective of that sequence number.

A rank makes one call per sequence number, so only a source's first frame in a sequence is compared.

Sequences begin in order, so each is *open* (begun, not ended), *over* (below the next, not open) or *to come*. Messages
of a sequence that is over are dropped and envelopes refused, so no sender waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations
from time import monotonic
from typing import Final, TypeAlias

from nexar.wire.frame import Frame

# Operation, dtype, count, root, reduce op, algorithm. 0 means not stated; without dtype, the count is not stated
# either.
CallFacts: TypeAlias = tuple[int, int, int, int, int, int]
# sequence, source node, their call, ours; called under the lock, so it may only enqueue
Mismatch: TypeAlias = Callable[[int, int, CallFacts, CallFacts], None]

REMEMBERED: Final = 1024  # ended calls that can still be compared: a power of two
_UNEXPECTED: Final = 4096  # limit of remembered first frames of calls to come


class MismatchDetector:
    """One per generation. The node's lock guards it."""

    __slots__ = (
        "_discard",
        "_early_frames",
        "_next",
        "_open",
        "_over",
        "_unexpected",
        "dropped",
        "heard",
        "on_mismatch",
    )

    def __init__(self, discard: Callable[[int, str], None]) -> None:
        """`discard(sequence, reason)` drops the unexpected messages of a sequence."""
        self._discard = discard
        self._next = 0  # the first sequence to come
        self._open: dict[int, tuple[CallFacts, dict[int, float]]] = {}
        self._over: list[tuple[int, CallFacts] | None] = [None] * REMEMBERED  # by sequence modulo REMEMBERED
        # first frames of calls to come, by sequence and source
        self._unexpected: dict[int, dict[int, tuple[CallFacts, float]]] = {}
        self._early_frames = 0
        self.heard: dict[int, float] = {}  # by node: when it last entered a sequence (time.monotonic)
        self.dropped = 0  # frames of sequences that are over
        self.on_mismatch: Mismatch | None = None

    # -- local calls ---------------------------------------------------------------------------------------

    def begin(self, sequence: int, call: CallFacts) -> dict[int, float]:
        """Return the arrival time of each source's first frame. The dict grows until the end."""
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
        self._over[sequence % REMEMBERED] = sequence, self._open.pop(sequence)[0]

    def give_up(self, sequence: int, reason: str) -> None:
        """End without a result. Cancel the receives first."""
        self.end(sequence)
        self._discard(sequence, reason)

    # -- frames of other ranks -----------------------------------------------------------------------------

    def check_frame(self, source: int, frame: Frame) -> bool:
        """Return False if its call is over: drop the frame."""
        found = self._open.get(frame.sequence)
        if found is not None and source in found[1]:
            return True
        theirs = frame.operation, frame.dtype, frame.count, frame.root, frame.reduce_op, frame.way
        if self.check_call(source, frame.sequence, theirs):
            return True
        self.dropped += 1
        return False

    def check_call(self, source: int, sequence: int, theirs: CallFacts) -> bool:
        """Return False if the local call is over."""
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
        """Return the local call; None if it is to come or too old."""
        found = self._open.get(sequence)
        if found is not None:
            return found[0]
        past = self._over[sequence % REMEMBERED]
        return past[1] if past is not None and past[0] == sequence else None

    def operation_of(self, sequence: int) -> int:
        """Return the operation of the local call, else of a call to come that another rank announced; 0 if unknown."""
        ours = self.call_of(sequence)
        if ours is not None:
            return ours[0]
        announced = next(iter(self._unexpected.get(sequence, {}).values()), None)
        return 0 if announced is None else announced[0][0]

    def is_announced(self, sequence: int) -> bool:
        """Whether any rank has entered this sequence to come."""
        return sequence in self._unexpected

    def _remember(self, sequence: int, source: int, theirs: CallFacts, now: float) -> None:
        early = self._unexpected.get(sequence)
        if not theirs[0] or (early is not None and source in early):
            return  # a call that is not stated may never be made
        if self._early_frames < _UNEXPECTED:
            self._early_frames += 1
            self._unexpected.setdefault(sequence, {})[source] = theirs, now

    def _compare(self, sequence: int, source: int, theirs: CallFacts, ours: CallFacts) -> None:
        if theirs != ours and self.on_mismatch is not None and differ(theirs, ours):
            self.on_mismatch(sequence, source, theirs, ours)


def differ(one: CallFacts, other: CallFacts) -> bool:
    """Whether two calls differ in what both state."""
    if not one[0] or not other[0]:
        return False
    if one[0] != other[0] or one[3:5] != other[3:5]:
        return True
    if one[1] and other[1] and one[1:3] != other[1:3]:
        return True
    return bool(one[5] and other[5]) and one[5] != other[5]


def same_but_for_algorithm(calls: Iterable[CallFacts]) -> bool:
    """Whether these calls differ at most in the algorithm."""
    return not any(differ((*one[:5], 0), (*other[:5], 0)) for one, other in combinations(set(calls), 2))
