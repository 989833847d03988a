"""Agreement of a new generation's members on the last call that all of them completed. Pure.

Dissemination: in step i each rank sends its minimum and maximum 2**i ranks further. Counting a value twice does not
change a minimum, so after ⌈log₂ n⌉ steps every rank has it, and none before all took part. Call numbers of different
generations are not comparable: then no call counts as completed by all.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from nexar.types import Rank

# The number of a member that has completed no call.
NONE_COMPLETED: Final = -1
# The number of a new member: it does not affect the minimum.
UNCONSTRAINED: Final = (1 << 63) - 1


class CompletedCalls(NamedTuple):
    """The last call a member completed."""

    generation: int  # its previous generation
    number: int  # NONE_COMPLETED if none


NEW_MEMBER: Final = CompletedCalls(UNCONSTRAINED, UNCONSTRAINED)


class CompletionNews(NamedTuple):
    """What a rank knows: the least call number, and the range of generations that the numbers belong to."""

    least: int
    oldest: int
    newest: int

    def merged(self, other: CompletionNews) -> CompletionNews:
        return CompletionNews(
            min(self.least, other.least), min(self.oldest, other.oldest), max(self.newest, other.newest)
        )


class SendNews(NamedTuple):
    """Send these news to this rank, and expect those of the same step from rank `source`."""

    rank: Rank
    source: Rank
    step: int
    news: CompletionNews


class CompletionExchange:
    """One rank's part. Send what `start` and `received` return, until `result` is known."""

    def __init__(self, rank: Rank, size: int, mine: CompletedCalls) -> None:
        self._rank = rank
        self._size = size
        self._known = CompletionNews(
            mine.number, mine.generation, NONE_COMPLETED if mine == NEW_MEMBER else mine.generation
        )
        self._step = 0
        self._early: dict[int, CompletionNews] = {}  # news of later steps

    @property
    def result(self) -> int | None:
        """The last call that all members completed: NONE_COMPLETED also if their generations differ, UNCONSTRAINED if
        all are new. None while it is not known.
        """
        if self._distance < self._size:
            return None
        return self._known.least if self._known.newest in (NONE_COMPLETED, self._known.oldest) else NONE_COMPLETED

    def start(self) -> list[SendNews]:
        """Call it once."""
        return self._send()

    def received(self, step: int, news: CompletionNews) -> list[SendNews]:
        """News may come early, and more than once."""
        if self._step <= step and 1 << step < self._size:
            self._early.setdefault(step, news)
        sends: list[SendNews] = []
        while self._step in self._early:
            self._known = self._known.merged(self._early.pop(self._step))
            self._step += 1
            sends += self._send()
        return sends

    @property
    def _distance(self) -> int:
        return 1 << self._step

    def _send(self) -> list[SendNews]:
        if self._distance >= self._size:
            return []
        there, back = (self._rank + self._distance) % self._size, (self._rank - self._distance) % self._size
        return [SendNews(there, back, self._step, self._known)]


def completed_by_all(result: int) -> int | None:
    """What BuildFinished reports for this result: None if there is no such call."""
    return None if result in (NONE_COMPLETED, UNCONSTRAINED) else result
